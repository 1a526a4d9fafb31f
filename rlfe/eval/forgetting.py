"""What was learned and what was forgotten, from scores and per-problem counts over steps.

T is the trained task, O the others, step 0 the base model; scores are shares. Gain and forgetting
are signed and paired over problems; problem transitions and support look at single problems;
stability looks at a whole series. Formulas and sources: docs/statistics.md 6. A value that is not
defined is None, never a plausible number. Not here: drawing, wording.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rlfe.errors import RequestError
from rlfe.eval.paired import benjamini_hochberg

SOLVED = 0.5  # tau on c/n of problem transitions (arXiv:2510.17776)
SUPPORT_ERRORS = 2.0  # paired standard errors that a fall has to exceed ...
SUPPORT_POINTS = 0.02  # ... and at least two points
COLLAPSE_SHARE = 0.25  # at most this share of the reference is a collapse


def gain(score: float, base: float) -> float:
    """G(t) = s_T(t) - s_T(0)."""
    return score - base


def forgetting(base: float, score: float) -> float:
    """F_b(t) = s_b(0) - s_b(t), signed: below 0 the task improved."""
    return base - score


def mean_forgetting(base: Mapping[str, float], score: Mapping[str, float]) -> float | None:
    """Mean of F_b over the other tasks that both have; None without one."""
    tasks = [task for task in base if task in score]
    if not tasks:
        return None
    return math.fsum(forgetting(base[task], score[task]) for task in tasks) / len(tasks)


class Ratio(NamedTuple):
    """Retention with its paired bootstrap interval: `Ratio(0.93, 0.88, 0.97)`."""

    value: float
    low: float
    high: float


def retention(
    base_P: np.ndarray, score_P: np.ndarray, weights_BP: np.ndarray, level: float = 0.95
) -> Ratio | None:
    """s_b(t)/s_b(0), interval by paired bootstrap over problems; per-problem values [P] of one k.

    None where the interval of s_b(0) contains 0: a share of nothing says nothing.
    """
    base_B, score_B = weights_BP @ base_P, weights_BP @ score_P
    ends = [(1 - level) / 2, (1 + level) / 2]
    if base_P.mean() <= 0 or np.quantile(base_B, ends[0]) <= 0:
        return None
    usable = base_B > 0
    low, high = np.quantile(score_B[usable] / base_B[usable], ends)
    return Ratio(float(score_P.mean() / base_P.mean()), float(low), float(high))


def max_forgetting(series: Sequence[float]) -> list[float]:
    """max over l <= t of s(l), minus s(t), for every t. Noise biases it up; say so."""
    best_T = np.maximum.accumulate(np.asarray(series, dtype=np.float64))
    return [float(x) for x in best_T - np.asarray(series)]


def area(steps: Sequence[int], values: Sequence[float]) -> float | None:
    """1/(t1-t0) * integral of max(0, F) over the real step spacing, trapezoid with its kinks.

    Between two points F is a straight line; where it crosses 0 only the part above counts.
    None with fewer than two points. Steps have to ascend.
    """
    if len(steps) != len(values):
        raise ValueError(f"{len(steps)} steps, {len(values)} values")
    if len(steps) < 2:
        return None
    if any(late <= early for early, late in itertools.pairwise(steps)):
        raise ValueError(f"steps do not ascend: {list(steps)}")
    total = math.fsum(
        (steps[i + 1] - steps[i]) * _positive_part(values[i], values[i + 1])
        for i in range(len(steps) - 1)
    )
    return total / (steps[-1] - steps[0])


def _positive_part(a: float, b: float) -> float:
    """Mean over a segment of max(0, line from a to b)."""
    if a >= 0 and b >= 0:
        return (a + b) / 2
    if a <= 0 and b <= 0:
        return 0.0
    top = max(a, b)
    return top * top / (2 * abs(a - b))


def forgetting_at_gain(
    gains: Sequence[float], forgettings: Sequence[float], wanted: float
) -> float | None:
    """F where G first reaches `wanted`, linear between checkpoints; None if it never does.

    Both series start at step 0 with 0, 0 (the base model).
    """
    if len(gains) != len(forgettings):
        raise ValueError(f"{len(gains)} gains, {len(forgettings)} forgettings")
    for i, reached in enumerate(gains):
        if reached >= wanted:
            if i == 0 or reached == wanted:
                return forgettings[i]
            share = (wanted - gains[i - 1]) / (reached - gains[i - 1])
            return forgettings[i - 1] + share * (forgettings[i] - forgettings[i - 1])
    return None


def matched_gain(gains: Mapping[str, Sequence[float]]) -> float | None:
    """The largest gain that all arms reach; None without arms or where it is not above 0."""
    best = min((max(series) for series in gains.values() if len(series)), default=0.0)
    return best if best > 0 else None


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names on the front of (gain, -forgetting): nobody has more gain and less forgetting."""

    def beaten(name: str) -> bool:
        g, f = points[name]
        return any(
            og >= g and of <= f and (og > g or of < f)
            for other, (og, of) in points.items()
            if other != name
        )

    return sorted(name for name in points if not beaten(name))


class Transitions(NamedTuple):
    """Shares of problems that were solved and no longer are, and the reverse.

    `lost_tested`, `found_tested`: problems with a significant change (exact test, 5 % false
    discoveries); None where n is too small to test.
    """

    lost: float
    found: float
    lost_tested: int | None
    found_tested: int | None


def transitions(
    base_P: np.ndarray, score_P: np.ndarray, n: int, tested: bool | None = None
) -> Transitions:
    """Transitions at c/n >= 0.5 between base and checkpoint; counts [P] out of the same n.

    `tested`: also test each problem; by default only where n is at least 160.
    """
    _same_length(base_P, score_P)
    before_P, after_P = base_P >= SOLVED * n, score_P >= SOLVED * n
    lost, found = float(np.mean(before_P & ~after_P)), float(np.mean(~before_P & after_P))
    if not (n >= 160 if tested is None else tested):
        return Transitions(lost, found, None, None)
    table = [two_proportion_p(int(a), int(b), n) for a, b in zip(base_P, score_P, strict=True)]
    changed_P = np.array(benjamini_hochberg(table))
    down = int(np.sum(changed_P & (score_P < base_P)))
    return Transitions(lost, found, down, int(np.sum(changed_P & (score_P > base_P))))


@lru_cache(maxsize=1 << 16)
def two_proportion_p(a: int, b: int, n: int) -> float:
    """Fisher's exact two-sided p value of a of n against b of n (sum of tables no likelier)."""
    total, choose_C = a + b, _log_choose(n)
    low, high = max(0, total - n), min(n, total)
    x_T = np.arange(low, high + 1)
    log_T = choose_C[x_T] + choose_C[total - x_T]
    whole = math.lgamma(2 * n + 1) - math.lgamma(total + 1) - math.lgamma(2 * n - total + 1)
    no_likelier = log_T[log_T <= choose_C[a] + choose_C[b] + 1e-9]
    return min(1.0, math.fsum(np.exp(no_likelier - whole)))


@lru_cache(maxsize=64)
def _log_choose(n: int) -> np.ndarray:
    """log C(n, c) for c = 0..n."""
    log_C = np.array([math.lgamma(c + 1) for c in range(n + 1)])
    choose_C: np.ndarray = log_C[-1] - log_C - log_C[::-1]
    return choose_C


class Support(NamedTuple):
    """Shares of solved-at-least-once problems: kept of the base's, found among today's."""

    kept: float | None
    found: float | None


def support(base_P: np.ndarray, score_P: np.ndarray, base_n: int, n: int) -> Support:
    """#(c_0 > 0 and c_t > 0)/#(c_0 > 0) and #(c_0 = 0 and c_t > 0)/#(c_t > 0).

    Both depend on n, so both sides need the same.

    Raises:
        RequestError: base and checkpoint have different n.
    """
    if base_n != n:
        raise RequestError(f"support needs the same n on both sides, got {base_n} and {n}")
    _same_length(base_P, score_P)
    before_P, after_P = base_P > 0, score_P > 0
    kept = np.mean(after_P[before_P]) if before_P.any() else None
    found = np.mean(~before_P[after_P]) if after_P.any() else None
    return Support(None if kept is None else float(kept), None if found is None else float(found))


def _same_length(base_P: np.ndarray, score_P: np.ndarray) -> None:
    if len(base_P) != len(score_P):
        raise RequestError(
            f"base has {len(base_P)} problems, checkpoint {len(score_P)}: not the same"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """What became of a run: `kind` is stable, dip, unstable or collapsed, first at `step`.

    `marked`: seen at the last step only, so nothing confirms it. `at_end`: the last kept score is
    itself unstable or collapsed. `Stability(kind="collapsed", step=60, marked=False, at_end=True)`
    """

    kind: str
    step: int | None = None
    marked: bool = False
    at_end: bool = False


def stability(
    steps: Sequence[int], per_problem: Sequence[np.ndarray], diverged_at: int | None = None
) -> Stability:
    """Stable, unstable or collapsed (docs/statistics.md 6), from the trained task's series.

    Args:
        steps: Kept steps, ascending, the base model's 0 first.
        per_problem: Values [P] of each (pass@1), problems in the same order.
        diverged_at: Step at which training ended with a non-finite loss.

    Unstable at u: s(u) and the next kept score lie below the best earlier one by more than
    max(2 paired SE, 2 points); at the last step s(u) alone, marked. Collapsed: unstable and below
    the base; or at most a quarter of the best earlier one; or diverged. One low point is a dip.
    The worst kind is reported with the first step that has it.
    """
    if len(steps) != len(per_problem) or not steps or steps[0] != 0:
        raise ValueError("a series needs one array per step and starts at step 0")
    kinds = [_kind_at(per_problem, u) for u in range(1, len(steps))]
    at_end = bool(kinds) and kinds[-1] in ("unstable", "collapsed")
    if diverged_at is not None and "collapsed" not in kinds:
        return Stability(kind="collapsed", step=diverged_at, at_end=True)
    for kind in ("collapsed", "unstable", "dip"):
        if kind in kinds:
            place = kinds.index(kind)
            last = place == len(kinds) - 1 and kind != "dip"
            return Stability(kind=kind, step=steps[place + 1], marked=last, at_end=at_end)
    return Stability(kind="stable")


def _kind_at(per_problem: Sequence[np.ndarray], u: int) -> str:
    means = [float(values.mean()) for values in per_problem[: u + 1]]
    best = max(range(u), key=lambda i: means[i])
    if means[best] > 0 and means[u] <= COLLAPSE_SHARE * means[best]:
        return "collapsed"
    if not _below(per_problem[u], per_problem[best]):
        return "stable"
    if u + 1 < len(per_problem) and not _below(per_problem[u + 1], per_problem[best]):
        return "dip"
    return "collapsed" if means[u] < means[0] else "unstable"


def _below(value_P: np.ndarray, best_P: np.ndarray) -> bool:
    d_P = best_P - value_P
    error = d_P.std(ddof=1) / math.sqrt(len(d_P)) if len(d_P) > 1 else 0.0
    return bool(d_P.mean() > max(SUPPORT_ERRORS * error, SUPPORT_POINTS))


def stability_limit(ladder: Mapping[float, Sequence[Stability]]) -> float | None:
    """Largest learning rate with no seed unstable or collapsed at the last step; None: none is.

    Rates are compared as numbers: 6e-6 is above 1e-6.
    """
    steady = [rate for rate, runs in ladder.items() if runs and not any(run.at_end for run in runs)]
    return max(steady, default=None)
