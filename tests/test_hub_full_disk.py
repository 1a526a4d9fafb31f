"""A disk that is really full (a small tmpfs, ENOSPC from the kernel) while a push or pull runs."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlfe import records
from tests.hub_runs import make_run
from tests.hub_stand_in import Hub, serve
from tests.test_hub_kill import fatten

RLFE = [sys.executable, "-m", "rlfe"]


def on_small_disk(
    disk: Path, command: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command that alone sees a tmpfs of 64 kB at `disk`; skips where that is not allowed."""
    disk.mkdir(exist_ok=True)
    mount = f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(str(disk))}"
    try:
        subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system does not let us mount a small disk")
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["lfs", "xet"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Hub, bool]]:
    served = serve(tmp_path / "hub", page_size=7)
    yield served, request.param
    served.close()


def big_run(root: Path) -> Path:
    """Two checkpoints of 480 kB and rollouts that do not fit a small disk when packed."""
    run = make_run(root, steps=(30, 60), shards=2)
    fatten(run)
    noise = random.Random(1)
    for step in (1, 2):
        line = {"step": step, "text": noise.randbytes(200_000).hex()}
        records.write_jsonl_zst(run / "rollouts" / f"step_{step:06d}.jsonl.zst", [line])
    return run


def one_clear_error(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: disk full: ")
    assert "No space left on device" in error


def test_a_disk_that_fills_during_a_push_is_one_error_and_the_same_command_goes_on(hub, tmp_path):
    served, xet = hub
    run = big_run(tmp_path / "runs")
    disk = tmp_path / "disk"
    push = [*RLFE, "push", str(run), "--repo", "my-org/series", "--no-verify", "--yes"]
    environment = served.environment(xet=xet)
    full = on_small_disk(disk, push, {**environment, "TMPDIR": str(disk)})
    one_clear_error(full)
    assert "To go on: rlfe push" in full.stderr
    tree = served.tree("my-org/series")
    assert f"{run.name}/global_step_30/config.json" in tree  # what was there stays
    assert not [path for path in tree if "/global_step_60/" in path]
    sent = len(served.requests("PUT", "/_lfs/"))
    again = subprocess.run(push, env={**os.environ, **environment}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    tree = served.tree("my-org/series")
    for path in run.glob("global_step_*/*"):
        assert tree[f"{run.name}/{path.parent.name}/{path.name}"].size == path.stat().st_size
    if not xet:  # two shards and the packed rollouts (two files); nothing of global_step_30
        assert len(served.requests("PUT", "/_lfs/")) == sent + 4


def test_a_full_client_cache_does_not_hinder_a_push_and_ends_a_pull_with_one_error(hub, tmp_path):
    served, xet = hub
    run = big_run(tmp_path / "runs")
    home = tmp_path / "home"
    environment = {**served.environment(xet=xet, home=home), "XDG_CACHE_HOME": str(home)}
    push = [*RLFE, "push", str(run), "--repo", "my-org/series", "--no-verify", "--yes"]
    done = on_small_disk(home, push, environment)
    assert done.returncode == 0, done.stderr
    pull = [*RLFE, "pull", f"my-org/series/{run.name}/global_step_60"]
    one_clear_error(on_small_disk(home, pull, environment))
    again = subprocess.run(pull, env={**os.environ, **environment}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    folder = Path(again.stdout.strip())
    for path in (run / "global_step_60").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
