"""What a program leaves behind, found and removed: files in its folder, processes without a filter.

What not: a fresh tmpfs, which is quicker where it is allowed (`namespaces.py`).
"""

from __future__ import annotations

import os
import signal

SCRATCH_BYTES, SCRATCH_ENTRIES = 64 << 20, 30_000


def overfull(folder: str) -> bool:
    """Whether a folder holds more bytes or entries than a program may write."""
    total, entries, folders = 0, 0, [folder]
    while folders:
        try:
            found = list(os.scandir(folders.pop()))
            total += sum(entry.stat(follow_symlinks=False).st_blocks for entry in found)
            folders += [e.path for e in found if e.is_dir(follow_symlinks=False)]
        except OSError:  # gone meanwhile, locked, or a path that has become too long
            continue
        entries += len(found)
        if total * 512 > SCRATCH_BYTES or entries > SCRATCH_ENTRIES:
            return True
    return False


def empty(folder: str) -> None:
    """Remove all that a folder holds, however deep; without recursion."""
    while names := os.listdir(folder):
        for name in names:
            path = f"{folder}/{name}"
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            _lift(path, folder)


def _lift(path: str, folder: str) -> None:
    """Move the entries of `path` up into `folder`, then remove it: depth becomes width."""
    for number, name in enumerate(os.listdir(path)):
        target, turn = f"{folder}/.{os.path.basename(path)[-8:]}.{number}", 0
        while os.path.lexists(target):
            turn += 1
            target = f"{folder}/.{number}.{turn}"
        inner = f"{path}/{name}"
        if os.path.isdir(inner) and not os.path.islink(inner):
            os.chmod(inner, 0o700)
        os.rename(inner, target)
    os.rmdir(path)


def kill_orphans() -> None:
    """End processes that a program left behind, where nothing kept it from starting any."""
    path = f"/proc/self/task/{os.getpid()}/children"
    for _ in range(1000):
        try:
            with open(path) as file:
                pids = [int(word) for word in file.read().split()]
        except OSError:
            return
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
