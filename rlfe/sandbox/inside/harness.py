"""Runs one program in its own process and sends what its calls return.

What: the child's side. Records on the result pipe: a tag, a length, a payload. `V` a value, `X`
an exception (phase and class name), `S` the program does not parse, `N` no entry point, `E` all
calls done. What not: nothing here decides. The parent counts right values and nothing else, so
a program that forges records only answers, without knowing what is expected.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlfe.sandbox.inside import wire

RECORD = wire.COUNT
FLUSH_BYTES = 1 << 16
FLUSH_SECONDS = 0.002  # a slow call is sent at its end, so that the server sees progress
LOADING = 0xFFFFFFFF  # in place of an input
MAX_LISTED = 1_000_000  # elements taken from an iterable result


class Sender:
    """Buffers records and writes them to the result pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._parts, self._size = pipe, [b""], 0
        self._write, self._clock = os.write, time.monotonic
        self._last = self._clock()

    def send(self, tag: bytes, payload: bytes) -> None:
        size = len(payload)
        self._parts += (tag, RECORD.pack(size), payload)
        self._size += size
        if self._size > FLUSH_BYTES or self._clock() - self._last > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        data = memoryview(b"".join(self._parts))
        self._parts, self._size = [], 0
        while data:
            data = data[self._write(self._pipe, data) :]
        self._last = self._clock()

    def failed(self, phase: str, error: BaseException) -> None:
        name = wire.class_name(type(error))
        self.send(b"X", f"{phase} {name}".encode("utf-8", "replace"))
        self.flush()


def run(job: Mapping[str, Any], sender: Sender, place: memoryview) -> None:
    """Run the parts of a job, each in a fresh namespace, up to the first that does not end well.

    `place` tells the server which part and which input is being worked on.
    """
    try:
        code = compile(job["program"], "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError) as error:
        sender.send(b"S", str(error)[:200].encode("utf-8", "replace"))
        return sender.flush()
    except BaseException as error:
        return sender.failed("load", error)
    for number, part in enumerate(job["parts"]):
        place[0], place[1] = number, LOADING
        if not _MODES[part["mode"]](part, code, sender, place):
            return


def rehearse(null: int) -> None:
    """Run a harmless program here, in the server, before any is forked.

    What all children execute is then specialised by the interpreter already, and is not in each.
    """
    values = (1, 2.5, "x", None, True, [1, (2, "y")], {"a": {3}}, -(1 << 70))
    calls = {
        "mode": "calls", "entry": "f", "shape": "value", "keep_going": False, "setup": "",
        "exact": (), "digest": (), "inputs": tuple(marshal.dumps((v,), 2) for v in values * 8),
    }  # fmt: skip
    tests = {**calls, "mode": "expressions", "inputs": ("f(1)", "f([2])") * 8}
    place = memoryview(bytearray(8)).cast("I")
    for _ in range(4):
        run({"program": "def f(x):\n    return x\n", "parts": (calls, tests)}, Sender(null), place)


def _loaded(code: Any, namespace: dict[str, Any], sender: Sender, phase: str = "load") -> bool:
    try:
        exec(code, namespace)
    except BaseException as error:
        sender.failed(phase, error)
        return False
    return True


def _calls(job: Mapping[str, Any], code: Any, sender: Sender, place: memoryview) -> bool:
    """`fn(*input)` for every input, in order; stops at the first exception."""
    result, loads, shape = wire.result, marshal.loads, _SHAPES[job["shape"]]
    timed, clock = job["shape"] == "seconds", time.process_time
    send, keep_going = sender.send, job["keep_going"]
    namespace: dict[str, Any] = {}
    if not _loaded(code, namespace, sender):
        return False
    function = namespace.get(job["entry"], _calls)
    if job.get("method"):
        function = _method(namespace, job["entry"])
    if function is _calls:
        send(b"N", b"")
        sender.flush()
        return False
    exact, digest = frozenset(job["exact"]), frozenset(job["digest"])
    send(b"L", b"")
    for index, data in enumerate(job["inputs"]):
        place[1] = index
        try:
            started = clock() if timed else 0.0
            value = function(*loads(data))
            if shape is not None:
                value = shape(value)
            answer = result(value, exact=index in exact, digest_only=index in digest)
            send(b"V", wire.encode(clock() - started) if timed else answer)
        except BaseException as error:
            sender.failed("call", error)
            if not keep_going:
                return False
    return _done(sender)


def _method(namespace: dict[str, Any], name: str) -> Any:
    """A function of that name, else the method of a class `Solution` (the LeetCode form)."""
    if name in namespace:
        return namespace[name]
    try:
        return getattr(namespace["Solution"](), name)
    except BaseException:
        return _calls


def _expressions(job: Mapping[str, Any], code: Any, sender: Sender, place: memoryview) -> bool:
    """Left sides of asserts: their values go to the parent."""
    return _tests(job, code, sender, place, "eval", wire.result)


def _statements(job: Mapping[str, Any], code: Any, sender: Sender, place: memoryview) -> bool:
    """Foreign asserts, run here: the record says so, an always-equal object can pass them."""
    end = wire.encode(job["end_mark"])
    return _tests(job, code, sender, place, "exec", lambda _: end)


def _tests(
    job: Mapping[str, Any],
    code: Any,
    sender: Sender,
    place: memoryview,
    kind: str,
    answer: Callable[[Any], bytes],
) -> bool:
    """The set-up code after the program, then every test in the program's namespace."""
    texts = [compile(text, "<test>", kind, dont_inherit=True) for text in job["inputs"]]
    setup = compile(job["setup"], "<setup>", "exec", dont_inherit=True) if job["setup"] else None
    evaluate, namespace = eval, dict[str, Any]()
    if not _loaded(code, namespace, sender):
        return False
    if setup is not None and not _loaded(setup, namespace, sender, "set-up"):
        return False
    sender.send(b"L", b"")
    for index, text in enumerate(texts):
        place[1] = index
        try:
            sender.send(b"V", answer(evaluate(text, namespace)))
        except BaseException as error:
            sender.failed("call", error)
            if not job["keep_going"]:
                return False
    return _done(sender)


def _script(job: Mapping[str, Any], code: Any, sender: Sender, place: memoryview) -> bool:
    """The program as a script: descriptor 0 holds the input, 1 takes the output (a file)."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "surrogateescape")
    own, lseek, read = sys.stdout, os.lseek, os.read
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace["__name__"] = "__main__"
    try:
        exec(code, namespace)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            sender.failed("load", stop)
            return False
    except BaseException as error:
        sender.failed("load", error)
        return False
    try:
        for stream in (sys.stdout, own):
            stream.flush()
    except BaseException as error:
        sender.failed("load", error)
        return False
    lseek(1, 0, 0)
    sender.send(b"V", wire.encode(read(1, wire.PLAIN_BYTES)))
    return _done(sender)


def _done(sender: Sender) -> bool:
    sender.send(b"E", b"")
    sender.flush()
    return True


def _elements(value: Any) -> Any:
    """The elements of an iterable in iteration order (set tasks); a list or tuple as it is."""
    if type(value) is list or type(value) is tuple:
        return value
    items = wire.Listed()
    for item in value:
        items.append(item)
        if len(items) > MAX_LISTED:
            raise wire.Unencodable("too many elements")
    return items


def _presence(value: Any) -> Any:
    """None, a bool, or "something" (tasks that ask only whether there is a result)."""
    return value if value is None or value is True or value is False else "something"


_SHAPES: dict[str, Callable[[Any], Any] | None] = {
    "value": None,
    "elements": _elements,
    "presence": _presence,
    "seconds": None,
}
_MODES: dict[str, Callable[..., bool]] = {
    "calls": _calls,
    "expressions": _expressions,
    "statements": _statements,
    "stdin": _script,
}
