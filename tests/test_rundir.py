"""Run folders: no silent overwrite, resume checks, writes that kills and full disks survive."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import pytest

from rlfe import checkpoints, config, rundir
from rlfe.errors import RequestError, RlfeError
from rlfe.rundir import RunDir


def recipe(*sets):
    return config.load([], ["model.path=m", "prompt.style=base", *sets])


def create(run, *sets, **named):
    resolved = recipe(*sets)
    return run.create(resolved.recipe, resolved.origins, **named)


def test_every_path_of_a_run_lies_in_its_folder(tmp_path):
    run = RunDir(tmp_path / "tiny_mbpp_nobuf_lr1e3")
    assert run.name == "tiny_mbpp_nobuf_lr1e3"
    paths = [run.config, run.provenance, run.metrics, run.state, run.log, run.private,
             run.checkpoint(30), run.rollouts(30), run.evals("gsm8k")]  # fmt: skip
    assert [str(path.relative_to(run.path)) for path in paths] == [
        "config.toml", "provenance.json", "metrics.jsonl", "state", "logs/train.log", ".rlfe",
        "global_step_30", "rollouts/step_000030.jsonl.zst", "evals/gsm8k",
    ]  # fmt: skip


def test_a_new_run_records_its_settings_versions_and_where_they_came_from(tmp_path):
    run = RunDir(tmp_path / "run")
    assert create(run, "optim.lr=3e-6", data_hashes={"mbpp": "ab"}) is False
    assert config.read_run_config(run.path).optim.lr == 3e-6
    facts = json.loads(run.provenance.read_text())
    assert facts["data"] == {"mbpp": "ab"}
    assert facts["origins"]["optim.lr"] == "--set"
    assert facts["packages"]["numpy"]
    assert "loss.old" not in facts["origins"]


def test_the_record_lists_what_the_study_leaves_open(tmp_path):
    run = RunDir(tmp_path / "run")
    create(run, 'study.assumptions=["kl.beta: not said"]')
    facts = json.loads(run.provenance.read_text())
    assert facts["assumptions"] == ["kl.beta: not said"]


def test_a_run_is_never_silently_overwritten(tmp_path):
    run = RunDir(tmp_path / "run")
    create(run)
    with pytest.raises(RequestError, match="exists") as caught:
        create(run)
    assert all(way in caught.value.hint for way in ("--resume", "--overwrite", "--name"))
    (run.path / "metrics.jsonl").write_text("{}\n")
    create(run, overwrite=True)
    assert not run.metrics.exists()


def test_a_folder_that_is_no_run_is_not_even_overwritten_when_asked(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RequestError, match=r"no config\.toml"):
        create(RunDir(tmp_path), overwrite=True)
    with pytest.raises(RequestError, match=r"no config\.toml"):
        create(RunDir(tmp_path), resume=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_resuming_goes_on_with_the_same_settings_only(tmp_path):
    run = RunDir(tmp_path / "run")
    create(run, "optim.lr=3e-6")
    assert create(run, "optim.lr=3e-6", resume=True) is True
    with pytest.raises(RequestError, match=r"optim\.lr: 3e-06 then, 6e-06 now"):
        create(run, "optim.lr=6e-6", resume=True)
    assert create(run, "optim.lr=3e-6", "track.project=x", "about=y", resume=True) is True


def test_resuming_before_there_is_a_folder_starts_afresh(tmp_path):
    assert create(RunDir(tmp_path / "run"), resume=True) is False


def test_a_recipe_that_never_resumes_refuses_a_folder_with_checkpoints(tmp_path):
    run = RunDir(tmp_path / "run")
    create(run, "run.resume=never")
    assert create(run, "run.resume=never", resume=True) is True
    run.checkpoint(20).mkdir()
    with pytest.raises(RequestError, match="never"):
        create(run, "run.resume=never", resume=True)


def test_steps_are_the_checkpoint_folders_in_numeric_order(tmp_path):
    for name in ("global_step_100", "global_step_30", "global_step_9.tmp", "logs"):
        (tmp_path / name).mkdir()
    assert RunDir(tmp_path).steps() == [30, 100]
    assert RunDir(tmp_path / "none").steps() == []


def interrupt(target, name):
    """Fail while a folder is being written."""
    with suppress(ZeroDivisionError), rundir.new_folder(target) as folder:
        (folder / name).write_text("half")
        raise ZeroDivisionError


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "global_step_30"
    interrupt(target, "a")
    assert list(tmp_path.iterdir()) == []
    with rundir.new_folder(target) as folder:
        (folder / "a").write_text("new")
        assert not target.exists()
    assert (target / "a").read_text() == "new"


def test_replacing_a_folder_keeps_the_old_one_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "state"
    with rundir.new_folder(target) as folder:
        (folder / "a").write_text("old")
    interrupt(target, "b")
    assert [path.name for path in target.iterdir()] == ["a"]
    with rundir.new_folder(target) as folder:
        (folder / "b").write_text("new")
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_replacement_that_was_killed_between_its_renames_is_settled(tmp_path):
    old = tmp_path / ".state.old"
    old.mkdir()
    (old / "a").write_text("old")
    rundir.settle(tmp_path / "state")
    assert (tmp_path / "state" / "a").read_text() == "old"
    old.mkdir()
    rundir.settle(tmp_path / "state")
    assert not old.exists()


WRITER = """
    import sys, time
    from pathlib import Path
    from rlfe.rundir import new_folder
    with new_folder(Path(sys.argv[1])) as folder:
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_bytes(Path(sys.argv[2], name).read_bytes())
        print("written", flush=True)
        time.sleep(60)
"""


def complete_checkpoint(folder):
    folder.mkdir(parents=True)
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    weights = len(header).to_bytes(8, "little") + header + b"\0\0\x80?"
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_kill_9_while_a_checkpoint_is_written_leaves_nothing_that_a_listing_accepts(tmp_path):
    whole = complete_checkpoint(tmp_path / "run" / "global_step_30")
    target = tmp_path / "run" / "global_step_60"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(target), str(whole)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for pattern in ("global_step_*", "*"):
        listing = checkpoints.find([str(tmp_path / "run" / pattern)])
        assert [found.step for found in listing.found] == [30]
    with rundir.new_folder(target) as folder:  # the next save clears what the kill left
        assert list(folder.iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "global_step_30",
        "global_step_60",
    ]


FULL = """
    import resource, sys
    from pathlib import Path
    from rlfe.errors import RlfeError
    from rlfe.rundir import new_folder, write_text
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        with new_folder(Path(sys.argv[1])) as folder:
            (folder / "model.safetensors").write_bytes(bytes(200_000))
    except RlfeError as error:
        print(error)
    try:
        write_text(Path(sys.argv[2]), "x" * 200_000)
    except RlfeError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
def test_a_quota_while_saving_names_the_path_and_what_was_kept(tmp_path):
    state, note = tmp_path / "state", tmp_path / "note.txt"
    state.mkdir()
    (state / "old").write_text("old")
    note.write_text("old")
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(state), str(note)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == f"disk full while writing {state}. {state} is as before."
    assert "--resume" in lines[1]
    assert lines[2] == f"disk full while writing {note}. What was there before is kept."
    assert [path.name for path in state.iterdir()] == ["old"]
    assert note.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["note.txt", "state"]


SMALL = """
    import sys
    from pathlib import Path
    from rlfe.errors import RlfeError
    from rlfe.rundir import new_folder
    try:
        with new_folder(Path(sys.argv[1], "global_step_30")) as folder:
            (folder / "model.safetensors").write_bytes(bytes(4_000_000))
    except RlfeError as error:
        print(error.what)
    print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
"""


def small_disk_allowed():
    probe = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(probe, capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not small_disk_allowed(), reason="mounting a small tmpfs is not allowed here")
def test_a_full_disk_while_saving_leaves_no_trace_of_the_half_checkpoint(tmp_path):
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", str(tmp_path), sys.executable,
               textwrap.dedent(SMALL)]  # fmt: skip
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    step = tmp_path / "global_step_30"
    assert lines == [
        f"disk full while writing {step}. Everything saved before is kept.",
        "[]",
    ]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
    ],
)
def test_a_full_disk_is_recognised_in_every_librarys_words(tmp_path, error):
    with (
        pytest.raises(RlfeError, match="disk full while writing"),
        rundir.new_folder(tmp_path / "state"),
    ):
        raise error


def test_other_errors_pass_through_unchanged(tmp_path):
    with pytest.raises(ValueError, match="mine"), rundir.new_folder(tmp_path / "state"):
        raise ValueError("mine")


def test_files_are_replaced_whole_with_their_newlines_as_given(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    rundir.write_text(path, "a\r\nb\n")
    rundir.write_text(path, "c\r\n")
    assert path.read_bytes() == b"c\r\n"
    assert os.listdir(path.parent) == ["a.txt"]


def test_provenance_costs_little(tmp_path):
    start = time.monotonic()
    facts = rundir.provenance()
    assert {"rlfe", "git_commit", "python", "platform", "packages", "data"} <= set(facts)
    assert time.monotonic() - start < 5
