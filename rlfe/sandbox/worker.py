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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlfe.sandbox import bubblewrap
from rlfe.sandbox.parts import Part, PartResult
from rlfe.sandbox.reading import Reading

START_SECONDS = 30.0
CACHED_KEYS = 96
SCREEN_LOAD_SECONDS = 0.25  # CPU seconds until a program is loaded, in the first of two runs
_FRAME = struct.Struct(">cII")
_END = struct.Struct(">BiddII")
_MAX_FRAME = 1 << 19
_ENVIRONMENT = {
    "LD_BIND_NOW": "1",  # bound once, not in every child
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
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
        packages = _packages()
        wrapper = bubblewrap.find() if jail == "bubblewrap" else ""
        options: dict[str, Any] = {"jail": jail, "scratch": self.scratch.name, "packages": packages}
        root = str(Path(__file__).resolve().parents[2])
        start = [sys.executable]
        if wrapper:
            options["jail"], options["bubblewrap"] = "namespaces", True
            start = [*bubblewrap.command(wrapper, packages), os.path.realpath(sys.executable)]
        self._process = subprocess.Popen(
            [*start, "-P", "-s", "-S", "-B", "-c", _BOOT, json.dumps(options), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if wrapper else None,
            env=_ENVIRONMENT,
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

    def begin(self, program: str, parts: Sequence[Part], run: Any, screening: bool = False) -> None:
        """Start a program on its parts, all in one process; its answers come by `receive`.

        `screening`: shorter limits, because a timeout is run again with the full ones.
        """
        self.run, self._number = run, self._number + 1
        self._send_inputs(parts)
        job = {
            "program": program,
            "memory_bytes": max(part.memory_bytes for part in parts),
            "cpu_seconds": sum(part.cpu_seconds for part in parts),
            "parts": [_asked(part, screening) for part in parts],
        }
        self._reading = Reading(parts)
        self.deadline = time.monotonic() + sum(part.wall_seconds for part in parts)
        self._send(("job", self._number, job))

    def _send_inputs(self, parts: Sequence[Part]) -> None:
        """The inputs that the worker does not hold yet; it forgets all when it holds many."""
        wanted = {part.inputs_key: part.inputs for part in parts if part.inputs_key}
        if len(self._known | set(wanted)) > CACHED_KEYS:
            self._send(("forget",))
            self._known.clear()
        for key in wanted.keys() - self._known:
            self._send(("inputs", key, wanted[key]))
            self._known.add(key)

    def receive(self) -> list[PartResult]:
        """Read what has come; the results of the parts when the child has ended, else nothing."""
        self._fill()
        results: list[PartResult] = []
        for kind, number, payload in self._frames():
            reading = self._reading
            if reading is None or number != self._number:
                continue  # the rest of a child that was stopped
            if kind == b"O":
                was_open = not reading.is_settled
                reading.feed(payload)
                if was_open and reading.is_settled:
                    self._send(("stop", number))
            elif kind == b"E":
                results = reading.results(*_END.unpack(payload))
                self._reading = None
            else:
                raise WorkerLost("unknown frame")
        return results

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


_FIELDS = (
    "mode", "entry", "method", "setup", "stdin", "shape", "exact", "digest", "inputs_key",
    "keep_going",
    "end_mark", "cpu_seconds", "wall_seconds", "call_seconds", "load_seconds", "slow_calls",
)  # fmt: skip


def _asked(part: Part, screening: bool) -> dict[str, Any]:
    """What the child is told of a part."""
    told = {name: getattr(part, name) for name in _FIELDS}
    told["inputs"] = () if part.inputs_key else part.inputs
    if screening:
        told["call_seconds"] = min(part.call_seconds, part.screen_seconds)
        told["load_seconds"] = min(part.load_seconds, SCREEN_LOAD_SECONDS)
    return told
