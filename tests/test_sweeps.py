"""Sweeps: a matrix becomes cells, cells run as processes, and a second call does what is left."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from rlfe import config, records, sweeps
from rlfe.cli import workers
from rlfe.cli.main import run
from rlfe.errors import RequestError
from rlfe.rundir import RunDir
from tests.test_checkpoints import checkpoint

RECIPE = """
[model]
path = "org/small"
[prompt]
style = "base"
[train]
steps = 4
[matrix]
arm = [{ "replay.strategy" = "none" }, { "replay.strategy" = "hard", "replay.lambda" = 0.2 }]
"optim.lr" = [1e-5, 1e-6]
"""
NAMES = [
    "small_mbpp_nobuf_lr1e5",
    "small_mbpp_nobuf_lr1e6",
    "small_mbpp_hard_lam0p2_lr1e5",
    "small_mbpp_hard_lam0p2_lr1e6",
]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(RECIPE)
    return "mine.toml"


def test_a_matrix_is_every_combination_with_the_last_key_varying_fastest(recipe):
    found = sweeps.cells([recipe])
    assert [cell.name for cell in found] == NAMES
    assert found[2].overrides == ("replay.strategy=hard", "replay.lambda=0.2", "optim.lr=1e-5")
    assert found[2].recipe.replay.weight == 0.2


def test_what_set_fixes_is_no_longer_varied(recipe):
    found = sweeps.cells([recipe], ["optim.lr=3e-6"])
    assert [cell.name for cell in found] == [
        "small_mbpp_nobuf_lr3e6", "small_mbpp_hard_lam0p2_lr3e6"
    ]  # fmt: skip
    assert [cell.name for cell in sweeps.cells([recipe], ["replay.strategy=none"])] == NAMES[:2]
    both = [cell.name for cell in sweeps.cells([recipe], ["replay.lambda=0.3", "optim.lr=1e-5"])]
    assert both == ["small_mbpp_nobuf_lr1e5", "small_mbpp_hard_lam0p3_lr1e5"]


def test_a_recipe_without_matrix_is_one_cell():
    assert [cell.name for cell in sweeps.cells(["tiny"])] == ["tiny_mbpp_nobuf_lr1e5"]


def test_cells_that_would_share_a_folder_are_refused(recipe):
    with pytest.raises(RequestError, match="two cells are named small_mbpp_nobuf_lr1e5"):
        sweeps.cells([recipe], ['matrix.arm=[{"kl.beta"=0.0}, {"kl.beta"=0.1}]'])


def test_a_refused_cell_is_refused_before_anything_runs(recipe):
    with pytest.raises(RequestError, match="dr_grpo"):
        sweeps.cells([recipe], ['matrix."advantage.name"=["grpo", "dr_grpo"]'])


def test_a_cells_overrides_leave_nothing_open(recipe):
    for cell in sweeps.cells([recipe]):
        assert sweeps.varied(config.load([recipe], cell.overrides)) == []


def test_what_is_still_open_of_a_matrix_is_named(recipe):
    named = ["replay.strategy", "replay.lambda", "optim.lr"]
    assert sweeps.varied(config.load([recipe])) == named
    assert sweeps.varied(config.load([recipe], ["replay.strategy=none"])) == ["optim.lr"]
    half = ["replay.strategy=hard", "optim.lr=1e-5"]  # the arm's lambda is 0.2, the default 0.1
    assert sweeps.varied(config.load([recipe], half)) == ["replay.lambda"]


def started(runs, name, step=0, done=False):
    folder = RunDir(runs / name)
    resolved = config.load([], ["train.steps=4"])
    folder.create(resolved.recipe, resolved.origins)
    if step:
        records.append_jsonl(folder.metrics, {"step": step})
    if done:
        checkpoint(folder.checkpoint(4))


def test_progress_is_read_from_the_run_folder(recipe, tmp_path):
    cells = sweeps.cells([recipe])
    started(tmp_path / "runs", NAMES[0], 4, done=True)
    started(tmp_path / "runs", NAMES[1], 3)
    told = [tuple(map(str, (at.state, at.step, at.total))) for at in
            (sweeps.progress(cell, tmp_path / "runs") for cell in cells)]  # fmt: skip
    assert told == [
        ("done", "4", "4"),
        ("begun", "3", "4"),
        ("to do", "0", "4"),
        ("to do", "0", "4"),
    ]


def test_without_run_the_table_shows_how_far_each_cell_is(recipe, tmp_path, capsys):
    started(tmp_path / "runs", NAMES[1], 3)
    assert run(["sweep", recipe], {}) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:3] for line in out.splitlines()[1:3]] == [
        [NAMES[0], "to", "do"],
        [NAMES[1], "begun", "3"],
    ]
    assert err == "Next: rlfe sweep mine.toml --run\n"


def test_slurm_prints_an_array_script_with_a_resumable_task_a_cell(recipe, capsys):
    assert run(["sweep", recipe, "--slurm", "--engine", "vllm"], {}) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=mine\n#SBATCH --array=0-3\n")
    assert (
        "3) exec rlfe train --recipe mine.toml --set replay.strategy=hard --set replay.lambda=0.2 "
        "--set optim.lr=1e-6 --runs-dir runs --engine vllm --resume ;;" in out
    )


FAKE_TRAIN = """
    import json, os, sys
    from pathlib import Path
    sys.path.insert(0, os.environ["FAKE_HOME"])
    from rlfe import sweeps
    words = sys.argv[2:]
    sets = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
    cell = sweeps.cells(["mine.toml"], sets)[0]
    line = {"cell": cell.name, "resume": "--resume" in words,
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    print("trained", cell.name)
    code = json.loads(os.environ["FAKE_CODES"]).get(cell.name, 0)
    if code == 0:
        from tests.test_sweeps import started
        if "--resume" not in words:
            started(Path("runs"), cell.name, 4)
        from tests.test_checkpoints import checkpoint
        checkpoint(Path("runs", cell.name, "global_step_4"))
    sys.exit(code)
"""


@pytest.fixture
def fake_train(recipe, tmp_path, monkeypatch):
    """A stand-in for `python -m rlfe train` that makes finished runs in no time."""
    script = tmp_path / "fake_train.py"
    script.write_text(textwrap.dedent(FAKE_TRAIN))
    home = str(Path(__file__).parent.parent)
    environment = {**os.environ, "FAKE_HOME": home, "FAKE_CODES": "{}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    real = workers.subprocess.Popen

    def start(command, **named):
        return real([sys.executable, str(script), *command[3:]], **named)

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    return environment


def calls():
    return [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]


def test_running_skips_finished_cells_and_resumes_begun_ones(fake_train, tmp_path, capsys):
    started(tmp_path / "runs", NAMES[0], 4, done=True)
    started(tmp_path / "runs", NAMES[1], 3)
    assert run(["sweep", "mine.toml", "--run", "--jobs", "2"], fake_train) == 0
    out, err = capsys.readouterr()
    made = {call["cell"]: call["resume"] for call in calls()}
    assert made == {NAMES[1]: True, NAMES[2]: False, NAMES[3]: False}
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["done"] * 4
    assert f"{NAMES[0]}: done, skipped" in err
    assert (tmp_path / "runs" / "_sweep" / f"{NAMES[2]}.log").read_text() == f"trained {NAMES[2]}\n"


def test_a_failing_cell_does_not_stop_the_others_and_is_done_again(fake_train, capsys):
    failing = {**fake_train, "FAKE_CODES": json.dumps({NAMES[0]: 1})}
    assert run(["sweep", "mine.toml", "--run", "--jobs", "2"], failing) == 1
    assert f"{NAMES[0]}: exit 1, see runs/_sweep/{NAMES[0]}.log" in capsys.readouterr().err
    assert len(calls()) == 4
    assert run(["sweep", "mine.toml", "--run", "--jobs", "2"], fake_train) == 0
    assert [call["cell"] for call in calls()[4:]] == [NAMES[0]]


def test_a_cell_that_a_rule_ended_is_told_and_not_run_again(fake_train, tmp_path, capsys):
    started(tmp_path / "runs", NAMES[0], 2)
    ruled = {**fake_train, "FAKE_CODES": json.dumps({NAMES[0]: 3})}
    assert run(["sweep", "mine.toml", "--run", "--jobs", "4"], ruled) == 3
    assert f"a rule ended {NAMES[0]}" in capsys.readouterr().err
    assert run(["sweep", "mine.toml", "--run", "--json"], fake_train) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["state"] == "ended by a rule"
    assert len(calls()) == 4


def test_each_job_gets_a_gpu_of_its_own(fake_train):
    visible = {**fake_train, "CUDA_VISIBLE_DEVICES": "4,7"}
    assert run(["sweep", "mine.toml", "--run", "--jobs", "2"], visible) == 0
    assert {call["gpu"] for call in calls()} == {"4", "7"}
    assert run(["sweep", "mine.toml", "--run", "--jobs", "3"], visible) == 2


def test_run_and_slurm_exclude_each_other(recipe, capsys):
    assert run(["sweep", recipe, "--run", "--slurm"], {}) == 2
    assert "exclude each other" in capsys.readouterr().err
