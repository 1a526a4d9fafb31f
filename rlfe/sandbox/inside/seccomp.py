"""The system calls that a program may not make, as a BPF filter.

What: EPERM for sockets, other processes, new processes, mounts, namespaces, keys, bpf and the like;
threads stay allowed. What not: an allow list (honest programs import odd modules). A process
that makes no process has no descendants to look for. Numbers: kernel tables of x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Iterable, Mapping, Sequence

from rlfe.sandbox.inside import kernel

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
_X32 = 0x40000000
_CLONE_THREAD = 0x10000
_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _JUMP, _JEQ, _JGE, _JSET, _RET = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_ANY_PID = 0x7FABCDEF  # no process has it: Linux has at most 2**22
_ARGUMENT = (16, 24)  # offsets of the low halves of the first two arguments

# name -> (x86_64, aarch64); -1: the machine has no such call
_FORKS = {"fork": (57, -1), "vfork": (58, -1)}
_MOUNTS = {"mount": (165, 40), "umount2": (166, 39)}
_OTHERS = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "bind": (49, 200),
    "listen": (50, 201), "accept4": (288, 242),
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424,) * 2,
    "pidfd_open": (434,) * 2, "pidfd_getfd": (438,) * 2, "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440,) * 2, "process_mrelease": (448,) * 2,
    "kcmp": (312, 272), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447,) * 2,
    "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428,) * 2, "move_mount": (429,) * 2, "fsopen": (430,) * 2, "fsconfig": (431,) * 2,
    "fsmount": (432,) * 2, "fspick": (433,) * 2, "mount_setattr": (442,) * 2,
    "unshare": (272, 97), "setns": (308, 268), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425,) * 2, "io_uring_enter": (426,) * 2,
    "io_uring_register": (427,) * 2, "io_setup": (206, 0), "personality": (135, 92),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "mknod": (133, -1),
    "mknodat": (259, 33), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "quotactl": (179, 60), "modify_ldt": (154, -1), "iopl": (172, -1),
    "ioperm": (173, -1),
}  # fmt: skip
_CLONE, _CLONE3, _KILL_CALL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_PRLIMIT, _AFFINITY, _PRIORITY, _PRCTL = (302, 261), (203, 122), (141, 140), (157, 167)


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Run `body` if the call has this number; the number stays loaded otherwise."""
    return [_instruction(_JEQ, number, 0, len(body)), *body]


def _own_process_only(argument: int, allowed: Iterable[int]) -> list[bytes]:
    """Allow the call if its argument is one of the given numbers, else refuse it."""
    body = [_instruction(_LOAD, _ARGUMENT[argument])]
    for value in allowed:
        body += [_instruction(_JEQ, value, 0, 1), _instruction(_RET, _ALLOW)]
    return [*body, _instruction(_RET, _EPERM)]


def _when_any(numbers: Sequence[int], body: bytes) -> list[bytes]:
    """One instruction for all these calls; the number stays loaded otherwise."""
    last = len(numbers)
    tests = [_instruction(_JEQ, number, last - at, 0) for at, number in enumerate(numbers)]
    return [*tests, _instruction(_JUMP, 1), body]


def program(pid: int) -> bytes:
    """The whole filter for a process that sees itself as `pid`."""
    code = _start(_OTHERS | _FORKS | _MOUNTS) + _of_a_program()
    return code.replace(struct.pack("<I", _ANY_PID), struct.pack("<I", pid))


def server_program() -> bytes:
    """What the fork server itself never needs; its children inherit it and pay nothing for it."""
    return _start(_OTHERS) + _instruction(_RET, _ALLOW)


@functools.cache
def _child_program() -> bytes:
    """The rest, for a child, with `_ANY_PID` in place of the process id."""
    return _start(_FORKS | _MOUNTS) + _of_a_program()


def _place() -> int:
    return 0 if kernel.MACHINE == "x86_64" else 1


def _start(refused: Mapping[str, tuple[int, int]]) -> bytes:
    """Calls in this machine's own numbering only, and none of those given."""
    place = _place()
    refuse = [_instruction(_RET, _EPERM)]
    code = [
        _instruction(_LOAD, 4),
        _instruction(_JEQ, _ARCH[kernel.MACHINE], 1, 0),
        _instruction(_RET, _KILL),
        _instruction(_LOAD, 0),
    ]
    if place == 0:
        code += [_instruction(_JGE, _X32, 0, 1), *refuse]
    known = [numbers[place] for numbers in refused.values() if numbers[place] >= 0]
    return b"".join([*code, *_when_any(known, refuse[0])])


def _of_a_program() -> bytes:
    """Threads but no processes, and no reach to any process but the caller's own."""
    pid, place = _ANY_PID, _place()
    refuse = [_instruction(_RET, _EPERM)]
    threads_only = [
        _instruction(_LOAD, _ARGUMENT[0]),
        _instruction(_JSET, _CLONE_THREAD, 0, 1),
        _instruction(_RET, _ALLOW),
        *refuse,
    ]
    code = _when(_CLONE[place], threads_only)
    code += _when(_CLONE3[place], [_instruction(_RET, _ENOSYS)])
    for call in (_KILL_CALL, _TGKILL):
        code += _when(call[place], _own_process_only(0, (pid,)))
    for call in (_PRLIMIT, _AFFINITY):
        code += _when(call[place], _own_process_only(0, (0, pid)))
    one_process = [
        _instruction(_LOAD, _ARGUMENT[0]),  # PRIO_PROCESS is 0; not a group's or a user's
        _instruction(_JEQ, 0, 1, 0),
        *refuse,
        *_own_process_only(1, (0, pid)),
    ]
    code += _when(_PRIORITY[place], one_process)
    parent_death = [
        _instruction(_LOAD, _ARGUMENT[0]),
        _instruction(_JEQ, kernel.PR_SET_PDEATHSIG, 0, 1),
        *refuse,
        _instruction(_RET, _ALLOW),
    ]
    code += _when(_PRCTL[place], parent_death)
    return b"".join([*code, _instruction(_RET, _ALLOW)])


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(ctypes.c_uint32)))


def _block(code: bytes) -> tuple[_Program, ctypes.Array[ctypes.c_uint32]]:
    words = (ctypes.c_uint32 * (len(code) // 4)).from_buffer_copy(code)
    return _Program(len(code) // 8, words), words


def install_steps(pid: int | None) -> tuple[kernel.Step, ...]:
    """To put what `server_program` leaves open on the calling process; needs no_new_privs.

    Args:
        pid: What that process sees as its own id; None finds it out there.
    """
    own = _ANY_PID if pid is None else pid
    code = _child_program().replace(struct.pack("<I", _ANY_PID), struct.pack("<I", own))
    block, words = _block(code)
    install = kernel.prctl_step(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(block))
    places = [at for at, word in enumerate(words) if word == _ANY_PID]

    def fill_in() -> None:
        own = os.getpid()
        for at in places:
            words[at] = own

    return ((fill_in, ()), install) if places else (install,)


def install(code: bytes) -> None:
    """Put the filter on this process now; needs no_new_privs. Raises OSError."""
    kernel.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_block(code)[0]))
