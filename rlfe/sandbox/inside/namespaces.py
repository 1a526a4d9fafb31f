"""A file system of our own: user, mount, network, IPC and UTS namespaces, from Python.

What: a read-only root with libraries, devices and a small scratch, no /proc, no network, and a uid
other than 0. What not: process ids (each child gets its own namespace, `lockdown`). Any OSError
means that this system does not allow it. Order and flags follow namespaces(7) and pivot_root(2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlfe.sandbox.inside import kernel, places

SCRATCH = "/scratch"
SCRATCH_OPTIONS = "size=48m,nr_inodes=4096,mode=0777"
NOBODY = 65534
_FLAG_PAIRS = ((1, 1), (2, 2), (4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21))
_SPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET


def enter(root: str, packages: Mapping[str, str]) -> dict[str, bool]:
    """Move this process into a new root; what it got. Raises OSError.

    Args:
        root: An empty folder to build the new root on.
        packages: Name -> folder of the packages to show under /site.
    """
    proc = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    is_root = os.geteuid() == 0
    if is_root:
        kernel.unshare(_SPACES)
    else:
        _unshare_user(proc, _SPACES)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    _fill(root, packages)
    _pivot(root)
    mine = _drop_root(proc) if is_root else True
    os.close(proc)
    return {"own_user_namespace": mine}


def _unshare_user(proc: int, flags: int) -> None:
    """A user namespace in which we are an ordinary uid, with its capabilities."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {uid} 1"),
        ("gid_map", f"{NOBODY} {gid} 1"),
    ):
        target = os.open(name, os.O_WRONLY, dir_fd=proc)
        try:
            os.write(target, text.encode())
        finally:
            os.close(target)


def _drop_root(proc: int) -> bool:
    """Become nobody for good; whether a user namespace of our own came on top."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else /proc/self is still root's
    try:
        _unshare_user(proc, kernel.CLONE_NEWNS)
        fresh_scratch(first=True)
    except OSError:
        return False
    return True


def _fill(root: str, packages: Mapping[str, str]) -> None:
    for path in places.SHARED:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
    for path in places.library_folders():
        _show(path, root + path)
    for path in places.hidden_folders():
        kernel.mount("tmpfs", root + path, "tmpfs", kernel.MS_RDONLY, "size=4k")
    for path in places.FILES:
        if os.path.exists(path):
            _show(path, root + path)
    for path in places.DEVICES:
        if os.path.exists(path):
            _place(path, root + path)
            kernel.mount(path, root + path, "", kernel.MS_BIND)
    os.makedirs(f"{root}/site")
    for name, path in places.packages(dict(packages)):
        _show(path, f"{root}/site/{name}")
    os.makedirs(root + SCRATCH)
    kernel.mount("tmpfs", root + SCRATCH, "tmpfs", _scratch_flags(), SCRATCH_OPTIONS)
    if not os.path.lexists(f"{root}/tmp"):  # the interpreter itself may lie under /tmp
        os.symlink(SCRATCH, f"{root}/tmp")


def _scratch_flags() -> int:
    return kernel.MS_NOSUID | kernel.MS_NODEV


def fresh_scratch(first: bool = False) -> None:
    """An empty scratch folder, whatever a program left there."""
    if not first:
        kernel.unmount(SCRATCH)
    kernel.mount("tmpfs", SCRATCH, "tmpfs", _scratch_flags(), SCRATCH_OPTIONS)


def _place(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def _show(path: str, target: str) -> None:
    """Bind read-only; flags that the source has stay, as the kernel asks."""
    _place(path, target)
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)
    has = os.statvfs(target).f_flag
    kept = sum(flag for seen, flag in _FLAG_PAIRS if has & seen)
    flags = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID
    kernel.mount("", target, "", flags | kernel.MS_NODEV | kept)


def _pivot(root: str) -> None:
    old = f"{root}/old"
    os.mkdir(old)
    kernel.pivot_root(root, old)
    os.chdir("/")
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.mount(
        "", "/", "", kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    )
