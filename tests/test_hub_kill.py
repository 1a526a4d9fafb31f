"""A push that is killed at any moment goes on with the same command and sends nothing twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.hub_runs import make_run, safetensors_bytes
from tests.hub_stand_in import Hub, serve

WEIGHT = 60_000  # floats in each shard: 240 kB, so that a kill falls into transfers too


def fatten(run: Path) -> None:
    """Give every shard its own bytes and some size."""
    for at, path in enumerate(sorted(run.glob("global_step_*/*.safetensors"))):
        names = ["model.embed_tokens.weight", "lm_head.weight", "a.weight", "b.weight"]
        index = int(path.name[6:11]) - 1
        part = {name: [at + len(run.name)] * (WEIGHT // 2) for name in names[index::2]}
        path.write_bytes(safetensors_bytes(part))


def push(runs: list[Path], hub: Hub, *, xet: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rlfe", "push", *map(str, runs), "--repo", "my-org/series"]
    return subprocess.Popen(
        [*command, "--no-verify", "--yes"], env={**os.environ, **hub.environment(xet=xet)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def kill_after(process: subprocess.Popen[bytes], hub: Hub, requests: int) -> None:
    """SIGKILL when the Hub has seen so many requests more (or let it end)."""
    goal = len(hub.log) + requests
    while process.poll() is None and len(hub.log) < goal:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def killed_and_repeated(tmp_path: Path, *, kills: int, xet: bool, steps: int) -> None:
    wanted = range(30, 30 * steps + 1, 30)
    runs = [
        make_run(tmp_path / "runs", steps=wanted, shards=2),
        make_run(tmp_path / "runs", steps=wanted, lr=6e-6, replay=True, shards=2),
    ]
    for run in runs:
        fatten(run)
    hub = serve(tmp_path / "hub", page_size=7)
    moments = random.Random(20260101)
    for _ in range(kills):
        kill_after(push(runs, hub, xet=xet), hub, moments.randint(5, 40))
    assert push(runs, hub, xet=xet).wait() == 0
    tree = hub.tree("my-org/series")
    for run in runs:
        for path in run.glob("global_step_*/*"):
            assert tree[f"{run.name}/{path.parent.name}/{path.name}"].size == path.stat().st_size
    titles = [commit.title for commit in hub.repos["my-org/series"].commits.values()]
    assert len(titles) == 1 + 2 * steps + 1  # the Hub's own, the checkpoints, the card
    sent = Counter(entry.path for entry in hub.requests("PUT", "/_lfs/"))
    assert sum(count - 1 for count in sent.values()) <= 2 * kills  # a checkpoint has two shards
    before = len(hub.requests("POST", "/commit/"))
    assert push(runs, hub, xet=xet).wait() == 0
    assert len(hub.requests("POST", "/commit/")) == before
    hub.close()


def test_a_push_killed_three_times_goes_on(tmp_path):
    killed_and_repeated(tmp_path, kills=3, xet=False, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])
def test_a_push_of_two_cells_killed_at_ten_random_moments_goes_on(tmp_path, xet):
    killed_and_repeated(tmp_path, kills=10, xet=xet, steps=5)


def test_two_pushers_of_different_cells_do_not_disturb_each_other(tmp_path):
    runs = [
        make_run(tmp_path / "runs", steps=(30, 60)),
        make_run(tmp_path / "runs", steps=(30, 60), lr=6e-6),
    ]
    hub = serve(tmp_path / "hub", page_size=7)
    assert push(runs[:1], hub, xet=False).wait() == 0  # the repository is there
    run = make_run(tmp_path / "more", steps=(30, 60), lr=3e-6)
    both = [push([runs[1]], hub, xet=False), push([run], hub, xet=False)]
    assert [process.wait() for process in both] == [0, 0]
    tree = hub.tree("my-org/series")
    for name in (runs[0].name, runs[1].name, run.name):
        assert f"{name}/global_step_60/model.safetensors" in tree
    manifest = json.loads(tree["manifest.json"].data)["files"]
    assert {path.split("/")[0] for path in manifest} == {runs[0].name, runs[1].name, run.name}
    hub.close()
