"""The exact engine: killed evaluations end with the tables of an unbroken one, byte for byte."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlfe.config import dump, load
from rlfe.eval.frames import frames

CELL = "tiny_mbpp_nobuf_lr1e3"
SETS = [
    "prompt.style=base", "engine.threads=1", "engine.device=cpu", "model.max_len=512",
    "eval.gsm8k.n=10", "eval.gsm8k.limit=4", "eval.gsm8k.max_tokens=24",
]  # fmt: skip


def make_run(root: Path, model: Path) -> None:
    run = root / "runs" / CELL
    run.mkdir(parents=True)
    for step in (2, 4):
        shutil.copytree(model, run / f"global_step_{step}")
    recipe = load([], [f"model.path={model}", *SETS]).recipe
    (run / "config.toml").write_text(dump(recipe))


def start(root: Path, *more: str) -> subprocess.Popen[str]:
    words = ["eval", "--ckpt-glob", "runs/*/global_step_*", "--base", *more]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rlfe", *words], cwd=root, env=env, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def tables(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (root / "runs/_tables").iterdir()}


def killed_and_resumed(root: Path, kills: int, chance: random.Random) -> int:
    """Kill the evaluation `kills` times at random moments after its first line; then let it end."""
    done = 0
    for _ in range(kills):
        child = start(root)
        assert child.stderr is not None
        child.stderr.readline()
        time.sleep(chance.uniform(0.0, 2.5))
        child.kill()
        done += child.wait() != 0
        child.stderr.close()
    child = start(root)
    _, errors = child.communicate()
    assert child.returncode == 0, errors
    return done


def test_ctrl_c_exits_130_and_keeps_what_is_finished(tiny_model: Path, tmp_path: Path) -> None:
    make_run(tmp_path, tiny_model)
    child = start(tmp_path)
    assert child.stderr is not None
    while not any(len(list(frames(f))) > 1 for f in tmp_path.rglob("step_*.jsonl.zst")):
        time.sleep(0.05)
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate()
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    assert list((tmp_path / "runs").rglob("step_*.jsonl.zst"))


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_sigkill_at_random_moments_changes_no_byte_of_the_tables(
    tiny_model: Path, tmp_path: Path, kills: int
) -> None:
    for name in ("broken", "whole"):
        make_run(tmp_path / name, tiny_model)
    killed_and_resumed(tmp_path / "broken", kills, random.Random(kills))
    killed_and_resumed(tmp_path / "whole", 0, random.Random(0))
    assert tables(tmp_path / "broken") == tables(tmp_path / "whole")
    assert len(tables(tmp_path / "whole")) == 6
