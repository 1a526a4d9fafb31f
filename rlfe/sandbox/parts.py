"""What the pool is asked and what it answers: parts, cases, results. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlfe.types import Status

MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process of a program: what it is asked, and what decides.

    `check(i, encoded)` says whether answer i is right; it runs in this process.
    `right_records[i]`, if it is there and not empty, is a record that needs no check: this one is
    right. `screen_seconds` limits a call in a first run whose timeout would be run again.
    `Part(name="base", mode="calls", entry="f", inputs=(...), check=check)`
    """

    name: str
    mode: str  # calls, expressions, statements, stdin
    inputs: tuple[Any, ...]
    check: Callable[[int, bytes], bool]
    entry: str = ""
    method: bool = False  # a method of a class Solution will do
    setup: str = ""
    stdin: str = ""
    shape: str = "value"  # value, elements, presence
    exact: tuple[int, ...] = ()  # inputs whose answer travels as an exact digest
    digest: tuple[int, ...] = ()  # those whose answer travels as a canonical digest
    inputs_key: str = ""  # the same for the same inputs: they are sent to a worker once
    keep_going: bool = False  # count right answers instead of stopping at the first wrong one
    end_mark: str = ""
    cpu_seconds: float = 0.8
    call_seconds: float = 60.0
    screen_seconds: float = 0.25
    load_seconds: float = 5.0  # CPU seconds until the program is loaded
    slow_calls: Mapping[int, float] = field(default_factory=dict)  # other limits, by input
    memory_bytes: int = MEMORY_BYTES
    right_records: tuple[bytes, ...] = ()

    @property
    def wall_seconds(self) -> float:
        return 3 * self.cpu_seconds + 2


def value_record(encoded: bytes) -> bytes:
    """The record by which a child sends this value (`inside/harness.py`)."""
    return b"V" + len(encoded).to_bytes(4, "big") + encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program and its parts, in order; the next part runs only if the one before passed.

    `confirm`: a timeout is run once more, alone, before it counts. `cost`: expected seconds.
    """

    key: Any
    program: str
    parts: tuple[Part, ...]
    confirm: bool = False
    cost: float = 0.0
    shared: bool = False  # one process runs all parts; a part that fails there is run by itself
    run_all: bool = False  # go on after a part that failed (fractions of stdin tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """How one part ended. `right` of `total` answers were right."""

    name: str
    mode: str
    status: Status
    detail: str
    cpu: float
    wall: float
    right: int
    total: int
    first_cpu: float | None = None  # of the run that timed out first, where it was run again


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case ended: its last part's status, and every part."""

    status: Status
    detail: str
    seconds: float
    parts: tuple[PartResult, ...] = ()
