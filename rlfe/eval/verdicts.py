"""Verdicts on declared criteria: exactly one of invalid, validated, refuted, inconclusive.

Pure: numbers in, verdict and the sentence that decided out. Order: invalid, validated, refuted,
else inconclusive. Support measures never enter. Thresholds compare after rounding to 12 digits,
because .3/.2 is 1.5 to a reader and 1.4999999999999998 to a float. Rules: docs/statistics.md 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlfe.criteria import Criterion

DIGITS = 12


class Verdict(StrEnum):
    """What a criterion came to. `Verdict("validated")`."""

    INVALID = "invalid"
    VALIDATED = "validated"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A condition for a verdict to mean anything. `Guard(name="base_evaluated", ok=True, ...)`"""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantities:
    """What enters a verdict; None where it has no value.

    `range` is the larger of the two arms' seed-to-seed ranges.
    """

    treatment: float | None = None
    control: float | None = None
    ratio: float | None = None
    gap: float | None = None
    range: float | None = None
    excess_share: float | None = None
    low: float | None = None  # paired interval of the gap (evaluation readouts)
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A verdict, what entered, and the sentence that decided."""

    verdict: Verdict
    quantities: Quantities
    sentence: str
    guards: tuple[Guard, ...] = ()


def quantities(
    treatment: Sequence[float],
    control: Sequence[float],
    excess_share: float | None = None,
    interval: tuple[float, float] | None = None,
) -> Quantities:
    """Means, ratio, gap and seed range from one finite value per seed and arm."""
    a, b = math.fsum(treatment) / len(treatment), math.fsum(control) / len(control)
    low, high = interval if interval is not None else (None, None)
    return Quantities(
        treatment=a,
        control=b,
        ratio=a / b if b else None,
        gap=a - b,
        range=max(max(treatment) - min(treatment), max(control) - min(control)),
        excess_share=excess_share,
        low=low,
        high=high,
    )


def decide(
    criterion: Criterion,
    treatment: Mapping[int, float | None],
    control: Mapping[int, float | None],
    *,
    excess_share: float | None = None,
    interval: tuple[float, float] | None = None,
    guards: Sequence[Guard] = (),
) -> Decision:
    """The verdict on one value per seed and arm (None, NaN or absent: that run has none)."""
    missing = _missing(criterion, treatment, "treatment") + _missing(criterion, control, "control")
    failed = [f"{guard.name}: {guard.text}" for guard in guards if not guard.ok]
    few = ["fewer than 2 seeds"] if _needs_range(criterion) and len(criterion.seeds) < 2 else []
    if missing or failed or few:
        sentence = "; ".join([*missing, *failed, *few])
        return Decision(
            verdict=Verdict.INVALID,
            quantities=Quantities(),
            sentence=sentence,
            guards=tuple(guards),
        )
    chosen = [[arm[seed] for seed in criterion.seeds] for arm in (treatment, control)]
    numbers = [[value for value in values if value is not None] for values in chosen]
    found = quantities(numbers[0], numbers[1], excess_share, interval)
    verdict, sentence = _verdict(criterion, found)
    return Decision(verdict=verdict, quantities=found, sentence=sentence, guards=tuple(guards))


def _missing(criterion: Criterion, arm: Mapping[int, float | None], name: str) -> list[str]:
    return [
        f"{name} seed {seed} has no value"
        for seed in criterion.seeds
        if (value := arm.get(seed)) is None or not math.isfinite(value)
    ]


def _needs_range(criterion: Criterion) -> bool:
    yes, no = criterion.validated, criterion.refuted
    return yes.gap_over_seed_range is not None or no.gap_within_seed_range is not None


def _verdict(criterion: Criterion, found: Quantities) -> tuple[Verdict, str]:
    unmet = [text for ok, text in _validating(criterion, found) if not ok]
    if not unmet:
        held = "; ".join(text for _, text in _validating(criterion, found))
        return Verdict.VALIDATED, f"all conditions hold: {held}"
    against = [text for ok, text in _refuting(criterion, found) if ok]
    if against:
        return Verdict.REFUTED, "; ".join(against)
    return Verdict.INCONCLUSIVE, "does not hold: " + "; ".join(unmet)


def _validating(criterion: Criterion, found: Quantities) -> list[tuple[bool, str]]:
    """(holds, in words) of every condition of `validated`."""
    want, gap, spread = criterion.validated, found.gap or 0.0, found.range or 0.0
    conditions = []
    if (least := want.ratio_min) is not None:
        ok = found.ratio is not None and _at_least(found.ratio, least)
        conditions.append((ok, f"ratio {_text(found.ratio)} >= {least:g}"))
    if (least := want.difference_min) is not None:
        inner = gap if found.low is None else found.low
        ok = _at_least(gap, least) and (found.low is None or _above(inner, least))
        conditions.append((ok, f"difference {_text(gap)} >= {least:g}{_interval(found)}"))
    if (times := want.gap_over_seed_range) is not None:
        text = f"gap {_text(gap)} > {times:g} x seed range {_text(spread)}"
        conditions.append((_above(gap, times * spread), text))
    if (least := want.excess_share_min) is not None:
        share = found.excess_share
        ok = share is not None and math.isfinite(share) and _at_least(share, least)
        where = ", ".join(want.excess_buckets)
        conditions.append((ok, f"share of the excess in k = {where}: {_text(share)} >= {least:g}"))
    return conditions


def _refuting(criterion: Criterion, found: Quantities) -> list[tuple[bool, str]]:
    """(holds, in words) of every condition of `refuted`."""
    want, gap, spread = criterion.refuted, found.gap or 0.0, found.range or 0.0
    conditions = []
    if (below := want.ratio_below) is not None:
        ok = found.ratio is not None and _above(below, found.ratio)
        conditions.append((ok, f"ratio {_text(found.ratio)} < {below:g}"))
    if (below := want.difference_below) is not None:
        outer = gap if found.high is None else found.high
        ok = _above(below, gap) and _above(below, outer)
        conditions.append((ok, f"difference {_text(gap)} < {below:g}{_interval(found)}"))
    if (times := want.gap_within_seed_range) is not None:
        text = f"gap {_text(gap)} is within {times:g} x seed range {_text(spread)}"
        conditions.append((not _above(gap, times * spread), text))
    return conditions


def _at_least(value: float, bound: float) -> bool:
    return round(value - bound, DIGITS) >= 0


def _above(value: float, bound: float) -> bool:
    return round(value - bound, DIGITS) > 0


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(found: Quantities) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" [{found.low:.4g}, {found.high:.4g}] paired over problems"
