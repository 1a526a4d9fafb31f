"""The main job from the command line: train, kill, resume, evaluate, publish, load back bit-equal.

Everything is real but the size: the tiny random model, the packaged MBPP, MBPP+ and GSM8K
problems, the judge in its jail, the Hub's own client against the loopback Hub.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hub_stand_in import serve

pytest.importorskip("torch")

CELL = "tiny_mbpp_hardcd_lam0p1_lr1e5"
TRAIN = ["train", "--recipe", "tiny", "--set", "replay.strategy=hard_cooldown"]
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
repo, subfolder, local = sys.argv[1:]
there = AutoModelForCausalLM.from_pretrained(repo, subfolder=subfolder).state_dict()
here = AutoModelForCausalLM.from_pretrained(local).state_dict()
assert there.keys() == here.keys()
assert all(torch.equal(there[name], here[name]) for name in here)
assert AutoTokenizer.from_pretrained(repo, subfolder=subfolder).eos_token is not None
print(len(here), "tensors equal")
"""


def environment(model: Path, home: Path) -> dict[str, str]:
    """A user's environment: an own home, no network, our settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RL"))}
    return {
        **kept,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "OMP_NUM_THREADS": "1",
        "RLFE_MODEL__PATH": str(model),
        "RLFE_MODEL__LICENSE": "apache-2.0",
    }


def rlfe(*words: str, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlfe", *words], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after_a_step(folder: Path, cwd: Path, env: dict[str, str]) -> None:
    """Start the run, and end it with SIGKILL as soon as it has recorded a step."""
    running = subprocess.Popen(
        [sys.executable, "-m", "rlfe", *TRAIN],
        cwd=cwd,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while lines(folder) == 0 and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert 1 <= lines(folder) < 4


def test_train_kill_resume_eval_push_and_load_back_bit_equal(
    tiny_model: Path, tmp_path: Path
) -> None:
    env = environment(tiny_model, tmp_path / "home")
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    run = tmp_path / "runs" / CELL
    kill_after_a_step(run, tmp_path, offline)
    rlfe(*TRAIN, "--resume", cwd=tmp_path, env=offline)
    assert lines(run) == 4
    assert [p.name for p in sorted(run.glob("global_step_*"))] == ["global_step_2", "global_step_4"]

    score = ["--ckpt-glob", "runs/*/global_step_*", "--base", "--recipe", "tiny"]
    rlfe("eval", *score, "--csv", "scores.csv", "--plot", "scores.png", cwd=tmp_path, env=offline)
    with (tmp_path / "scores.csv").open() as file:
        rows = {(row["cell"], row["step"], row["task"]) for row in csv.DictReader(file)}
    for task in ("mbpp_plus", "mbpp_base", "gsm8k"):
        assert {("tiny", "0", task), (CELL, "2", task), (CELL, "4", task)} <= rows
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "scores.parquet").exists()

    hub = serve(tmp_path / "hub", page_size=7)
    try:
        client = {**env, **hub.environment(xet=False)}
        rlfe("push", str(run), "--repo", "my-org/series", "--yes", cwd=tmp_path, env=client)
        tree = hub.tree("my-org/series")
        assert f"{CELL}/global_step_4/model.safetensors" in tree
        assert not [path for path in tree if "/state/" in path or path.endswith(".pt")]
        card = tree["README.md"].data.decode()
        assert card.startswith("---\nlicense: apache-2.0\n")
        assert f"`{CELL}`" in card
        elsewhere = {**env, **hub.environment(xet=False, home=tmp_path / "elsewhere")}
        for step in (2, 4):
            words = [
                "my-org/series",
                f"{CELL}/global_step_{step}",
                str(run / f"global_step_{step}"),
            ]
            done = subprocess.run(
                [sys.executable, "-c", LOAD, *words], env=elsewhere, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[-2000:]
            assert done.stdout.endswith("tensors equal\n")
    finally:
        hub.close()
