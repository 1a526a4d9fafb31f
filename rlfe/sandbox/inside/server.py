"""The fork server of one worker: one child per program, nothing else.

What: reads jobs from the parent, forks a child for each, passes its records on, measures and
limits its CPU and wall time, and kills it with everything it started. What not: it never sees
an expected value and decides nothing. Started by exec with pipes as stdin and stdout.

Frames to the parent: kind, job number, length, payload (`H` hello, `O` records of the child,
`E` the end of a child). Frames from the parent: length, marshal of a tuple (the parent is
trusted, the other direction is not).
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import gc
import importlib
import json
import marshal
import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

from rlfe.sandbox.inside import harness, kernel, lockdown

FRAME = struct.Struct(">cII")
END = struct.Struct(">BiddII")
EXITED, CPU, WALL, OUTPUT, STOPPED = range(5)
MAX_OUTPUT = 64 << 20
POLL_SECONDS = 0.25
# What programs import most. `random` reseeds in every child, `dataclasses` and `statistics` are
# large: a program that wants them loads them itself.
PRELOADED = (
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "re",
    "string", "sys", "typing",
)  # fmt: skip


class Server:
    """The worker's loop over jobs."""

    def __init__(self, requests: int, replies: int, jail: lockdown.Jail) -> None:
        self.requests, self.replies, self.jail = requests, replies, jail
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.place = memoryview(mmap.mmap(-1, 8)).cast("I")  # part and input, written by the child
        self.has_numpy = False

    def serve(self) -> None:
        """Until the parent closes the pipe."""
        self._frame(b"H", 0, json.dumps(self.jail.facts()).encode())
        while (message := self._next()) is not None:
            kind = message[0]
            if kind == "inputs":
                self.inputs[message[1]] = message[2]
            elif kind == "forget":
                self.inputs.clear()
            elif kind == "job":
                self._job(message[1], message[2])

    def _next(self) -> tuple[Any, ...] | None:
        head = self._read(4)
        if head is None:
            return None
        body = self._read(int.from_bytes(head, "big"))
        return None if body is None else marshal.loads(body)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            piece = os.read(self.requests, min(size - len(data), 1 << 20))
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _frame(self, kind: bytes, number: int, payload: bytes) -> None:
        data = memoryview(FRAME.pack(kind, number, len(payload)) + payload)
        try:
            while data:
                data = data[os.write(self.replies, data) :]
        except BrokenPipeError:
            os._exit(0)  # the parent is gone; the children go with us

    def _job(self, number: int, job: dict[str, Any]) -> None:
        for part in job["parts"]:
            if part["inputs_key"]:
                part["inputs"] = self.inputs[part["inputs_key"]]
        if "numpy" in job["program"] and not self.has_numpy:
            self._load_numpy()
        self.place[0], self.place[1] = 0, harness.LOADING
        child = Child(job, self.jail, self.place)
        try:
            cause = self._watch(number, child, job["parts"])
        finally:
            status, usage = child.end()
        cpu = usage.ru_utime + usage.ru_stime
        wall = time.monotonic() - child.started
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        self._frame(b"E", number, END.pack(cause, code, cpu, wall, *self._place()))

    def _place(self) -> tuple[int, int]:
        """Part and input that the child says it works on: for limits of slow calls, and words."""
        return self.place[0], self.place[1]

    def _load_numpy(self) -> None:
        self.has_numpy = True
        try:
            importlib.import_module("numpy")
        except ImportError:
            return
        gc.collect()
        gc.freeze()

    def _watch(self, number: int, child: Child, parts: list[dict[str, Any]]) -> int:
        """Pass records on until the child closes its pipe or breaks a limit; the cause."""
        poll = select.poll()
        poll.register(child.pipe, select.POLLIN)
        poll.register(self.requests, select.POLLIN)
        sent, limit = 0, Clock(child, parts)
        while True:
            cause, wait = limit.check(*self._place())
            if cause is not None and (limit.is_spent or not poll.poll(0)):
                return cause  # an answer that waits in the pipe ends the call whose time this is
            if limit.is_time_to_look() and self.jail.overfull():
                return OUTPUT
            for source, _ in poll.poll(wait * 1000):
                if source == self.requests:
                    self._stop(number)
                    return STOPPED
                data = os.read(child.pipe, 1 << 18)
                if not data:
                    return EXITED
                sent += len(data)
                if sent > MAX_OUTPUT:
                    return OUTPUT
                limit.moved()
                self._frame(b"O", number, data)

    def _stop(self, number: int) -> None:
        message = self._next()
        if message is None:
            os._exit(0)  # the parent is gone; the children go with us
        assert message[:2] == ("stop", number), message[:2]


class Clock:
    """CPU time decides, wall time catches sleepers; both for the call in progress and in all."""

    def __init__(self, child: Child, parts: list[dict[str, Any]]) -> None:
        self.child, self.parts = child, parts
        self.mark_cpu, self.mark_wall = 0.0, child.started
        self.next_look = child.started + POLL_SECONDS
        self.is_spent = False  # the time of all calls together

    def is_time_to_look(self) -> bool:
        """Now and then: whether the child has run for another quarter of a second."""
        if time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + POLL_SECONDS
        return True

    def moved(self) -> None:
        """Something came: the time of the next call starts."""
        self.mark_cpu, self.mark_wall = self.child.cpu(), time.monotonic()

    def check(self, place: int, index: int) -> tuple[int | None, float]:
        """(cause or None, seconds until it is worth looking again) while input `index` runs.

        What a part leaves of its time adds to the next one's.
        """
        now, cpu = time.monotonic(), self.child.cpu()
        begun = self.parts[: place + 1]
        part = begun[-1]
        call = part["slow_calls"].get(index, part["call_seconds"])
        call = part["load_seconds"] if index == harness.LOADING else call
        total, wall = (sum(p[name] for p in begun) for name in ("cpu_seconds", "wall_seconds"))
        left_cpu = min(total - cpu, call - (cpu - self.mark_cpu))
        ends = self.child.started + wall
        self.is_spent = cpu >= total or now >= ends
        if left_cpu <= 0:
            return CPU, 0.0
        quiet = 3 * call + 2
        left_wall = min(ends - now, self.mark_wall + quiet - now)
        if left_wall <= 0:
            return WALL, 0.0
        # A child tells of no call that begins: while it loads, the next look is due when its first
        # call could be over its limit.
        look = min(left_cpu, left_wall, part["call_seconds"], POLL_SECONDS)
        return None, max(0.001, look)


class Child:
    """A forked process that runs one program."""

    def __init__(self, job: dict[str, Any], jail: lockdown.Jail, place: memoryview) -> None:
        self.jail = jail
        script = job["parts"][0]["mode"] == "stdin"
        self.files = jail.script_files(job["parts"][0]["stdin"]) if script else ()
        self.pipe, writer = os.pipe()
        steps = jail.steps(job, writer, self.files)
        self.started = time.monotonic()
        self.pid = jail.fork()
        if self.pid == 0:
            _run(job, steps, place)
        os.close(writer)
        for file in self.files:
            os.close(file)
        self._clock = (~self.pid << 3) | 2  # the kernel's CPU clock of a process

    def cpu(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # a zombie on some kernels, or no such clock: the rlimit remains
            return 0.0

    def end(self) -> tuple[int, Any]:
        """Kill what is left; (wait status, resource usage)."""
        os.close(self.pipe)
        self.jail.kill(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        self.jail.after_child()
        return status, usage


def _run(job: dict[str, Any], steps: tuple[kernel.Step, ...], place: memoryview) -> NoReturn:
    """In the child: lock down, run the program, end."""
    try:
        lockdown.take(steps)
        gc.enable()
        harness.run(job, harness.Sender(lockdown.Jail.PIPE), place)
    except BaseException:
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Entry of the worker process: set the jail up, then serve."""
    requests, replies = os.dup(0), os.dup(1)
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(devnull, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in PRELOADED:
        importlib.import_module(name)
    for name in ("exit", "quit"):  # what `site` gives; scripts end with them
        setattr(builtins, name, _sitebuiltins.Quitter(name, "the end of input"))
    options = json.loads(sys.argv[1])
    jail = lockdown.enter(options)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rlfe"]:
        del sys.modules[name]  # programs import their own things, never ours
    sys.argv[:] = [""]
    gc.disable()
    harness.rehearse(devnull)
    gc.collect()
    kernel.trim()
    gc.freeze()
    Server(requests, replies, jail).serve()
