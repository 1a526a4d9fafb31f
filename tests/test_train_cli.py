"""`rlfe train` as a user meets it: plan, refusals, exit codes, streams, Ctrl-C."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlfe.cli import main
from rlfe.errors import RlfeError
from rlfe.records import read_jsonl
from rlfe.rundir import RunDir
from rlfe.training import loop
from rlfe.training.lock import held

SMALL = [
    *("--recipe", "tiny", "--engine", "fake", "--set", "data.size=3"),
    *("--set", "train.max_tokens=20", "--set", "model.max_len=4096"),
]


def rlfe(*words: str, environment: dict[str, str] | None = None) -> int:
    """Exit code of a command line in this process."""
    return main.run(list(words), environment or {})


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def small(*words: str) -> list[str]:
    """Four steps of the fake engine."""
    return ["train", *SMALL, *words]


def test_help_shows_sections_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlfe("train", "--help") == 0
    shown = capsys.readouterr().out
    for words in ("What to run", "--resume", "--dry-run", "Examples", "rlfe train --recipe tiny"):
        assert words in shown


def test_a_run_ends_with_a_table_and_the_next_command(capsys) -> None:
    assert rlfe(*small("--name", "x_mbpp_nobuf_lr1e5")) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == ["runs/x_mbpp_nobuf_lr1e5", "done", "4", "2,", "4"]
    assert "step 4/4" in err
    assert "Next: rlfe eval --ckpt-glob 'runs/x_mbpp_nobuf_lr1e5/global_step_*'" in err
    assert len(read_jsonl(Path("runs/x_mbpp_nobuf_lr1e5/metrics.jsonl"))) == 4


def test_json_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlfe(*small("--json", "-q")) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == "rlfe.train/1"
    assert [row["step"] for row in document["rows"]] == [2, 4]
    assert document["run"]["status"] == "done"
    assert "step 1/4" not in err


def test_a_run_is_never_silently_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlfe(*small()) == 0
    before = sorted(Path("runs").rglob("*"))
    assert rlfe(*small()) == 2
    err = capsys.readouterr().err
    assert "--resume" in err
    assert "--overwrite" in err
    assert sorted(Path("runs").rglob("*")) == before
    assert rlfe(*small("--overwrite")) == 0


def test_resume_of_a_whole_run_says_that_nothing_is_left(capsys) -> None:
    assert rlfe(*small()) == 0
    assert rlfe(*small("--resume")) == 0
    assert "nothing left to do" in capsys.readouterr().err


def test_resume_with_another_seed_is_refused_with_the_key(capsys) -> None:
    assert rlfe(*small("--name", "x")) == 0
    assert rlfe(*small("--name", "x", "--resume", "--seed", "3")) == 2
    assert "run.seed: 0 then, 3 now" in capsys.readouterr().err


def test_a_dry_run_shows_the_plan_and_writes_nothing(capsys, tiny_model: Path) -> None:
    words = ["train", "--recipe", "tiny", "--set", f"model.path={tiny_model}", "--dry-run"]
    assert rlfe(*words) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[-1] == shlex.join(["rlfe", *words[:-1]])
    steps = next(line.split() for line in lines if line.startswith("train.steps "))
    assert steps[1] == "4"
    assert steps[2].startswith("tiny.toml:")
    assert "tokens       at most 256 a step (8 rollouts)" in out
    assert "checkpoints  2: 2, 4 (0.0" in out
    assert not Path("runs").exists()


def test_a_dry_run_in_json_ends_with_the_real_command(capsys) -> None:
    words = ["train", "--recipe", "tiny", "--set", "model.path=org/name", "--seed", "4"]
    assert rlfe(*words, "--dry-run", "--json") == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["command"] == shlex.join(["rlfe", *words])
    assert run["warnings"] == ["prompts not measured: org/name is no folder on this machine"]
    assert run["checkpoints"] == [2, 4]
    assert run["bytes_free"] > 0
    assert run["bytes_per_checkpoint"] is None  # that model folder is not here


PLAIN = """
import importlib.util, socket, sys
for name in ("torch", "transformers", "vllm", "datasets", "peft"):
    sys.modules[name] = None  # as if it were not installed
def refuse(*_, **__):
    raise AssertionError("the dry run used the network")
socket.socket.connect = socket.getaddrinfo = refuse
from rlfe import config
from rlfe.cli import main
for name in config.shipped():
    here = [] if "/" in config.load([name]).recipe.model.path else ["--set", "model.path=org/name"]
    code = main.run(["train", "--recipe", name, *here, "--dry-run"], {})
    assert code == 0, (name, code)
"""


def test_shipped_recipes_dry_run_without_network_and_without_training_packages() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed: the real command needs it" in done.stderr
    assert 'engine.sampler = "vllm", but vllm is not installed' in done.stderr
    assert "DeepCoder-Preview-Dataset is not looked up in a dry run" in done.stderr


def test_a_dry_run_without_transformers_says_that_prompts_are_not_measured(
    capsys, monkeypatch, tiny_model: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = ["train", "--recipe", "tiny", "--set", f"model.path={tiny_model}"]
    assert rlfe(*words, "--dry-run") == 0
    assert "prompts not measured: transformers is not installed" in capsys.readouterr().err
    assert rlfe(*words) == 2
    assert 'engine "transformers" needs transformers' in capsys.readouterr().err


def test_a_dry_run_refuses_prompts_that_do_not_fit(capsys, tiny_model: Path) -> None:
    sets = ["--set", f"model.path={tiny_model}", "--set", "model.max_len=100"]
    assert rlfe("train", "--recipe", "tiny", *sets, "--dry-run") == 2
    assert "prompts are longer than" in capsys.readouterr().err


def test_a_dry_run_refuses_the_folder_of_an_earlier_run(capsys) -> None:
    assert rlfe(*small("--name", "x")) == 0
    before = sorted(Path("runs").rglob("*"))
    for more, code in (([], 2), (["--resume", "--seed", "3"], 2), (["--resume"], 0)):
        assert rlfe(*small("--name", "x", *more, "--dry-run")) == code
    assert rlfe(*small("--name", "x", "--overwrite", "--dry-run")) == 0
    assert "--overwrite" in capsys.readouterr().err
    assert sorted(Path("runs").rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train"], 2, "no recipe given"),
        (["train", "--recipe", "tinny"], 2, 'did you mean "tiny"'),
        (["train", "--recipe", "tiny", "--set", "optim.learning_rate=1"], 2, "optim.lr"),
        (["train", "--recipe", "tiny", "--set", "model.path=nowhere"], 5, "nowhere does not exist"),
        (["train", "--recipe", "tiny", "--engine", "tinker"], 2, "trains LoRA weights only"),
        (
            ["train", "--recipe", "tiny", "--set", "engine.learner=tinker"],
            *(2, "trains LoRA weights only"),
        ),
        (["train", "--recipe", "lr-ladder"], 2, "it is a sweep"),
        (small("--resume", "--overwrite"), 2, "exclude each other"),
        (small("--set", "task.name=mbppp"), 2, "Did you mean mbpp?"),
        (small("--set", "loss.clip_low=1.5"), 2, "no lower bound"),
        (small("--set", 'data.ids=["nope"]'), 2, "is not a training problem"),
        (small("--set", "model.max_len=100"), 2, "prompts are longer than"),
        (small("--set", "replay.strategy=hard", "--set", "replay.rollouts=500"), 2, "500 is more"),
    ],
)
def test_bad_requests_end_with_one_clear_error(capsys, words, code: int, said: str) -> None:
    planned = [] if "lr-ladder" in words else ["--dry-run"]  # one run of a sweep can be planned
    for more in ([], planned):
        assert rlfe(*words, *more) == code
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
    assert not list(Path(".").glob("runs/*/config.toml"))


def test_a_model_without_tokenizer_is_refused(capsys, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, "bare")
    Path("bare/tokenizer.json").unlink()
    for more in ([], ["--dry-run"]):
        assert rlfe("train", "--recipe", "tiny", "--set", "model.path=bare", *more) == 2
        assert "no tokenizer" in capsys.readouterr().err
    Path("bare/config.json").unlink()
    for more in ([], ["--dry-run"]):
        assert rlfe("train", "--recipe", "tiny", "--set", "model.path=bare", *more) == 5
        assert "no config.json" in capsys.readouterr().err


def test_a_rule_that_ends_a_run_exits_with_3(capsys) -> None:
    rules = ["--set", "filter.strategy=top_p", "--set", "filter.value=0.9"]
    stop = ["--set", "filter.empty_stop_steps=2"]
    assert rlfe(*small(*rules, *stop)) == 3  # babble solves nothing: every step is empty
    assert "kept nothing for 2 steps in a row" in capsys.readouterr().err
    assert [path.name for path in Path("runs").glob("*/global_step_*")] == ["global_step_2"]


def test_resume_of_a_run_that_a_rule_ended_says_why_and_trains_nothing(capsys) -> None:
    rules = ["--set", "filter.strategy=top_p", "--set", "filter.value=0.9"]
    words = small("--name", "x", *rules, "--set", "filter.empty_stop_steps=2")
    assert rlfe(*words) == 3
    before = Path("runs/x/metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert rlfe(*words, "--resume") == 3
    out, err = capsys.readouterr()
    assert "empty" in out
    assert "kept nothing for 2 steps in a row" in err
    assert "start it again with --overwrite" in err
    assert Path("runs/x/metrics.jsonl").read_bytes() == before
    assert rlfe(*words, "--overwrite") == 3


def test_a_second_process_in_one_run_folder_is_refused(capsys) -> None:
    assert rlfe(*small("--name", "x")) == 0
    with held(RunDir("runs/x")):
        for flag in ("--resume", "--overwrite"):
            assert rlfe(*small("--name", "x", flag)) == 2
            assert "another process is training in runs/x" in capsys.readouterr().err
    assert rlfe(*small("--name", "x", "--resume")) == 0


def test_a_failed_run_names_the_step_to_go_on_from(capsys, monkeypatch) -> None:
    def no_room(*_: object) -> None:
        raise RlfeError("disk full while writing rollouts")

    def after_step_2(job: object, step: int, *rest: object) -> None:
        return no_room() if step == 2 else None

    monkeypatch.setattr(loop, "write_rollouts", after_step_2)
    assert rlfe(*small("--name", "x")) == 1
    err = capsys.readouterr().err
    assert "The state after step 2 is whole; go on with: rlfe train" in err
    assert "--resume" in err


SLOW = """
import sys, time
from rlfe.engines import fake
def slow(request, row):
    time.sleep(0.02)
    return "no"
fake.FakeSampler.__init__.__defaults__ = (slow,)
from rlfe.cli import main
main.main(sys.argv[1:])
"""


def interrupted(folder: Path, signals: int) -> tuple[int, str]:
    """Run many slow steps in a process of its own and send it SIGINT after the first line."""
    words = [sys.executable, "-c", SLOW, *small("--name", "x", "--set", "train.steps=500")]
    process = subprocess.Popen(
        words, cwd=folder, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    metrics, deadline = folder / "runs" / "x" / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_ctrl_c_ends_the_step_and_saves(tmp_path: Path) -> None:
    code, err = interrupted(tmp_path, signals=1)
    assert code == 130
    assert "stopping after this step" in err
    assert "--resume" in err.splitlines()[-1]
    state = json.loads((tmp_path / "runs" / "x" / "state" / "state.json").read_text())
    assert state["step"] == len(read_jsonl(tmp_path / "runs" / "x" / "metrics.jsonl"))
    ended = json.loads((tmp_path / "runs" / "x" / "provenance.json").read_text())["ended"]
    assert ended == f"interrupted after step {state['step']}"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    code, err = interrupted(tmp_path, signals=2)
    assert code == 130
    assert "Traceback" not in err


OWN = """
def problems(split):
    return [{"id": f"vowels/{i}", "prompt": "say " + "ab" * i} for i in range(4)]

def prompt(problem, style):
    return problem["prompt"] if isinstance(problem, dict) else problem.prompt

def judge(problem, text):
    return any(letter in text for letter in "aeiou")
"""


def test_an_own_task_in_one_file_trains_a_real_model(capsys, tiny_model, one_thread) -> None:
    Path("vowels.py").write_text(OWN)
    sets = {
        **{"task.name": "vowels", "task.module": "vowels.py", "model.path": str(tiny_model)},
        **{"prompt.style": "base", "model.max_len": 128, "train.steps": 2, "train.max_tokens": 12},
        **{"train.prompts_per_step": 2, "train.group_size": 4, "engine.threads": 1},
        **{"engine.device": "cpu", "model.dtype": "float32", "save.every": 1},
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    assert rlfe("train", *words, "--name", "tiny_vowels_nobuf_lr1e6", "--json", "-q") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in document["rows"]] == [1, 2]
    run = Path("runs/tiny_vowels_nobuf_lr1e6")
    digest = hashlib.sha256(Path("vowels.py").read_bytes()).hexdigest()
    assert json.loads((run / "provenance.json").read_text())["data"] == {"vowels": digest}
    assert read_jsonl(run / "metrics.jsonl")[0]["reward/mean"] > 0


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "_base", "a b", ".hidden", "new\nline"])
def test_a_run_lies_in_the_runs_folder_under_a_plain_name(capsys, name: str) -> None:
    assert rlfe(*small("--name", name)) == 2
    assert "is no name of a run folder" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_name_that_no_report_can_read_is_warned_of_before_it_trains(capsys) -> None:
    assert rlfe(*small("--name", "x", "--dry-run")) == 0
    assert "neither reported nor pushed" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "missing file"])
def test_a_damaged_state_is_not_called_whole(capsys, damage: str) -> None:
    assert rlfe(*small("--name", "x")) == 0
    if damage == "truncated":
        Path("runs/x/state/state.json").write_text('{"step": 1')
    else:
        next(path for path in Path("runs/x/state/learner").iterdir()).unlink()
    capsys.readouterr()
    assert rlfe(*small("--name", "x", "--resume")) == 1
    said = capsys.readouterr().err
    assert "--overwrite" in said
    assert "is whole" not in said
    assert "Traceback" not in said


def test_a_file_in_the_place_of_a_run_is_a_wrong_request(capsys) -> None:
    Path("runs").mkdir()
    Path("runs/x").write_text("a file")
    assert rlfe(*small("--name", "x")) == 2
    assert "runs/x" in capsys.readouterr().err
