"""What a jail lets programs read: the interpreter's library, shared libraries, numpy.

What not: any other installed package. rlfe's own folder holds expected results, and it may be
installed beside the standard library, so `site-packages` and `dist-packages` are always hidden.
"""

from __future__ import annotations

import glob
import os
import sys

STDLIB = os.path.dirname(os.path.realpath(os.__file__))
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib")
FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_PACKAGES = ("site-packages", "dist-packages")


def library_folders() -> list[str]:
    """Folders to show read-only, without symbolic links: shared libraries and the interpreter's."""
    own = os.path.dirname(STDLIB)
    folders = [path for path in SHARED if os.path.isdir(path) and not os.path.islink(path)]
    if not any(own == path or own.startswith(path + "/") for path in folders):
        folders.append(own)
    return folders


def hidden_folders() -> list[str]:
    """Package folders inside the library folders."""
    found = []
    for folder in library_folders():
        for name in _PACKAGES:
            found += glob.glob(f"{folder}/python*/{name}")
    return sorted({*found, *(p for n in _PACKAGES if os.path.isdir(p := f"{STDLIB}/{n}"))})


def readable_entries() -> list[str]:
    """For Landlock, which cannot hide inside a folder: the entries of the library folders."""
    found: list[str] = [*FILES]
    for folder in (*library_folders(), STDLIB):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            is_python = name.startswith("python") and os.path.isdir(path)
            if name not in _PACKAGES and (not is_python or os.path.realpath(path) == "/"):
                found.append(path)
    return found


def packages(names: dict[str, str]) -> list[tuple[str, str]]:
    """(name, folder) of the packages that programs may import, and exist."""
    return [(name, path) for name, path in sorted(names.items()) if os.path.isdir(path)]


def forget_packages(site: str) -> None:
    """Leave the standard library and the jail's own package folder on the path."""
    sys.path[:] = [p for p in sys.path if p and not p.endswith(_PACKAGES)] + [site]
