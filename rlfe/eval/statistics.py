"""Uncertainty of a score, always labelled with the question that it answers.

"Over problems": how the score would vary over other problems of this kind; percentile bootstrap
over problems, all k in one matrix product. One draw matrix serves every checkpoint of a task, so
what is compared is compared on the same draws. Method and simulated coverage: docs/statistics.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

DRAWS = 10_000
LEVEL = 0.95
Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
OVER_PROBLEMS = "95 % over problems, B = 10000"
WILSON = "95 % over problems, Wilson"


class Interval(NamedTuple):
    """Lower and upper ends, float64 [K] each."""

    low_K: np.ndarray
    high_K: np.ndarray


def draw_weights(problems: int, draws: int, generator: np.random.Generator) -> np.ndarray:
    """How often each problem is drawn in each bootstrap sample: float64 [draws, problems]."""
    weights_BP = generator.multinomial(problems, np.full(problems, 1 / problems), size=draws)
    return weights_BP.astype(np.float64)


def bootstrap_means(p_PK: np.ndarray, weights_BP: np.ndarray) -> np.ndarray:
    """Mean over the drawn problems, [B, K], from per-problem values [P, K]."""
    if p_PK.shape[0] != weights_BP.shape[1]:
        raise ValueError(f"p_PK has {p_PK.shape[0]} problems, weights_BP {weights_BP.shape[1]}")
    means_BK: np.ndarray = weights_BP @ p_PK / p_PK.shape[0]
    return means_BK


def over_problems(p_PK: np.ndarray, weights_BP: np.ndarray, level: float = LEVEL) -> Interval:
    """Percentile bootstrap interval of the mean over problems, for every k."""
    means_BK = bootstrap_means(p_PK, weights_BP)
    low_K, high_K = np.quantile(means_BK, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(low_K, high_K)


def wilson(right: int, total: int, z: float = Z) -> tuple[float, float]:
    """Wilson score interval of a share: for one greedy sample per problem, or a share of runs."""
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"{right} of {total} is no share")
    share = right / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)
