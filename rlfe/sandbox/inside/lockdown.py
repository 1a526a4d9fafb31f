"""The jail of one worker, and what each child gets on top.

What: picks the strongest tier that this system allows (`namespaces`, `filters`, `limits`), sets it
up once, and locks every child down before its program runs. What not: protection from kernel
bugs, or from what programs of one worker can learn of each other's timing.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlfe.sandbox.inside import kernel, landlock, leftovers, namespaces, places, seccomp

TIERS = ("namespaces", "filters", "limits")
FILE_BYTES, OPEN_FILES, THREADS = 32 << 20, 64, 64


class Jail:
    """Where children run. `facts()` says what is in force."""

    PIPE = 3  # the child's end of the result pipe

    def __init__(self, tier: str, scratch: str) -> None:
        self.tier, self.scratch = tier, scratch
        self.has_seccomp = not _trial(_filter_this_process)
        self.refused: dict[str, str] = {}  # stronger tiers, and why not
        self.rules = -1  # Landlock
        self.own_pids = self.fresh = self.as_nobody = False
        self.by = "python"
        self.tasks = THREADS
        self._forker: kernel.Forker | None = None
        self._for_good: tuple[kernel.Step, ...] = ()
        self._made: dict[tuple[Any, ...], tuple[kernel.Step, ...]] = {}

    def facts(self) -> dict[str, Any]:
        """What is in force, for `rlfe doctor` and the record of every result."""
        return {
            "tier": self.tier,
            "by": self.by,
            "pid_namespace": self.own_pids,
            "seccomp": self.has_seccomp,
            "landlock": landlock.version() if self.rules >= 0 else 0,
            "uid": namespaces.NOBODY if self.as_nobody else os.geteuid(),
            "tmpfs": self.fresh,
            "refused": self.refused,
        }

    def script_files(self, text: str) -> tuple[int, int]:
        """Two nameless files: the script's input, and the place for its output."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        found = []
        for name in ("in", "out"):
            path = f"{self.scratch}/.{name}"
            found.append(os.open(path, flags, 0o600))
            os.unlink(path)
        data = memoryview(text.encode("utf-8", "surrogateescape"))
        while data:
            data = data[os.write(found[0], data) :]
        os.lseek(found[0], 0, 0)
        return found[0], found[1]

    def fork(self) -> int:
        """A child, in its own pid namespace where that is allowed."""
        return self._forker.fork() if self._forker is not None else os.fork()

    def ready(self) -> None:
        """Prepare what every child does alike; after this, the jail's facts stay as they are."""
        os.umask(0o022)
        if not kernel.SUPPORTED:
            return
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)  # children inherit it
        if self.own_pids:
            self._forker = kernel.Forker(kernel.CLONE_NEWPID)
        steps: list[kernel.Step] = [
            kernel.prctl_step(kernel.PR_SET_PDEATHSIG, signal.SIGKILL),
            kernel.no_capabilities_step(),
        ]
        if self.rules >= 0:
            steps += [landlock.restrict_step(self.rules), (os.close, (self.rules,))]
        if self.has_seccomp:
            seccomp.install(seccomp.server_program())
            steps += seccomp.install_steps(1 if self.own_pids else None)
        self._for_good = tuple(steps)

    def steps(
        self, job: Mapping[str, Any], writer: int, files: tuple[int, ...]
    ) -> tuple[kernel.Step, ...]:
        """The calls by which a child locks itself down, in order; nothing of it can be undone.

        They are made ready before the fork: a page that the child need not write to is a page
        that need not be copied, and those copies are most of what a child costs. Descriptors have
        the same numbers again and again, so most children share theirs with an earlier one.
        """
        key = (writer, files, job["memory_bytes"], int(job["cpu_seconds"]))
        if key not in self._made:
            self._made[key] = self._steps(*key)
        return self._made[key]

    def _steps(
        self, writer: int, files: tuple[int, ...], memory_bytes: int, cpu_seconds: int
    ) -> tuple[kernel.Step, ...]:
        return (
            (os.setpgid, (0, 0)),
            *_standard_files(writer, files, self.rules),
            (os.chdir, (self.scratch,)),
            *self._limits(memory_bytes, cpu_seconds),
            *(_NOBODY_STEPS if self.as_nobody and os.geteuid() == 0 else ()),
            *self._for_good,
        )

    def _limits(self, memory_bytes: int, cpu_seconds: int) -> tuple[kernel.Step, ...]:
        wishes = (
            (resource.RLIMIT_AS, memory_bytes + _AT_START),
            (resource.RLIMIT_CPU, cpu_seconds + 2),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_NPROC, self.tasks),
        )
        limits = ((kind, min(wish, _HARD[kind])) for kind, wish in wishes)
        return tuple((resource.setrlimit, (kind, (limit, limit))) for kind, limit in limits)

    def kill(self, pid: int) -> None:
        """End a child with all it started: its pid namespace, or its group; it may be gone."""
        for send in (os.kill,) if self.own_pids else (os.killpg, os.kill):
            try:
                send(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def overfull(self) -> bool:
        """Whether a child wrote more than its folder may hold (where no tmpfs limits it)."""
        if self.fresh or self.by == "bubblewrap":
            return False
        return leftovers.overfull(self.scratch)

    def after_child(self) -> None:
        """An empty scratch folder for the next program."""
        if os.stat(self.scratch).st_mode & 0o777 != 0o777:
            os.chmod(self.scratch, 0o777)
        if not self.has_seccomp:
            leftovers.kill_orphans()
        if not os.listdir(self.scratch):
            return
        if self.fresh:
            return namespaces.fresh_scratch()
        leftovers.empty(self.scratch)


_AT_START = 0  # address space that the server has: the limit is counted on top of it
_UNLIMITED = 1 << 62
_HARD = {
    kind: hard if (hard := resource.getrlimit(kind)[1]) != resource.RLIM_INFINITY else _UNLIMITED
    for kind in (
        resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
    )
}  # fmt: skip


def _standard_files(writer: int, files: tuple[int, ...], rules: int) -> tuple[kernel.Step, ...]:
    """Only stdin (or the script's input), nowhere for output, and the result pipe stay open.

    The server's own 0 and 1 are the null device.
    """
    first = max(rules, Jail.PIPE) + 1
    return (
        (os.dup2, (0, 2)),
        *((os.dup2, (file, target)) for target, file in enumerate(files)),
        (os.dup2, (writer, Jail.PIPE)),
        *(((os.closerange, (Jail.PIPE + 1, rules)),) if rules >= 0 else ()),
        (os.closerange, (first, 1 << 16)),
    )


def enter(options: Mapping[str, Any]) -> Jail:
    """Set up the jail that `options["jail"]` names; `auto` takes the strongest that works."""
    global _AT_START
    wanted = options["jail"]
    _AT_START, tasks = _address_space(), _tasks_of_user()
    order = TIERS if wanted == "auto" else (wanted,)
    refused: dict[str, str] = {}
    for tier in order:
        try:
            jail = _SETUPS[tier](options)
            break
        except OSError as error:
            refused[tier] = str(error)
    else:
        raise OSError(f"the tier {wanted} is not possible here: {refused[wanted]}")
    jail.refused = refused
    jail.tasks = tasks + THREADS
    if kernel.SUPPORTED and not jail.has_seccomp:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # what a program left comes to us
    jail.ready()
    return jail


def _address_space() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 256 << 20


def _tasks_of_user() -> int:
    """Threads that our user already has; old kernels count them towards the child's limit."""
    count = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _namespaces(options: Mapping[str, Any]) -> Jail:
    """The new root is tried in a child first: a half-made one cannot be left again."""
    if not kernel.SUPPORTED:
        raise OSError("needs Linux on x86_64 or aarch64")
    if options.get("bubblewrap"):
        return _bubblewrapped()
    root = f"{options['scratch']}/root"
    os.makedirs(root, exist_ok=True)
    if why := _trial(lambda: namespaces.enter(root, options["packages"])):
        raise OSError(why)
    got = namespaces.enter(root, options["packages"])
    jail = Jail("namespaces", namespaces.SCRATCH)
    jail.own_pids = jail.fresh = got["own_user_namespace"]
    places.forget_packages("/site")
    return jail


def _trial(attempt: Callable[[], object]) -> str:
    """Why something that cannot be undone does not work, tried in a child; "" if it does."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except BaseException as error:
            os.write(writer, f"{error or type(error).__name__}".encode()[:200])
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        why = pipe.read().decode()
    return why if os.waitpid(pid, 0)[1] == 0 else why or "the trial ended early"


def _filter_this_process() -> None:
    if not kernel.SUPPORTED:
        raise OSError("no filter for this machine")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.program(os.getpid()))


def _bubblewrapped() -> Jail:
    jail = Jail("namespaces", namespaces.SCRATCH)
    jail.by = "bubblewrap"
    places.forget_packages("/site")
    return jail


def _filters(options: Mapping[str, Any]) -> Jail:
    if not kernel.SUPPORTED or landlock.version() < 1:
        raise OSError("the kernel has no Landlock")
    if why := _trial(_filter_this_process):
        raise OSError(f"no seccomp: {why}")
    scratch, site = _folders(options)
    listed = [*places.library_folders(), places.STDLIB, site]
    packages = [path for _, path in places.packages(options["packages"])]
    jail = Jail("filters", scratch)
    jail.rules = landlock.ruleset(
        [*places.readable_entries(), *packages], listed, places.DEVICES, scratch
    )
    jail.as_nobody = os.geteuid() == 0 and _nobody_can_read(packages)
    places.forget_packages(site)
    return jail


def _limits(options: Mapping[str, Any]) -> Jail:
    scratch, site = _folders(options)
    places.forget_packages(site)
    return Jail("limits", scratch)


def _folders(options: Mapping[str, Any]) -> tuple[str, str]:
    """A scratch folder, and one with links to the packages that programs may import."""
    scratch, site = f"{options['scratch']}/scratch", f"{options['scratch']}/site"
    os.makedirs(scratch)
    os.makedirs(site)
    os.chmod(options["scratch"], 0o711)
    os.chmod(scratch, 0o777)
    for name, path in places.packages(options["packages"]):
        os.symlink(path, f"{site}/{name}")
    return scratch, site


def _nobody_can_read(packages: list[str]) -> bool:
    """Whether uid 65534 reaches the libraries; else root stays, without any capability."""

    def read() -> None:
        take(_NOBODY_STEPS)
        for path in (f"{places.STDLIB}/os.py", *packages):
            os.listdir(path) if os.path.isdir(path) else os.close(os.open(path, os.O_RDONLY))

    return not _trial(read)


def take(steps: Iterable[kernel.Step]) -> None:
    """Make the calls in order; raises OSError at the first that fails."""
    for call, arguments in steps:
        result = call(*arguments)
        if result is not None and result < 0:
            raise OSError("a step of the lockdown failed")


_NOBODY_STEPS: tuple[kernel.Step, ...] = (
    (
        (os.setgroups, ([],)),
        *((call, (namespaces.NOBODY,) * 3) for call in (os.setresgid, os.setresuid)),
    )
    if kernel.SUPPORTED
    else ()
)
_SETUPS = {"namespaces": _namespaces, "filters": _filters, "limits": _limits}
__all__ = ["Jail", "enter", "take"]
