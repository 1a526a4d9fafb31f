"""Uncertainty of a score, always labelled with the question that it answers.

"Over problems": how a score would vary over other problems of this kind; percentile bootstrap
over problems, all k in one matrix product. "Sampling only": the same problems, new samples. One
draw matrix serves every checkpoint of a task, so what is compared is compared on the same draws.
Methods and simulated coverage: docs/statistics.md 3. Differences: `paired.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlfe.eval.passk import pass_at_all_k

DRAWS = 10_000
LEVEL = 0.95
Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
OVER_PROBLEMS = "95 % over problems, B = 10000"
WILSON = "95 % over problems, Wilson"
SAMPLING_ONLY = "sampling only"
SAMPLING_ONLY_BOOTSTRAP = "sampling only, parametric bootstrap"
# Two-sided 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


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
    means_KB: np.ndarray = p_PK.T @ weights_BP.T  # draws side by side: quantiles read them so
    means_KB /= p_PK.shape[0]
    return means_KB.T


def over_problems(p_PK: np.ndarray, weights_BP: np.ndarray, level: float = LEVEL) -> Interval:
    """Percentile bootstrap interval of the mean over problems, for every k."""
    return percentiles(bootstrap_means(p_PK, weights_BP), level)


def percentiles(means_BK: np.ndarray, level: float = LEVEL) -> Interval:
    """The two ends that hold `level` of the draws, for every k.

    What `numpy.quantile` gives, a few times faster: one partition for both ends, along memory.
    """
    draws = means_BK.shape[0]
    at = np.array([(1 - level) / 2, (1 + level) / 2]) * (draws - 1)
    below = np.floor(at).astype(int)
    above = np.minimum(below + 1, draws - 1)
    sorted_KB = np.partition(np.ascontiguousarray(means_BK.T), [*below, *above], axis=1)
    low_K, high_K = (
        sorted_KB[:, i] + share * (sorted_KB[:, j] - sorted_KB[:, i])
        for i, j, share in zip(below, above, at - below, strict=True)
    )
    return Interval(low_K, high_K)


def standard_error(p_PK: np.ndarray) -> np.ndarray:
    """Standard error over problems, [K]: sd (ddof 1) / sqrt(P). One problem has none (NaN)."""
    problems = p_PK.shape[0]
    if problems < 2:
        return np.full(p_PK.shape[1], np.nan)
    se_K: np.ndarray = p_PK.std(axis=0, ddof=1) / math.sqrt(problems)
    return se_K


def cluster_standard_error(p_PK: np.ndarray, cluster_P: Sequence[str]) -> np.ndarray:
    """Standard error when problems come in clusters (near-duplicates, one template), [K].

    sqrt(sum over clusters of (sum of deviations)^2) / P * sqrt(C / (C - 1)); with every problem
    its own cluster it equals `standard_error`. Fewer than two clusters have none (NaN).
    """
    if len(cluster_P) != p_PK.shape[0]:
        raise ValueError(f"{len(cluster_P)} cluster labels, p_PK has {p_PK.shape[0]} problems")
    names, index_P = np.unique(np.asarray(cluster_P), return_inverse=True)
    if len(names) < 2:
        return np.full(p_PK.shape[1], np.nan)
    sums_CK = np.zeros((len(names), p_PK.shape[1]))
    np.add.at(sums_CK, index_P, p_PK - p_PK.mean(axis=0))
    scale = math.sqrt(len(names) / (len(names) - 1)) / p_PK.shape[0]
    se_K: np.ndarray = np.sqrt((sums_CK**2).sum(axis=0)) * scale
    return se_K


class SamplingError(NamedTuple):
    """Standard error of new samples on the same problems, and how it was found."""

    se_K: np.ndarray
    method_K: tuple[str, ...]


def sampling_only(
    n: int, correct_P: np.ndarray, generator: np.random.Generator, draws: int = 1000
) -> SamplingError:
    """Standard error of the mean pass@k over new samples of the same problems, k = 1..n.

    For 2k <= n: per problem q_k^2 - q_2k with q_m = C(n-c, m)/C(n, m), an unbiased estimate of
    the variance (a U-statistic's; one problem's may be negative), summed over problems / P^2.
    For 2k > n there is no such estimate: parametric bootstrap from Beta(c + 1/2, n - c + 1/2).
    """
    problems = len(correct_P)
    miss_PK = 1 - pass_at_all_k(n, correct_P)
    half = n // 2
    k_H = np.arange(1, half + 1)
    variance_K = np.full(n, np.nan)
    estimate_PH = miss_PK[:, k_H - 1] ** 2 - miss_PK[:, 2 * k_H - 1]
    variance_K[:half] = np.maximum(0.0, estimate_PH.sum(axis=0)) / problems**2
    if half < n:
        variance_K[half:] = _parametric(n, np.asarray(correct_P), generator, draws, half)
    methods = [SAMPLING_ONLY] * half + [SAMPLING_ONLY_BOOTSTRAP] * (n - half)
    return SamplingError(np.sqrt(variance_K), tuple(methods))


def _parametric(
    n: int, correct_P: np.ndarray, generator: np.random.Generator, draws: int, first: int
) -> np.ndarray:
    """Variance of the mean pass@k over redrawn counts, for k = first + 1 .. n.

    How often each count is drawn [draws, n + 1], times the pass@k of each count.
    """
    rate_BP = generator.beta(correct_P + 0.5, n - correct_P + 0.5, (draws, len(correct_P)))
    count_BP = generator.binomial(n, rate_BP) + np.arange(draws)[:, None] * (n + 1)
    times_BC = np.bincount(count_BP.ravel(), minlength=draws * (n + 1)).reshape(draws, n + 1)
    value_CK = pass_at_all_k(n, np.arange(n + 1))[:, first:]
    means_BK = times_BC.astype(np.float64) @ value_CK / len(correct_P)
    variance_K: np.ndarray = means_BK.var(axis=0, ddof=1)
    return variance_K


def wilson(right: int, total: int, z: float = Z) -> tuple[float, float]:
    """Wilson score interval of a share: for one greedy sample per problem, or a share of runs."""
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"{right} of {total} is no share")
    share = right / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


class SeedMean(NamedTuple):
    """Mean over training seeds with its t interval (None with one seed), and their range."""

    mean: float
    low: float | None
    high: float | None
    range: float
    seeds: int


def over_seeds(values_S: Sequence[float]) -> SeedMean:
    """Mean over runs that differ in their seed only: t interval with S - 1 degrees of freedom."""
    if not values_S:
        raise ValueError("no seeds")
    mean, spread = math.fsum(values_S) / len(values_S), max(values_S) - min(values_S)
    if len(values_S) == 1:
        return SeedMean(mean, None, None, 0.0, 1)
    degrees = len(values_S) - 1
    t = T_975[degrees - 1] if degrees <= len(T_975) else Z
    half = t * float(np.std(values_S, ddof=1)) / math.sqrt(len(values_S))
    return SeedMean(mean, mean - half, mean + half, spread, len(values_S))


def hierarchical(
    p_SPK: np.ndarray, generator: np.random.Generator, draws: int = 2000, level: float = LEVEL
) -> Interval:
    """Bootstrap over seeds, then over problems (the same for all drawn seeds), for every k.

    p_SPK: per-problem values of S runs on the same problems.
    """
    seeds, problems, ks = p_SPK.shape
    means_BK = np.empty((draws, ks))
    for draw in range(draws):
        seed_P = p_SPK[generator.integers(seeds, size=seeds)].mean(axis=0)
        means_BK[draw] = seed_P[generator.integers(problems, size=problems)].mean(axis=0)
    low_K, high_K = np.quantile(means_BK, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(low_K, high_K)
