"""From judged samples to counts: how many of n are right for each problem, and what else happened.

One task may be reported under several names: `mbpp_plus` counts a reply that passes base and plus
tests, beside it `mbpp_base` the base tests alone. A problem with fewer than n judged samples is
missing, never wrong and never left out. Not here: scores and intervals (`tables.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlfe.eval.settings import BLOCK
from rlfe.eval.store import Judged, Sample, Store

SUSPICIOUS_PROBLEMS = 0.9  # share of problems whose n texts are all one text


class Measure(NamedTuple):
    """A name that a task is reported under and what counts as right there."""

    name: str
    right: Callable[[Judged], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What explains a score: shares of samples, in 0..1, and the mean reply length in tokens.

    `cut` ended at the token limit, right or wrong; `distinct` = distinct answers / samples.

    `Rates(samples=3024, cut=0.02, syntax_error=0.01, no_answer=0.0, timeout=0.0, crashed=0.0,
    distinct=0.8, mean_tokens=143.2)`
    """

    samples: int
    cut: float
    syntax_error: float
    no_answer: float
    timeout: float
    crashed: float
    distinct: float
    mean_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of one checkpoint and task.

    `correct` maps a measure's name to right samples per problem, in the order of `problems`;
    `missing` are problems without n judged samples (their counts say nothing).
    """

    problems: tuple[str, ...]
    n: int
    correct: dict[str, list[int]]
    missing: tuple[str, ...]
    rates: Rates
    warnings: tuple[str, ...] = field(default=())


def measures(task: str, mode: str | None) -> tuple[Measure, ...]:
    """The headline measure of a task first, then what stands beside it."""
    if task == "gsm8k":
        rule = mode or "flexible"
        return (Measure(task, lambda v: bool(v.facts.get(rule, v.status == "passed"))),)
    headline = Measure(task, lambda v: v.status == "passed")
    if task.endswith("_plus"):
        base = task.removesuffix("_plus") + "_base"
        return (headline, Measure(base, lambda v: v.facts.get("base") == "passed"))
    return (headline,)


def tally(
    store: Store, problems: Sequence[str], n: int, columns: Sequence[Measure], temperature: float
) -> Tally:
    """Count the first n samples of every problem (ids in the data's order)."""
    correct: dict[str, list[int]] = {measure.name: [] for measure in columns}
    missing, seen, one_text = [], _Seen(), 0
    for problem in problems:
        rows = judged_samples(store, problem, n)
        if len(rows) < n:
            missing.append(problem)
        for measure in columns:
            correct[measure.name].append(sum(measure.right(verdict) for _, verdict in rows))
        one_text += len(rows) > 1 and len({sample.text for sample, _ in rows}) == 1
        seen.add(rows)
    warnings = []
    if temperature > 0 and n > 1 and problems and one_text >= SUSPICIOUS_PROBLEMS * len(problems):
        warnings.append(
            f"all {n} samples are the same text for {one_text} of {len(problems)} problems: "
            "pass@k over copies says nothing"
        )
    return Tally(
        problems=tuple(problems),
        n=n,
        correct=correct,
        missing=tuple(missing),
        rates=seen.rates(),
        warnings=tuple(warnings),
    )


def judged_samples(store: Store, problem: str, n: int) -> list[tuple[Sample, Judged]]:
    """The first n samples of a problem that are judged, with their verdicts."""
    rows: list[tuple[Sample, Judged]] = []
    for block in range(-(-n // BLOCK)):
        samples = store.blocks.get((problem, block), [])
        verdicts = store.verdicts.get((problem, block), [])
        if len(verdicts) == len(samples):
            rows += zip(samples, verdicts, strict=True)
    return rows[:n]


def beneath(verdict: Judged) -> str:
    """The status without the cut: a truncated reply keeps what it was beneath in its detail."""
    return verdict.detail.split(":")[0] if verdict.status == "truncated" else verdict.status


class _Seen:
    """Running totals behind `Rates`."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.samples = self.tokens = self.distinct = self.cut = 0

    def add(self, rows: Sequence[tuple[Sample, Judged]]) -> None:
        self.samples += len(rows)
        self.tokens += sum(sample.tokens for sample, _ in rows)
        self.cut += sum(sample.finish == "length" for sample, _ in rows)
        self.distinct += len({verdict.answer for _, verdict in rows})
        self.statuses.update(beneath(verdict) for _, verdict in rows)

    def rates(self) -> Rates:
        def share(count: int) -> float:
            return count / self.samples if self.samples else 0.0

        return Rates(
            samples=self.samples,
            cut=share(self.cut),
            syntax_error=share(self.statuses["syntax_error"]),
            no_answer=share(self.statuses["no_answer"]),
            timeout=share(self.statuses["timeout"]),
            crashed=share(self.statuses["crashed"]),
            distinct=share(self.distinct),
            mean_tokens=self.tokens / self.samples if self.samples else 0.0,
        )
