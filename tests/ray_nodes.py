"""A Ray cluster of two nodes on this machine, and what tests need to break it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRIES = 3
REPOSITORY = Path(__file__).parents[1]
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only; see rlfe/ray_cluster.py
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}
NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
raylet = second.all_processes["raylet"][0].process.pid
print(cluster.address, raylet, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def environment(**more: str) -> dict[str, str]:
    """This process's, with a quiet Ray on the loopback interface; no cluster is named."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**kept, **QUIET, **more}


@contextmanager
def two_nodes() -> Iterator[tuple[str, int]]:
    """Two nodes with a CPU each: the address, and the process id of the second node's raylet.

    Ray gives a node 30 s to start, which a busy machine may exceed: then once more.
    """
    for _ in range(TRIES):
        child = subprocess.Popen(
            [sys.executable, "-c", NODES], env=environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert child.stdout is not None
        line = child.stdout.readline()
        if line:
            break
        child.communicate()
    assert line, f"no cluster in {TRIES} tries"
    address, raylet = line.split()
    try:
        yield address, int(raylet)
    finally:
        child.communicate()


def start(root: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    """`rlfe ...` in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlfe", *words], cwd=root, env=environment(**options), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def children(command: str, everywhere: bool = False) -> list[int]:
    """Process ids below this one (or of the machine) whose command line starts so.

    Ray names its actors `ray::Class.method`.
    """
    parents, found = dict[int, int](), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat[1])
            if line.startswith(command) and stat[0] != "Z":
                found.append(int(folder.name))
    return sorted(pid for pid in found if everywhere or _is_below(pid, parents))


def _is_below(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()
