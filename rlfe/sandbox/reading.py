"""What a child sent, strictly read, and the verdict on each part that follows from it.

What: records to counts of right answers; only the right number of right values passes. What not:
pipes and processes (`worker.py`), equality (the part's `check`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rlfe.sandbox.encoding import Malformed
from rlfe.sandbox.parts import Part, PartResult
from rlfe.types import Status

CAUSES = ("exited", "cpu", "wall", "output", "stopped")  # as the server numbers them
LOADING = 0xFFFFFFFF  # in place of an input (`inside/harness.py`)
HEAD = 5  # tag and length of a record


class Reading:
    """The records of one child, which answers the parts in order."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.tallies = [Tally(part) for part in parts]
        self.place = 0
        self._buffer = bytearray()

    @property
    def now(self) -> Tally:
        """The part in progress."""
        return self.tallies[self.place]

    @property
    def is_settled(self) -> bool:
        """Whether nothing more can change the verdict."""
        return self.now.wrong is not None and not self.now.part.keep_going

    def feed(self, data: bytes) -> None:
        """Take what came from the pipe."""
        if self.is_settled:
            return
        self._buffer += data
        at = self.now.take_right(self._buffer, 0)
        while len(self._buffer) - at >= HEAD and not self.is_settled:
            size = int.from_bytes(self._buffer[at + 1 : at + HEAD], "big")
            if len(self._buffer) - at - HEAD < size:
                break
            self._record(self._buffer[at], bytes(self._buffer[at + HEAD : at + HEAD + size]))
            at = self.now.take_right(self._buffer, at + HEAD + size)
        del self._buffer[:at]

    def _record(self, tag: int, payload: bytes) -> None:
        if self.now.is_whole and self.place + 1 < len(self.tallies):
            self.place += 1
        self.now.record(tag, payload)

    def results(
        self, cause: int, code: int, cpu: float, wall: float, place: int, index: int
    ) -> list[PartResult]:
        """A result for every part that was begun; the times stand with the last."""
        known = (
            min(place, self.place + 1, len(self.tallies) - 1) if self.now.is_whole else self.place
        )
        self.place = max(self.place, known)
        found = [tally.result("exited", 0, 0.0, 0.0, 0) for tally in self.tallies[: self.place]]
        return [*found, self.now.result(CAUSES[cause], code, cpu, wall, index)]


class Tally:
    """The answers to one part."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.right = self.answered = 0
        self.wrong: tuple[Status, str] | None = None  # the first thing that went wrong
        self.ended = False

    @property
    def is_whole(self) -> bool:
        """Every answer was there and right, and the child said that these were all."""
        total = len(self.part.inputs)
        return self.ended and self.wrong is None and self.right == self.answered == total

    def take_right(self, data: bytearray, at: int) -> int:
        """Count the answers from `at` on that are right as they stand; where the next begins."""
        if self.ended or self.wrong is not None:
            return at
        records, index = self.part.right_records, self.answered
        while index < len(records) and records[index] and data.startswith(records[index], at):
            at += len(records[index])
            index += 1
        self.right += index - self.answered
        self.answered = index
        return at

    def record(self, tag: int, payload: bytes) -> None:
        """One record: V value, X exception, E end, S syntax error, N no entry point, L loaded."""
        if self.ended:
            self._fail(Status.FAILED, "answers after the end")
        elif tag == 86:
            self._answer(payload)
        elif tag == 88:
            self._raised(payload.decode("utf-8", "replace")[:120])
        elif tag == 69:
            self.ended = True
        elif tag == 83:
            self._fail(Status.SYNTAX_ERROR, payload.decode("utf-8", "replace")[:200])
        elif tag == 78:
            self._fail(Status.NO_ANSWER, f"{self.part.entry} is not defined")
        elif tag != 76:
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

    def result(self, cause: str, code: int, cpu: float, wall: float, index: int) -> PartResult:
        """The verdict on this part."""
        status, detail = self._verdict(cause, code, index)
        return PartResult(
            name=self.part.name,
            mode=self.part.mode,
            status=status,
            detail=detail,
            cpu=cpu,
            wall=wall,
            right=self.right,
            total=len(self.part.inputs),
        )

    def _verdict(self, cause: str, code: int, index: int) -> tuple[Status, str]:
        if self.is_whole:
            return Status.PASSED, ""
        where = "load" if index == LOADING else f"input {index}"
        if cause in ("cpu", "wall") and (self.wrong is None or self.part.keep_going):
            return Status.TIMEOUT, f"{where}: {cause} limit"
        if self.wrong is not None:
            return self.wrong
        if code == -signal.SIGXCPU:  # where the server cannot read a child's CPU clock (macOS)
            return Status.TIMEOUT, f"{where}: cpu limit"
        if cause == "output":
            return Status.CRASHED, f"{where}: too much output"
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return Status.CRASHED, f"{where}: ended early, {how}"
