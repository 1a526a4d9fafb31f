"""Unbiased pass@k: for one problem, for all k at once, and for a whole benchmark.

pass@k of a problem with n samples, c of them right, is 1 - C(n-c, k) / C(n, k)
(arXiv:2107.03374, section 2.1): the chance that k samples drawn without replacement hold a right
one. The plug-in 1 - (1 - c/n)^k is biased low and is not used. k > n has no value: never 0, never
1, which is where a known estimator answers 1.0. A benchmark's score is the plain mean over its
*pinned* number of problems, so a problem without samples makes it incomplete, never smaller.

    >>> round(pass_at_k(160, 1, 128), 6)
    0.8
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlfe.errors import PartialError, RequestError


def pass_at_k(n: int, c: int, k: int) -> float:
    """pass@k of one problem, n samples of which c are right.

    C(n-c, k) / C(n, k) = prod over j < k of (n-c-j)/(n-j) = prod over j < c of (n-k-j)/(n-j);
    the shorter product is summed in logarithms, so neither overflow nor 1 - (1 - 1e-6) hurts.

    Raises:
        RequestError: k > n (undefined), or n < 1, k < 1, c outside 0..n.
    """
    check_counts(n, c, k)
    if c == 0:
        return 0.0
    if n - c < k:
        return 1.0
    terms, other = (k, c) if k <= c else (c, k)
    return -math.expm1(math.fsum(math.log1p(-other / (n - j)) for j in range(terms)))


def pass_at_all_k(n: int, correct_P: np.ndarray) -> np.ndarray:
    """pass@k for k = 1..n of every problem: float64 [P, n], column k-1 holds pass@k.

    p_1..n = 1 - cumprod over j of max(0, n-c-j)/(n-j), the stable form of arXiv:2107.03374.
    Non-decreasing in k and in c; no problems give an empty [0, n].

    Raises:
        RequestError: n < 1, or a count outside 0..n.
    """
    counts_P = np.asarray(correct_P)
    if n < 1:
        raise RequestError(f"pass@k needs at least 1 sample a problem, got n={n}")
    if counts_P.size and (counts_P.min() < 0 or counts_P.max() > n):
        raise RequestError(f"right samples lie in 0..{n}, got {counts_P.min()}..{counts_P.max()}")
    j_K = np.arange(n)
    wrong_PK = np.maximum(0.0, n - counts_P[:, None].astype(np.float64) - j_K)
    miss_PK: np.ndarray = np.cumprod(wrong_PK / (n - j_K), axis=1)
    return 1.0 - miss_PK


def benchmark_pass_at_k(counts: Sequence[tuple[int, int]], *, problems: int, k: int) -> float:
    """Mean pass@k over a benchmark of `problems` problems from (n, c) of each.

    Raises:
        PartialError: a problem has no samples, n differs between problems, or k > n: no number
            may be published as the benchmark's score.
        RequestError: more counts than problems, or counts that make no sense.
    """
    if len(counts) > problems or problems < 1:
        raise RequestError(f"{len(counts)} problems have samples, the benchmark has {problems}")
    sizes = {n for n, _ in counts}
    if len(counts) < problems:
        raise PartialError(f"{problems - len(counts)} of {problems} problems have no samples")
    if len(sizes) > 1:
        raise PartialError(f"problems have between {min(sizes)} and {max(sizes)} samples")
    if k > min(sizes):
        raise PartialError(f"k={k} needs at least {k} samples, every problem has {min(sizes)}")
    return math.fsum(pass_at_k(n, c, k) for n, c in counts) / problems


def check_counts(n: int, c: int, k: int) -> None:
    """Refuse what has no pass@k, naming the number that is wrong."""
    if n < 1:
        raise RequestError(f"pass@k needs at least 1 sample, got n={n}")
    if not 0 <= c <= n:
        raise RequestError(f"right samples lie in 0..{n}, got c={c}")
    if k < 1:
        raise RequestError(f"k is at least 1, got k={k}")
    if k > n:
        raise RequestError(
            f"k={k} needs at least {k} samples, there are {n}",
            hint=f"Ask for k up to {n}, or sample more with -n.",
        )


def shown_ks(n: int, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """The k that tables show: those asked for, else 1, 5, 10, 50, 100 and n as far as n goes.

    Raises:
        RequestError: an asked k is larger than n or smaller than 1.
    """
    for k in asked:
        check_counts(n, 0, k)
    return tuple(sorted(set(asked) or {k for k in (1, 5, 10, 50, 100, n) if k <= n}))
