"""The jail made by bubblewrap, where it is installed: the command line that starts a worker in it.

What: the same view as `inside/namespaces.py` builds from Python. What not: a process namespace per
child (bubblewrap gives its processes no capabilities; the seccomp filter forbids new processes).
Try: `command("/usr/bin/bwrap", {})`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlfe.sandbox.inside import namespaces, places

PLACES = ("/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap")
_PACKAGE = Path(__file__).resolve().parent
_BOOT_FILES = (_PACKAGE.parent / "__init__.py", _PACKAGE / "__init__.py", _PACKAGE / "inside")


def find() -> str:
    """The bubblewrap program; "" where there is none."""
    return next((path for path in PLACES if os.access(path, os.X_OK)), "")


def command(program: str, packages: Mapping[str, str]) -> list[str]:
    """Everything before the interpreter's own arguments."""
    arguments = [
        program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        "--uid", str(namespaces.NOBODY), "--gid", str(namespaces.NOBODY), "--clearenv",
        "--setenv", "OPENBLAS_NUM_THREADS", "1", "--setenv", "OMP_NUM_THREADS", "1",
        "--setenv", "PYTHONHASHSEED", "0",
    ]  # fmt: skip
    arguments += _libraries()
    for path in places.DEVICES:
        arguments += ["--dev-bind-try", path, path]
    for name, path in places.packages(dict(packages)):
        arguments += ["--ro-bind", path, f"/site/{name}"]
    for path in (os.path.realpath(sys.executable), *map(str, _BOOT_FILES)):
        arguments += ["--ro-bind", path, path]
    arguments += ["--perms", "0777", "--size", str(48 << 20), "--tmpfs", namespaces.SCRATCH]
    return [*arguments, "--remount-ro", "/", "--chdir", "/"]


def _libraries() -> Sequence[str]:
    found: list[str] = []
    for path in places.SHARED:
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
    for path in places.library_folders():
        found += ["--ro-bind", path, path]
    for path in places.hidden_folders():
        found += ["--tmpfs", path, "--remount-ro", path]
    for path in places.FILES:
        found += ["--ro-bind-try", path, path]
    return found
