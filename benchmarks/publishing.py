"""Pushing again what is there, and planning a large series: rlfe against the client alone.

Peer: `huggingface_hub`'s own `upload_folder`, which reads and hashes every byte on every call.
Both push a run that lies in the repository already (a Hub on the loopback interface that knows
every file's hash); rlfe has pushed it before, so it remembers the hashes. Then 50 checkpoints of
3.4 GB are planned the same way. Weights are sparse files: nothing takes room on the disk.

    python -m benchmarks.publishing [--checkpoints 4]
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

from rlfe.hub.cache import Cache, hash_file
from rlfe.hub.discover import discover
from tests.hub_runs import make_run
from tests.hub_stand_in import Hub, Repo, StoredFile, regular_file, serve

PEER = """
import sys
from huggingface_hub import HfApi
HfApi().upload_folder(
    repo_id="my-org/peer", folder_path=sys.argv[1], path_in_repo=sys.argv[2],
    allow_patterns=["global_step_*"],
)
"""
LARGE_BYTES, LARGE_COUNT = 3_400_000_000, 50


def weights(path: Path) -> None:
    """One safetensors file of 3.4 GB that takes no room on the disk."""
    each = LARGE_BYTES // 2 // 4 * 4
    names = ("model.embed_tokens.weight", "lm_head.weight")
    header = json.dumps({
        name: {"dtype": "F32", "shape": [each // 4], "data_offsets": [at * each, (at + 1) * each]}
        for at, name in enumerate(names)
    }).encode()  # fmt: skip
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * each)


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


def large_run(root: Path, checkpoints: int, *, lr: float) -> Path:
    """A run of large checkpoints whose hashes are remembered (all files are the same)."""
    run = make_run(root, steps=range(10, 10 * checkpoints + 1, 10), lr=lr)
    for path in run.glob("global_step_*/model.safetensors"):
        weights(path)
    return run


def remember(run: Path, digest: str) -> dict[str, StoredFile]:
    """Put the weights' hash into the run's memory; the run's files as a repository has them."""
    cache, tree = Cache(run), {}
    for checkpoint in discover(run, cache).checkpoints:
        for entry in checkpoint.entries:
            if entry.size == LARGE_BYTES or entry.name.endswith(".safetensors"):
                key = [entry.size, entry.mtime_ns, entry.inode, digest, ""]
                cache.known["files"][entry.name] = key
                tree[entry.name] = StoredFile(size=entry.size, git_sha1="0" * 40, sha256=digest)
            else:
                tree[entry.name] = regular_file(entry.path.read_bytes())
    cache.is_changed = True
    cache.save()
    return tree


def filled(hub: Hub, name: str, tree: Mapping[str, StoredFile], folder: str) -> None:
    """A repository that holds these files below `folder`."""
    repo = hub.repos[name] = Repo(repo_id=name, private=True)
    files = {f"{folder}/{path}": file for path, file in tree.items()}
    for file in tree.values():
        if file.sha256:
            (hub.lfs / file.sha256).touch()  # the store has it: nobody has to send it again
    repo.branches["main"] = repo.add(files, "there already", "").oid


def pushed_again(root: Path, checkpoints: int) -> None:
    """An unchanged push with either; prints the ratio."""
    run = large_run(root / "runs", checkpoints, lr=1e-6)
    weight = run / "global_step_10" / "model.safetensors"
    tree = remember(run, hash_file(weight, weight.stat().st_size).sha256)
    hub = serve(root / "hub")
    filled(hub, "my-org/ours", tree, run.name)
    filled(hub, "my-org/peer", tree, run.name)
    environment = hub.environment(xet=False)
    ours = [sys.executable, "-m", "rlfe", "push", str(run), "--repo", "my-org/ours"]
    ours += ["--exclude", "logs,rollouts", "--no-card", "--no-verify", "--yes"]
    peer = [sys.executable, "-c", PEER, str(run), run.name]
    timed(ours, environment)  # config and metrics go up
    rlfe, client = timed(ours, environment)[0], timed(peer, environment)[0]
    hub.close()
    print(
        f"unchanged push of {checkpoints} x {LARGE_BYTES / 1e9:.1f} GB: rlfe {rlfe:.2f} s, "
        f"client {client:.2f} s, ratio {client / rlfe:.1f}"
    )


def planned(root: Path) -> None:
    """Plan a large series whose hashes are known, card included."""
    run = large_run(root / "large", LARGE_COUNT, lr=3e-6)
    tree = remember(run, "0" * 64)
    hub = serve(root / "hub2")
    filled(hub, "my-org/large", tree, run.name)
    command = [sys.executable, "-m", "rlfe", "push", str(run), "--repo", "my-org/large"]
    seconds, memory = timed(command, hub.environment(xet=False))
    hub.close()
    print(
        f"plan of {LARGE_COUNT} checkpoints of {LARGE_BYTES / 1e9:.1f} GB: {seconds:.2f} s "
        f"(limit 3), {memory} MB (limit 300)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pushed_again(Path(folder), given.checkpoints)
        planned(Path(folder))


if __name__ == "__main__":
    main()
