"""One worker as the parent sees it: its process, its pipes, the part that it is running.

What: frames in and out, and the verdict on a part from the records of its child. What not: no
scheduling (`pool.py`), no jail (`inside/`).
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlfe.sandbox.encoding import Malformed
from rlfe.sandbox.parts import Part, PartResult
from rlfe.types import Status

START_SECONDS = 30.0
CACHED_KEYS = 96
_FRAME = struct.Struct(">cII")
_END = struct.Struct(">BiddI")
_CAUSES = ("exited", "cpu", "wall", "output", "stopped")
_MAX_FRAME = 1 << 19
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop()); "
    "from rlfe.sandbox.inside import server; del sys.path[0]; server.main()"
)


def _packages() -> dict[str, str]:
    """What programs may import beside the standard library: numpy, if it is installed."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = spec.submodule_search_locations[0]
    return {"numpy": folder, "numpy.libs": f"{folder}.libs"}


class WorkerLost(Exception):
    """The worker's pipe is closed or it speaks nonsense."""


class Worker:
    """A jailed fork server, started by exec."""

    def __init__(self, *, jail: str = "auto") -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="rlfe-jail-", ignore_cleanup_errors=True)
        options = {"jail": jail, "scratch": self.scratch.name, "packages": _packages()}
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _BOOT, json.dumps(options), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            close_fds=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.replies = self._process.stdout.fileno()
        self._requests = self._process.stdin.fileno()
        self.run: Any = None
        self.deadline = 0.0
        self._buffer = bytearray()
        self._number = 0
        self._known: set[str] = set()
        self._reading: Reading | None = None

    def hello(self) -> dict[str, Any]:
        """What the worker says of its jail."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            ready, _, _ = select.select([self.replies], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise WorkerLost("no hello")
            self._fill()
            for kind, _, payload in self._frames():
                if kind == b"H":
                    facts: dict[str, Any] = json.loads(payload)
                    return facts
                raise WorkerLost("no hello")

    def begin(self, program: str, part: Part, run: Any) -> None:
        """Start a part; its answers come by `receive`."""
        self.run, self._number = run, self._number + 1
        if part.inputs_key and part.inputs_key not in self._known:
            if len(self._known) >= CACHED_KEYS:
                self._send(("forget",))
                self._known.clear()
            self._send(("inputs", part.inputs_key, part.inputs))
            self._known.add(part.inputs_key)
        job = {
            "program": program.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass"),
            "inputs": () if part.inputs_key else part.inputs,
            **{name: getattr(part, name) for name in _JOB_FIELDS},
        }
        self._reading = Reading(part)
        self.deadline = time.monotonic() + part.wall_seconds
        self._send(("job", self._number, job))

    def receive(self) -> PartResult | None:
        """Read what has come; the result when the part has ended, else None."""
        self._fill()
        result = None
        for kind, number, payload in self._frames():
            reading = self._reading
            if reading is None or number != self._number:
                continue  # the rest of a part that was stopped
            if kind == b"O":
                was_open = reading.wrong is None
                reading.feed(payload)
                if was_open and reading.wrong is not None and not reading.part.keep_going:
                    self._send(("stop", number))
            elif kind == b"E":
                result = reading.result(*_END.unpack(payload))
                self._reading = None
            else:
                raise WorkerLost("unknown frame")
        return result

    def _fill(self) -> None:
        data = os.read(self.replies, 1 << 20)
        if not data:
            raise WorkerLost("closed")
        self._buffer += data

    def _frames(self) -> list[tuple[bytes, int, bytes]]:
        frames = []
        while len(self._buffer) >= _FRAME.size:
            kind, number, size = _FRAME.unpack_from(self._buffer)
            if size > _MAX_FRAME:
                raise WorkerLost("a frame is too long")
            if len(self._buffer) < _FRAME.size + size:
                break
            frames.append((kind, number, bytes(self._buffer[_FRAME.size : _FRAME.size + size])))
            del self._buffer[: _FRAME.size + size]
        return frames

    def _send(self, message: tuple[Any, ...]) -> None:
        body = marshal.dumps(message)
        data = memoryview(len(body).to_bytes(4, "big") + body)
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except OSError as error:
            raise WorkerLost(str(error)) from error

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the worker; everything in its jail goes with it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # the other end is gone: nothing to flush to
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.scratch.cleanup()


_JOB_FIELDS = (
    "mode", "entry", "method", "setup", "stdin", "shape", "exact", "inputs_key", "keep_going",
    "end_mark", "cpu_seconds", "wall_seconds", "call_seconds", "load_seconds", "slow_calls",
    "memory_bytes",
)  # fmt: skip


class Reading:
    """The records of one child, strictly read, and the verdict that follows from them."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.right = self.answered = 0
        self.wrong: tuple[Status, str] | None = None  # the first thing that went wrong
        self.ended = False
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        if self.wrong is not None and not self.part.keep_going:
            return
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= 5 and (self.wrong is None or self.part.keep_going):
            size = int.from_bytes(self._buffer[at + 1 : at + 5], "big")
            if len(self._buffer) - at - 5 < size:
                break
            tag = bytes(self._buffer[at : at + 1])
            self._record(tag, bytes(self._buffer[at + 5 : at + 5 + size]))
            at += 5 + size
        del self._buffer[:at]

    def _record(self, tag: bytes, payload: bytes) -> None:
        if self.ended:
            return self._fail(Status.FAILED, "answers after the end")
        if tag == b"V":
            self._answer(payload)
        elif tag == b"X":
            self._raised(payload.decode("utf-8", "replace")[:120])
        elif tag == b"S":
            self._fail(Status.SYNTAX_ERROR, payload.decode("utf-8", "replace")[:200])
        elif tag == b"N":
            self._fail(Status.NO_ANSWER, f"{self.part.entry} is not defined")
        elif tag == b"E":
            self.ended = True
        elif tag != b"L":
            self._fail(Status.FAILED, "unreadable answer")

    def _answer(self, payload: bytes) -> None:
        index = self.answered
        self.answered += 1
        if index >= len(self.part.inputs):
            return self._fail(Status.FAILED, "more answers than questions")
        try:
            right = self.part.check(index, payload)
        except Malformed as error:
            return self._fail(Status.FAILED, f"input {index}: unreadable value: {error}")
        if right:
            self.right += 1
        else:
            self._fail(Status.FAILED, f"input {index}: wrong value")

    def _raised(self, text: str) -> None:
        phase, _, name = text.partition(" ")
        where = phase if phase != "call" else f"input {self.answered}"
        status = Status.CRASHED if name in ("SystemExit", "MemoryError") else Status.FAILED
        self._fail(status, f"{where}: raised {name}")
        self.answered += phase == "call"

    def _fail(self, status: Status, detail: str) -> None:
        if self.wrong is None:
            self.wrong = (status, detail)

    def result(self, cause: int, code: int, cpu: float, wall: float, index: int) -> PartResult:
        """The verdict: `passed` only if every answer was there and right."""
        status, detail = self._verdict(_CAUSES[cause], code, index)
        return PartResult(
            name=self.part.name,
            status=status,
            detail=detail,
            cpu=cpu,
            wall=wall,
            right=self.right,
            total=len(self.part.inputs),
        )

    def _verdict(self, cause: str, code: int, index: int) -> tuple[Status, str]:
        total = len(self.part.inputs)
        if self.wrong is None and self.right == self.answered == total and self.ended:
            return Status.PASSED, ""
        if cause in ("cpu", "wall") and (self.wrong is None or self.part.keep_going):
            return Status.TIMEOUT, f"input {index}: {cause} limit"
        if self.wrong is not None:
            return self.wrong
        if cause == "output":
            return Status.CRASHED, f"input {index}: too much output"
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return Status.CRASHED, f"input {index}: ended early, {how}"
