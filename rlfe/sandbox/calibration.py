"""Two known programs before all others: is the judge right, and how fast is this machine?

What: a right program and a wrong one, judged as any other; the CPU time of the first scales the
packaged reference times. What not: a benchmark (`benchmarks/judging.py`).
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rlfe.errors import RlfeError
from rlfe.sandbox.encoding import decode
from rlfe.sandbox.parts import Case, Outcome, Part
from rlfe.types import Status

REFERENCE_SECONDS = 0.02  # of the program on the machine that made the packaged reference times
PROGRAM = """
def f():
    table, total = {}, 0
    for number in range(60000):
        table[number % 1000] = [number]
        total += len(str(number)) + table[number % 1000][0] % 7
    return total
"""


def scale(seconds: float) -> float:
    """How much slower this machine is than the one of the reference times; at least 1."""
    return max(1.0, seconds / REFERENCE_SECONDS)


def probe_seconds(run: Callable[[Iterable[Case]], Iterator[tuple[Case, Outcome]]]) -> float:
    """CPU seconds of a small program here, the shortest of three.

    Raises RlfeError if the verdict on a program known to be right, or on one known to be wrong, is
    off: then nothing is judged.
    """
    seen: list[float] = []

    def keep(index: int, data: bytes) -> bool:
        seen.append(decode(data))
        return True

    asked = (marshal.dumps((), 2),)
    right = Part(
        name="probe", mode="calls", entry="f", inputs=asked * 3, check=keep, shape="seconds",
        cpu_seconds=30.0, call_seconds=30.0,
    )  # fmt: skip
    wrong = replace(right, inputs=asked, shape="value", check=lambda i, data: data == b"N")
    cases = [Case(key=part.shape, program=PROGRAM, parts=(part,)) for part in (right, wrong)]
    ends = {case.parts[0].shape: outcome for case, outcome in run(cases)}
    if ends["seconds"].status is Status.PASSED and ends["value"].status is Status.FAILED:
        return min(seen)
    words = "; ".join(f"{end.status} {end.detail}" for end in ends.values())
    raise RlfeError(f"the judge gets a known program wrong: {words}", hint="Run `rlfe doctor`.")
