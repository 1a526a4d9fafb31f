"""`rlfe train --gpus N` as a user meets it: plan, refusals, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlfe.cli import main
from rlfe.records import read_jsonl
from tests.test_train_cli import OWN, small

SETS = (
    *("task.name=vowels", "task.module=vowels.py", "prompt.style=base", "model.max_len=128"),
    *("train.steps=6", "train.max_tokens=10", "train.prompts_per_step=3", "train.group_size=4"),
    *("engine.threads=1", "engine.device=cpu", "model.dtype=float32", "save.every=2"),
    *("optim.lr=1e-2", "kl.beta=0.01"),
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_says_how_groups_are_divided(capsys) -> None:
    words = ["train", "--recipe", "tiny", "--set", "model.path=org/name", "--gpus", "2"]
    assert main.run([*words, "--dry-run"], {}) == 0
    out = capsys.readouterr().out
    assert "ranks        2: each samples and judges 1 groups of 4 a step" in out
    assert out.splitlines()[-1].endswith("--gpus 2")


def test_an_engine_that_does_not_learn_in_ranks_is_refused(capsys) -> None:
    assert main.run([*small(), "--gpus", "2"], {}) == 2
    assert 'engine.learner = "fake" trains in one process, not in 2' in capsys.readouterr().err
    assert not Path("runs").exists()


def test_more_ranks_than_gpus_are_refused(capsys) -> None:
    sets = ["--set", "model.path=org/name", "--set", "engine.device=auto"]
    words = ["train", "--recipe", "tiny", *sets, "--gpus", "99"]
    assert main.run(words, {}) == 2
    assert "99 processes need 99 GPUs on this machine" in capsys.readouterr().err


def start(model: Path, name: str, *more: str) -> subprocess.Popen[str]:
    sets = [word for text in (*SETS, f"model.path={model}") for word in ("--set", text)]
    words = [sys.executable, "-m", "rlfe", "train", *sets, "--gpus", "2", "--name", name, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)


def rank_process(parent: int, rank: int) -> int:
    """Process id of a rank, as /proc tells it."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            named = f"\0RANK={rank}\0" in (folder / "environ").read_text()
        except OSError:
            continue
        if int(state[1]) == parent and named:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_a_killed_rank_ends_all_with_one_error_and_the_run_goes_on(tiny_model: Path) -> None:
    Path("vowels.py").write_text(OWN)
    whole = start(tiny_model, "whole")
    assert whole.communicate(timeout=600)[1].count("error:") == 0
    cut, metrics = start(tiny_model, "cut"), Path("runs/cut/metrics.jsonl")
    deadline = time.monotonic() + 600
    while len(read_jsonl(metrics)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(rank_process(cut.pid, 1), signal.SIGKILL)
    said = cut.communicate(timeout=600)[1]
    assert cut.returncode == 1
    assert said.count("error:") == 1
    assert "--resume" in said
    again = start(tiny_model, "cut", "--resume")
    again.communicate(timeout=600)
    assert again.returncode == 0
    files = [Path("runs") / n / "global_step_6" / "model.safetensors" for n in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
