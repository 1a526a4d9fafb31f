"""The few Linux calls that Python has no name for, by ctypes. Each raises OSError.

Numbers are those of x86_64 and aarch64; elsewhere (and on other systems) `SUPPORTED` is False and
the jail falls back to limits.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

MACHINE = platform.machine()
SUPPORTED = sys.platform == "linux" and MACHINE in ("x86_64", "aarch64")
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
PR_SET_CHILD_SUBREAPER = 36
_NUMBERS = {
    "x86_64": {"clone": 56, "capset": 126, "pivot_root": 155},
    "aarch64": {"clone": 220, "capset": 91, "pivot_root": 41},
}.get(MACHINE, {})
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446

_libc: Any = ctypes.CDLL(None, use_errno=True) if SUPPORTED else None
_libc_held: Any = ctypes.PyDLL(None) if SUPPORTED else None  # keeps the interpreter's lock
Step = tuple[Callable[..., Any], tuple[Any, ...]]  # a call to make later; below 0: it failed


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(number: int, *values: Any) -> int:
    """A system call by number."""
    return _checked(_libc.syscall(ctypes.c_long(number), *values))


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)))


def prctl(option: int, value: int, third: Any = 0) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), third, zero, zero))


def trim() -> None:
    """Give free memory back: every page that a process holds makes its forks dearer."""
    give_back = getattr(_libc, "malloc_trim", None)  # glibc's
    if give_back is not None:
        give_back(0)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [text.encode() if text else None for text in (source, target, kind)]
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() if data else None))


def unmount(target: str) -> None:
    _checked(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)))


def pivot_root(new: str, old: str) -> None:
    call(_NUMBERS["pivot_root"], new.encode(), old.encode())


def prctl_step(option: int, value: int, third: Any = 0) -> Step:
    """`prctl` with its arguments made ready: what is made before a fork costs the child nothing."""
    zero = ctypes.c_ulong(0)
    return _libc_held.prctl, (ctypes.c_int(option), ctypes.c_ulong(value), third, zero, zero)


def call_step(number: int, *values: Any) -> Step:
    """A system call by number, to make later."""
    return _libc_held.syscall, (ctypes.c_long(number), *values)


def no_capabilities_step() -> Step:
    """All capability sets of the calling thread to nothing."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    return call_step(_NUMBERS["capset"], header, (ctypes.c_uint32 * 6)())


class Forker:
    """`fork()` is os.fork with clone flags such as CLONE_NEWPID; for a process of one thread."""

    def __init__(self, flags: int) -> None:
        zero = ctypes.c_long(0)
        self._before, self._child, self._parent = (
            getattr(ctypes.pythonapi, f"PyOS_{name}")
            for name in ("BeforeFork", "AfterFork_Child", "AfterFork_Parent")
        )
        self._clone, arguments = call_step(_NUMBERS["clone"], ctypes.c_long(flags | 17))
        self._arguments = (*arguments, zero, zero, zero, zero)

    def fork(self) -> int:
        """0 in the child, its id in the parent; raises OSError."""
        self._before()
        result: int = self._clone(*self._arguments)
        if result == 0:
            self._child()
            return 0
        self._parent()
        if result < 0:
            raise OSError("no process could be started")
        return result
