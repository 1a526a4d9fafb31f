"""Overhead of `rlfe eval --ray` over two plain processes that share the same problems.

What: a tiny model on two CPU slots. Plain: `--shard 1/2` and `--shard 2/2` at once, then the call
that makes the tables. Ray: one call on a running cluster of two nodes with a CPU each. Wall time
and CPU time of all processes, rounds alternating, the median of their ratios; the tables have to
be the same bytes. `taskset -c 0,1` gives both the same two cores, Ray's own processes included.
What not: GPUs, networks; the tiny model makes samples of a few milliseconds, so that what is
around sampling weighs more than with a real one.
Try: `python -m benchmarks.ray_eval --rounds 1 --limit 20`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlfe.config import dump, load
from tests.ray_nodes import environment, two_nodes
from tests.tiny_model import write_tiny_model

CELL = "tiny_mbpp_nobuf_lr1e3"
GLOB = ("--ckpt-glob", "runs/*/global_step_*")
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=200, help="problems of gsm8k")
    parser.add_argument("--samples", type=int, default=16, help="of a problem")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        root = prepared(Path(folder) / "root", model, asked.limit, asked.samples)
        with two_nodes() as (address, _):
            rounds = [one_round(root, address) for _ in range(asked.rounds)]
    for place, name in enumerate(("wall", "CPU")):
        ratios = [times[1][place] / times[0][place] for times in rounds]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name}: Ray / plain, median of rounds {statistics.median(ratios):.3f} ({each})")


def prepared(root: Path, model: Path, limit: int, samples: int) -> Path:
    """A run with two checkpoints."""
    run = root / "runs" / CELL
    run.mkdir(parents=True)
    for step in (1, 2):
        shutil.copytree(model, run / f"global_step_{step}")
    recipe = load([], [
        f"model.path={model}", "prompt.style=base", "engine.threads=1", "engine.device=cpu",
        "model.max_len=512", f"eval.gsm8k.n={samples}", f"eval.gsm8k.limit={limit}",
        "eval.gsm8k.max_tokens=128",
    ]).recipe  # fmt: skip
    (run / "config.toml").write_text(dump(recipe))
    return root


Times = tuple[float, float]


def one_round(root: Path, address: str) -> tuple[Times, Times]:
    """(wall, CPU) seconds of plain processes and of Ray."""
    plain, first = measured(root, lambda: plainly(root))
    ray, second = measured(root, lambda: ended(eval_(root, "--ray", address)))
    assert first == second, "the tables differ"
    print(f"plain {plain[0]:.1f} s wall, {plain[1]:.1f} s CPU; Ray {ray[0]:.1f}, {ray[1]:.1f}",
          flush=True)  # fmt: skip
    return plain, ray


def plainly(root: Path) -> None:
    parts = [eval_(root, "--shard", f"{part}/2") for part in (1, 2)]
    for part in parts:
        ended(part)
    ended(eval_(root))


def eval_(root: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlfe", "eval", *GLOB, *words], cwd=root, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def ended(child: subprocess.Popen[bytes]) -> None:
    assert child.wait() == 0, f"exit {child.returncode}"


def measured(root: Path, work: Callable[[], None]) -> tuple[Times, dict[str, bytes]]:
    """Times of the work, and the tables that it left; samples are removed."""
    meter, start = CpuMeter(), time.monotonic()
    work()
    wall, cpu = time.monotonic() - start, meter.stop()
    tables = {file.name: file.read_bytes() for file in (root / "runs/_tables").iterdir()}
    for folder in (root / "runs/_tables", root / "runs" / CELL / "evals"):
        shutil.rmtree(folder)
    return (wall, cpu), tables


class CpuMeter:
    """CPU seconds of all processes below this one, the cluster's too, looked at every 0.1 s."""

    def __init__(self) -> None:
        self._before, self._seen = cpu_seconds(), dict[int, float]()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self._seen.update(cpu_seconds())

    def stop(self) -> float:
        self._done.set()
        self._thread.join()
        return sum(used - self._before.get(pid, 0.0) for pid, used in self._seen.items())


def cpu_seconds() -> dict[int, float]:
    """By process id, for all descendants of this process."""
    facts = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            facts[int(folder.name)] = (int(words[1]), (int(words[11]) + int(words[12])) / TICK)
    below, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, (parent, _) in facts.items() if parent in below} - below
        below, grown = below | more, bool(more)
    return {pid: facts[pid][1] for pid in below - {os.getpid()} if pid in facts}


if __name__ == "__main__":
    main()
