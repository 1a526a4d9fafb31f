"""Two checkpoints or arms on the same problems: effect, interval, p value, what could be seen.

Effect = mean over problems of p_ik(a) - p_ik(b). Pairing removes what problems share: unpaired
needs about six times as many. "No difference" is never said without the minimal detectable effect
beside it, and never from overlapping single intervals. Curves over k get a simultaneous band
(max-t), the only thing that points may be called different by. Source: docs/statistics.md 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlfe.errors import RequestError
from rlfe.eval.statistics import LEVEL, bootstrap_means, percentiles, standard_error

DETECTABLE = 2.8  # standard errors: 1.96 for the test at 5 % + 0.84 for 80 % power
PERMUTATIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """a - b on the same problems, for every k; shares, not percent.

    `low_K`, `high_K`: pointwise interval; `band_low_K`, `band_high_K`: simultaneous over all k;
    `detectable_K`: effect that would be seen with 80 % power. `p_K` is the sign-flip p value (NaN
    where it was not asked for).
    """

    effect_K: np.ndarray
    se_K: np.ndarray
    low_K: np.ndarray
    high_K: np.ndarray
    band_low_K: np.ndarray
    band_high_K: np.ndarray
    multiplier: float
    p_K: np.ndarray
    detectable_K: np.ndarray

    def differs(self, k: int) -> bool:
        """Whether 0 lies outside the simultaneous band at k."""
        return bool(self.band_low_K[k - 1] > 0 or self.band_high_K[k - 1] < 0)


def compare(
    a_PK: np.ndarray,
    b_PK: np.ndarray,
    weights_BP: np.ndarray,
    signs_BP: np.ndarray,
    problems: tuple[Sequence[str], Sequence[str]] | None = None,
    level: float = LEVEL,
    tested: Sequence[int] | None = None,
    means_BK: np.ndarray | None = None,
) -> Comparison:
    """Compare a with b; `weights_BP` and `signs_BP` are draws that many comparisons share.

    `problems` are the problem ids of a and b, which must be the same in the same order. `tested`:
    the k that get a p value (None: all). `means_BK`: a's bootstrap means minus b's, where they are
    known already: the mean of a difference is the difference of the means.
    a against a gives effect 0, p 1. Swapping a and b flips the sign and keeps the p value.

    Raises:
        RequestError: the problem sets differ, or there are fewer than two problems.
    """
    if problems is not None and list(problems[0]) != list(problems[1]):
        raise RequestError("the two evaluations have different problems and are not paired")
    if a_PK.shape != b_PK.shape:
        raise RequestError(f"{a_PK.shape[0]} problems with n={a_PK.shape[1]} against "
                           f"{b_PK.shape[0]} with n={b_PK.shape[1]}: not paired")  # fmt: skip
    if a_PK.shape[0] < 2:
        raise RequestError("a paired comparison needs at least two problems")
    d_PK = a_PK - b_PK
    effect_K, se_K = d_PK.mean(axis=0), standard_error(d_PK)
    if means_BK is None:
        means_BK = bootstrap_means(d_PK, weights_BP)
    low_K, high_K = percentiles(means_BK, level)
    multiplier = max_t_multiplier(means_BK, effect_K, se_K, level)
    return Comparison(
        effect_K=effect_K,
        se_K=se_K,
        low_K=low_K,
        high_K=high_K,
        band_low_K=effect_K - multiplier * se_K,
        band_high_K=effect_K + multiplier * se_K,
        multiplier=multiplier,
        p_K=_tested_p(d_PK, signs_BP, tested),
        detectable_K=DETECTABLE * se_K,
    )


def _tested_p(d_PK: np.ndarray, signs_BP: np.ndarray, tested: Sequence[int] | None) -> np.ndarray:
    if tested is None:
        return sign_flip_p(d_PK, signs_BP)
    p_K = np.full(d_PK.shape[1], np.nan)
    places = np.array(tested, dtype=int) - 1
    p_K[places] = sign_flip_p(d_PK[:, places], signs_BP)
    return p_K


def max_t_multiplier(
    means_BC: np.ndarray, effect_C: np.ndarray, se_C: np.ndarray, level: float = LEVEL
) -> float:
    """Quantile of the largest studentised deviation over the curve's points C.

    About 2.4 instead of 1.96 over all k. Points without spread do not count.
    """
    moving = se_C > 0
    if not moving.any():
        return 0.0
    deviation_BC = np.abs(means_BC[:, moving] - effect_C[moving]) / se_C[moving]
    return float(np.quantile(deviation_BC.max(axis=1), level))


def draw_signs(
    problems: int, generator: np.random.Generator, draws: int = PERMUTATIONS
) -> np.ndarray:
    """Random signs -1.0 and 1.0, [draws, problems]."""
    return generator.integers(0, 2, size=(draws, problems)) * 2.0 - 1.0


def sign_flip_p(d_PK: np.ndarray, signs_BP: np.ndarray) -> np.ndarray:
    """Two-sided sign-flip permutation p value per k: (1 + hits) / (1 + draws).

    A tolerance of 1e-12 counts ties as hits, so rounding never makes a p value smaller.
    """
    flipped_BK = np.abs(signs_BP @ d_PK)
    hits_K = (flipped_BK >= np.abs(d_PK.sum(axis=0)) - 1e-12).sum(axis=0)
    p_K: np.ndarray = (1 + hits_K) / (1 + len(signs_BP))
    return p_K


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the order given. No values give no values."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float], rate: float = 0.05) -> list[bool]:
    """Which are discoveries at this false-discovery rate (step-up), in the order given."""
    count = len(p_values)
    order = sorted(range(count), key=lambda i: p_values[i])
    passing = [rank for rank, i in enumerate(order, 1) if p_values[i] <= rate * rank / count]
    found = set(order[: max(passing, default=0)])
    return [index in found for index in range(count)]


def crossover(minus_base: Comparison) -> int | None:
    """Smallest k at which the band of checkpoint - base lies below 0; None: none up to n.

    From such a k on the base model solves more (arXiv:2504.13837); "none" is a result too.
    """
    below = np.flatnonzero(minus_base.band_high_K < 0)
    return int(below[0]) + 1 if below.size else None
