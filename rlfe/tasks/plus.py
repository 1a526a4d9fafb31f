"""MBPP+ and HumanEval+: base tests, then plus tests, with evalplus' meaning of right.

What: problems, evalplus' prompt formats, expected results and reference times from the packaged
files, limits scaled to this machine. What not: the comparison (`oracle`) and running (`sandbox`).
Verdicts: `passed` is base and plus; `facts` give each, under the names that are reported.
"""

from __future__ import annotations

import base64
import functools
import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfe.errors import RequestError
from rlfe.sandbox.parts import MEMORY_BYTES, Case, Outcome, Part, value_record
from rlfe.sandbox.pool import Judge
from rlfe.tasks import packaged
from rlfe.tasks.base import Reply
from rlfe.tasks.coding import FENCE_STOPS, CodingTask, check_style
from rlfe.tasks.mbpp_inputs import arguments
from rlfe.tasks.oracle import Checker, Expected, shape_of
from rlfe.types import Message, Problem, Prompt

MIN_CALL_SECONDS, FACTOR, PART_SECONDS = 1.0, 4.0, 60.0  # evalplus' limits
KNOWN_SECONDS = 0.01  # references shorter than that are not packaged
# The first run's limit of a call, in longest references: for an unknown one it is 0.02 s. A known
# one is generous, because a slow right program that is stopped runs twice, the second time alone.
SCREEN_FACTOR, KNOWN_FACTOR = 2.0, 10.0
HUGE, MANY_BYTES = frozenset({"mbpp_plus/255"}), 3 << 30  # for answers of a million tuples
STOPS = ("\nif __name__", "\ndef main(", "\nprint(", "<|endoftext|>", "<|endofmask|>", "</s>")
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a "
    "markdown code block:"
)
OPENING = (
    "Below is a Python script with a self-contained function that solves the problem and passes "
    "corresponding tests:\n```python\n"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """What the canonical program gives for one part: results, and CPU seconds where they matter."""

    expected: tuple[Expected, ...]
    exact: tuple[int, ...]  # inputs whose answer travels as an exact digest
    digest: tuple[int, ...]  # as a canonical one
    seconds: Mapping[int, float]  # by input; absent: too short to matter


def read_reference(row: Mapping[str, Any]) -> Reference:
    """A part of a row of the packaged file of expected results."""
    expected = tuple(Expected(base64.b85decode(text)) for text in row["results"])
    exact, digest = (
        tuple(i for i, one in enumerate(expected) if one.encoded[:2] == kind)
        for kind in (b"Dm", b"Dk")
    )
    return Reference(expected, exact, digest, {int(i): s for i, s in row["seconds"].items()})


def _screen(known: Reference) -> float:
    """CPU seconds of a call in a first run, on the machine of the reference times."""
    if not known.seconds:
        return SCREEN_FACTOR * KNOWN_SECONDS
    return KNOWN_FACTOR * max(known.seconds.values())


@dataclass(frozen=True, slots=True)
class Limits:
    """CPU seconds of a part: evalplus' rule on scaled reference times."""

    total: float
    default: float
    slow: Mapping[int, float]

    @classmethod
    def of(cls, seconds: Mapping[int, float], count: int, scale: float) -> Limits:
        """Per call max(1 s, 4 x reference), the part min(60 s, sum), never below 2 x reference."""
        slow = {
            index: FACTOR * scale * value
            for index, value in seconds.items()
            if FACTOR * scale * value > MIN_CALL_SECONDS
        }
        allowed = sum(slow.values()) + (count - len(slow)) * MIN_CALL_SECONDS
        least = 2 * scale * sum(seconds.values())
        return cls(max(min(PART_SECONDS, allowed), least, MIN_CALL_SECONDS), MIN_CALL_SECONDS, slow)


class PlusTask(CodingTask):
    """A test set with base and plus inputs (`MbppPlus`, `HumanEvalPlus`)."""

    data: str  # packaged file
    results: str  # packaged file of expected results
    count: int
    base_stops: tuple[str, ...]  # of completion prompts only
    confirm = True

    def __init__(self) -> None:
        self._parts: dict[tuple[str, float], tuple[Part, ...]] = {}

    @functools.cached_property
    def _rows(self) -> dict[str, dict[str, Any]]:
        return {self.problem_id(row["task_id"]): row for row in packaged.rows(self.data)}

    @functools.cached_property
    def _references(self) -> dict[str, dict[str, Any]]:
        head, *rows = packaged.rows(self.results)
        if head["data_sha256"] != packaged.sha256(self.data):
            raise RequestError(
                f"{self.results} was made for another version of {self.data}",
                hint="Run `python -m rlfe.tasks.precompute` again.",
            )
        return {self.problem_id(row["task_id"]): row for row in rows}

    def problem_id(self, task_id: str) -> str:
        """`Mbpp/2` is `mbpp_plus/2`."""
        return f"{self.name}/{task_id.split('/')[1]}"

    def task_id(self, problem_id: str) -> str:
        """`mbpp_plus/2` is `Mbpp/2`, the name in evalplus' files."""
        return str(self._rows[problem_id]["task_id"])

    @functools.cached_property
    def _problems(self) -> tuple[Problem, ...]:
        found = tuple(
            Problem(
                id=name,
                task=self.name,
                split="test",
                prompt=row["prompt"],
                answer=row["prompt"] + row["canonical_solution"],
                entry_point=row["entry_point"],
                extra={"task_id": row["task_id"], "atol": row["atol"]},
            )
            for name, row in self._rows.items()
        )
        if len(found) != self.count:
            raise RequestError(f"{self.data} has {len(found)} problems, not {self.count}")
        return found

    def problems(self, split: str) -> tuple[Problem, ...]:
        if split != "test":
            raise RequestError(f"task {self.name} has no split {split!r}", hint="It has test.")
        return self._problems

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        check_style(style, self.name)
        if examples:
            raise RequestError(
                f"prompt.examples {', '.join(examples)} for task {self.name}",
                hint="Its prompts are evalplus' own and show no examples.",
            )
        if style == "base":
            return Prompt(
                format=f"{self.name}-base-v1",
                text=problem.prompt.strip() + "\n",
                stop=(*STOPS[:3], *self.base_stops, *STOPS[3:]),
                continues_code=True,
            )
        request = f"{INSTRUCTION}\n```python\n{problem.prompt.strip()}\n```"
        return Prompt(
            format=f"{self.name}-chat-v1",
            messages=(Message(role="user", text=request),),
            text=OPENING,
            stop=(*FENCE_STOPS, *STOPS),
            continues_code=True,
        )

    def data_sha256(self) -> str:
        return packaged.sha256(self.data)

    def prefix(self, reply: Reply) -> str:
        return "" if reply.prompt.messages else reply.prompt.text

    def inputs(self, problem_id: str, part: str) -> list[Sequence[Any]]:
        """The arguments of every call of `base` or `plus`."""
        return list(self._rows[problem_id][f"{part}_input"] or [])

    def parts(self, problem: Problem, judge: Judge) -> tuple[Part, ...]:
        key = (problem.id, judge.scale)
        if key not in self._parts:
            reference = self._references[problem.id]
            self._parts[key] = tuple(
                self._part(problem, part, read_reference(reference[part]), judge.scale)
                for part in ("base", "plus")
            )
        return self._parts[key]

    def _part(self, problem: Problem, part: str, known: Reference, scale: float) -> Part:
        inputs = self.inputs(problem.id, part)
        checker = Checker(
            problem.entry_point,
            known.expected,
            inputs,
            problem.extra["atol"],
            poly=problem.entry_point == "find_zero",
        )
        limits = Limits.of(known.seconds, len(inputs), scale)
        return Part(
            name=part,
            mode="calls",
            entry=problem.entry_point,
            inputs=tuple(marshal.dumps(tuple(values), 2) for values in inputs),
            inputs_key=f"{problem.id}/{part}",
            check=checker,
            shape=shape_of(problem.entry_point) if self.name == "mbpp_plus" else "value",
            exact=known.exact,
            digest=known.digest,
            memory_bytes=MANY_BYTES if problem.id in HUGE else MEMORY_BYTES,
            cpu_seconds=limits.total,
            call_seconds=limits.default,
            screen_seconds=scale * _screen(known),
            slow_calls=dict(limits.slow),
            right_records=tuple(value_record(one) if one else b"" for one in checker.shortcut),
        )

    def case(self, problem: Problem, program: str, judge: Judge) -> Case:
        parts = self.parts(problem, judge)
        return Case(
            key=(problem.id, program),
            program=program,
            parts=parts,
            confirm=self.confirm,
            shared=True,
            cost=sum(sum(part.slow_calls.values()) for part in parts),
        )

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        """`base` and `plus`: the status of each part; `plus` is skipped where base failed."""
        found: dict[str, Any] = {"base": "skipped", "plus": "skipped"}
        for part in outcome.parts:
            found[part.name] = str(part.status)
            if part.first_cpu is not None:
                found[f"{part.name}_seconds"] = [round(part.first_cpu, 3), round(part.cpu, 3)]
        return found


class MbppPlus(PlusTask):
    """Task `mbpp_plus`: MBPP+ v0.2.0, 378 problems."""

    name = "mbpp_plus"
    version = "evalplus-0.3.1 v1"
    data, results, count = "MbppPlus-v0.2.0.jsonl.gz", "MbppPlus-v0.2.0-expected.jsonl.gz", 378
    base_stops = ('\n"""', "\nassert")

    def inputs(self, problem_id: str, part: str) -> list[Sequence[Any]]:
        number = int(problem_id.split("/")[1])
        return [arguments(number, values) for values in super().inputs(problem_id, part)]


class HumanEvalPlus(PlusTask):
    """Task `humaneval_plus`: HumanEval+ v0.1.10, 164 problems."""

    name = "humaneval_plus"
    version = "evalplus-0.3.1 v1"
    data, results = "HumanEvalPlus-v0.1.10.jsonl.gz", "HumanEvalPlus-v0.1.10-expected.jsonl.gz"
    count = 164
    base_stops = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")
