"""`rlfe eval` on vLLM (CPU): five checkpoints, two tasks, one engine; a kill loses no block.

Slow: an engine takes its time to start. Runs where vllm is installed.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rlfe.config import dump, load
from rlfe.engines.vllm_settings import installed
from rlfe.eval.frames import frames
from tests.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="vllm is not installed (pip install 'rlfe[vllm]')"),
]
CELL = "tiny_mbpp_nobuf_lr1e3"
STEPS, TASKS, PROBLEMS, N = (30, 60, 90, 120, 150), ("mbpp_plus", "gsm8k"), 4, 16
KILLS = 3  # an engine starts anew after each
SETS = [
    "prompt.style=base", "engine.sampler=vllm", "engine.device=cpu", "model.max_len=512",
    *(f"eval.{task}.{key}" for task in TASKS
      for key in (f"n={N}", f"limit={PROBLEMS}", "max_tokens=24")),
]  # fmt: skip


def make_run(root: Path) -> None:
    run = root / "runs" / CELL
    for i, step in enumerate(STEPS):
        write_tiny_model(run / f"global_step_{step}", seed=i + 1, head_dim=64)
    shutil.copytree(run / "global_step_30", root / "tiny")
    (run / "config.toml").write_text(dump(load([], [f"model.path={root / 'tiny'}", *SETS]).recipe))


def start(root: Path, *more: str) -> subprocess.Popen[str]:
    words = ["eval", "--ckpt-glob", "runs/*/global_step_*", *more]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-m", "rlfe", *words], cwd=root, env=env, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def stored_blocks(root: Path) -> Counter[tuple[str, str]]:
    """How often each block of each file is stored: (file, problem and block)."""
    import json

    found: Counter[tuple[str, str]] = Counter()
    for path in root.rglob("step_*.jsonl.zst"):
        for text, _ in frames(path):
            for line in map(json.loads, text.splitlines()):
                if line["kind"] == "block":
                    found[str(path.relative_to(root)), f"{line['p']}/{line['b']}"] += 1
    return found


def test_five_checkpoints_and_two_tasks_start_one_engine(tmp_path: Path) -> None:
    make_run(tmp_path)
    child = start(tmp_path)
    _, errors = child.communicate()
    assert child.returncode == 0, errors[-3000:]
    total = len(STEPS) * len(TASKS) * PROBLEMS * N
    said = re.search(r"(\d+) samples drawn, .* loaded: (\d+), engines started: (\d+)", errors)
    assert said is not None, errors[-3000:]
    assert tuple(map(int, said.groups())) == (total, len(STEPS), 1)
    assert set(stored_blocks(tmp_path).values()) == {1}


def test_kills_lose_and_double_no_block(tmp_path: Path) -> None:
    make_run(tmp_path)
    chance, kept = random.Random(3), Counter[tuple[str, str]]()
    for _ in range(KILLS):
        child = start(tmp_path)
        wanted, deadline = len(kept) + chance.randrange(0, 4), time.monotonic() + 900
        while len(stored_blocks(tmp_path)) <= wanted and child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 0.2))
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        now = stored_blocks(tmp_path)
        assert now >= kept  # what was finished is still there
        kept = now
    child = start(tmp_path)
    _, errors = child.communicate()
    assert child.returncode == 0, errors[-3000:]
    blocks = stored_blocks(tmp_path)
    assert len(blocks) == len(STEPS) * len(TASKS) * PROBLEMS * N // 8
    assert set(blocks.values()) == {1}
    text = (tmp_path / "runs" / "_tables" / "scores_rates.csv").read_text()
    assert text.count(f",{PROBLEMS * N},") == len(STEPS) * len(TASKS)
