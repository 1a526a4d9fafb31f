"""Landlock: which folders a program may read, and the one where it may write.

What: a ruleset made once per worker and put on every child. What not: hiding names (`stat` still
answers). Source: kernel documentation userspace-api/landlock; rights by ABI version.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from rlfe.sandbox.inside import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # all rights of an ABI
_IOCTL_DEV, _TRUNCATE = 1 << 15, 1 << 14
_NET, _SCOPES = 3, 3  # bind and connect TCP; abstract sockets and signals
READ = _READ_FILE | _READ_DIR


def version() -> int:
    """The ABI version; 0 where there is none."""
    try:
        return kernel.call(kernel.LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def ruleset(read: Iterable[str], listed: Iterable[str], devices: Iterable[str], write: str) -> int:
    """A descriptor of the rules; raises OSError.

    Args:
        read: Files and folders to read; `listed`: folders of which only the names may be read.
        devices: Files to read and write. write: The folder where everything but devices goes.
    """
    abi = version()
    handled = _RIGHTS[min(abi, 3)] | (_IOCTL_DEV if abi >= 5 else 0)
    attributes = (ctypes.c_uint64 * 3)(handled, _NET if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = kernel.call(
        kernel.LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    for path in read:
        _allow(rules, path, READ & handled)
    for path in listed:
        _allow(rules, path, _READ_DIR)
    for path in devices:
        _allow(rules, path, _READ_FILE | _WRITE_FILE)
    _allow(rules, write, handled & ~(_EXECUTE | _IOCTL_DEV))
    return rules


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a library folder that this system does not have
    if not os.path.isdir(path):
        rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
    attributes = ctypes.create_string_buffer(
        rights.to_bytes(8, "little") + target.to_bytes(4, "little"), 12
    )
    try:
        kernel.call(
            kernel.LANDLOCK_ADD,
            ctypes.c_int(rules),
            ctypes.c_int(1),
            attributes,
            ctypes.c_uint32(0),
        )
    finally:
        os.close(target)


def restrict_step(rules: int) -> kernel.Step:
    """To put the rules on the calling process; needs no_new_privs."""
    return kernel.call_step(kernel.LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
