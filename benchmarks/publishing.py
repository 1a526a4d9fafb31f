"""Pushing again what is there, and planning a large series: rlfe against the client alone.

Peer: `huggingface_hub`'s own `upload_folder`, which reads and hashes every byte on every call.
Both push the same run to a Hub on the loopback interface and then push it again, unchanged. Then
50 sparse checkpoints of 3.4 GB are planned with warm hashes. Everything lies in a temporary folder.

    python -m benchmarks.publishing [--megabytes 40] [--checkpoints 8]
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rlfe.hub.cache import SCHEMA, Cache
from rlfe.hub.discover import discover
from tests.hub_runs import make_run
from tests.hub_stand_in import serve

PEER = """
import sys
from huggingface_hub import HfApi
HfApi().create_repo("my-org/peer", exist_ok=True)
HfApi().upload_folder(repo_id="my-org/peer", folder_path=sys.argv[1], path_in_repo="run")
"""
LARGE_BYTES, LARGE_COUNT = 3_400_000_000, 50


def weights(path: Path, size: int, *, sparse: bool) -> None:
    """One safetensors file of about `size` bytes; sparse ones take no room on the disk."""
    each = size // 2 // 4 * 4
    names = ("model.embed_tokens.weight", "lm_head.weight")
    header = json.dumps({
        name: {"dtype": "F32", "shape": [each // 4], "data_offsets": [at * each, (at + 1) * each]}
        for at, name in enumerate(names)
    }).encode()  # fmt: skip
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        if sparse:
            file.truncate(8 + len(header) + 2 * each)
        else:
            file.write(os.urandom(2 * each))


def timed(command: list[str], environment: Mapping[str, str]) -> tuple[float, int]:
    """Seconds and peak memory (MB) of a process."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"exit {status} from {command}")
    return time.monotonic() - started, used.ru_maxrss // 1024


def pushed_again(root: Path, megabytes: int, checkpoints: int) -> None:
    """Push a run twice with either; print the second times."""
    run = make_run(root / "runs", steps=range(30, 30 * checkpoints + 1, 30))
    for path in run.glob("global_step_*/model.safetensors"):
        weights(path, megabytes * 10**6, sparse=False)
    hub = serve(root / "hub")
    environment = hub.environment(xet=False)
    ours = [sys.executable, "-m", "rlfe", "push", str(run), "--repo", "my-org/ours"]
    ours += ["--no-verify", "--yes"]
    peer = [sys.executable, "-c", PEER, str(run)]
    first = {"rlfe": timed(ours, environment)[0], "peer": timed(peer, environment)[0]}
    again = {"rlfe": timed(ours, environment)[0], "peer": timed(peer, environment)[0]}
    hub.close()
    size = megabytes * checkpoints
    print(f"first push of {size} MB: rlfe {first['rlfe']:.1f} s, client {first['peer']:.1f} s")
    print(
        f"unchanged push: rlfe {again['rlfe']:.2f} s, client {again['peer']:.2f} s, "
        f"ratio {again['peer'] / again['rlfe']:.2f}"
    )


def planned(root: Path) -> None:
    """Plan a large series whose hashes are known."""
    run = make_run(root / "large", steps=range(10, 10 * LARGE_COUNT + 1, 10), lr=3e-6)
    for path in run.glob("global_step_*/model.safetensors"):
        weights(path, LARGE_BYTES, sparse=True)
    cache = Cache(run)
    found = discover(run, cache)
    for checkpoint in found.checkpoints:
        for entry in checkpoint.entries:
            key = [entry.size, entry.mtime_ns, entry.inode, "0" * 64, ""]
            cache.known["files"][entry.name] = key
    cache.is_changed = True
    cache.save()
    assert json.loads(cache.path.read_text())["schema"] == SCHEMA
    command = [sys.executable, "-m", "rlfe", "push", str(run), "--repo", "my-org/large"]
    seconds, memory = timed(command, {"HF_TOKEN": "", "HF_HOME": str(root / "home")})
    print(
        f"plan of {LARGE_COUNT} checkpoints of {LARGE_BYTES / 1e9:.1f} GB: {seconds:.2f} s "
        f"(limit 3), {memory} MB (limit 300)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=40, help="size of a checkpoint")
    parser.add_argument("--checkpoints", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pushed_again(Path(folder), given.megabytes, given.checkpoints)
        planned(Path(folder))


if __name__ == "__main__":
    main()
