"""Advantages of one group of rollouts: six estimators, one function each, float64 on the host.

What: `advantages(name, reward_G)` gives one number per rollout, constant over its tokens. Not
here: length terms, value functions, batch-wide normalisation; groups never influence each other.
Degenerate groups (flat, fewer than two scored, empty, k = 0, k = N) give exact zeros, never NaN;
unscored rollouts (NaN reward) get 0 and count in no statistic. Numbers of the peers that these
agree with: tests/fixtures/reference/advantages.json. Definitions: docs/algorithms.md 1.

Try it: `advantages("maxrl", np.array([1., 0, 0, 0]))` -> 3, -1, -1, -1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import numpy as np

from rlfe.errors import RequestError
from rlfe.training.rewards import is_flat


def grpo(reward_G: np.ndarray, *, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """(r - mean) / (sd + eps). arXiv:2402.03300; ddof 1 as verl and study 3, 0 as open-instruct."""
    advantage_G: np.ndarray = (reward_G - reward_G.mean()) / (reward_G.std(ddof=ddof) + eps)
    return advantage_G


def centered(reward_G: np.ndarray) -> np.ndarray:
    """r - mean. Default of tinker-cookbook, prime-rl and open-instruct."""
    advantage_G: np.ndarray = reward_G - reward_G.mean()
    return advantage_G


def rloo(reward_G: np.ndarray) -> np.ndarray:
    """r minus the mean of the others = N/(N-1) * (r - mean). arXiv:2402.14740."""
    size = reward_G.size
    return centered(reward_G) * (size / (size - 1))


def maxrl(reward_G: np.ndarray) -> np.ndarray:
    """Success N/k - 1, failure -1; rewards 0/1 only. arXiv:2602.02710.

    Raises:
        RequestError: For any other reward than 0 or 1.
    """
    _only_binary(reward_G)
    advantage_G: np.ndarray = reward_G.size / reward_G.sum() * reward_G - 1.0
    return advantage_G


def tailrl(reward_G: np.ndarray) -> np.ndarray:
    """Gaps between sorted rewards weighted by N / (rollouts at or above), centred.

    a_(i) = N * sum_{j<=i} gap_j / (N-j+1), gap_j = r_(j) - r_(j-1), r_(0) = 0. The first gap
    shifts all alike and leaves with the mean. Source: Zanette-Labs/TailRL `advantages.py` @bd2e73a.
    """
    size = reward_G.size
    order = np.argsort(reward_G, kind="stable")
    gap_G = np.diff(reward_G[order], prepend=reward_G[order[0]])
    tail_G = np.empty(size)
    tail_G[order] = np.cumsum(size * gap_G / np.arange(size, 0, -1))
    return centered(tail_G)


def advantages(name: str, reward_G: np.ndarray, *, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """Advantages of one group, float64 [G], finite for every finite reward vector.

    Args:
        name: A key of `BY_NAME`.
        reward_G: Rewards after penalty and normalisation [G]; NaN where unscored; integers and
            booleans are fine.
        ddof, eps: Read by `grpo` only.
    """
    if name not in BY_NAME:
        raise ValueError(f'unknown advantage "{name}"; known: {", ".join(BY_NAME)}')
    value_G = np.asarray(reward_G, np.float64)
    if value_G.ndim != 1:
        raise ValueError(f"one group at a time: reward_G has shape {value_G.shape}")
    scored = ~np.isnan(value_G)
    advantage_G = np.zeros(value_G.shape)
    if name == "maxrl":
        _only_binary(value_G[scored])
    if np.count_nonzero(scored) < 2 or is_flat(value_G):
        return advantage_G
    # Subtracting the minimum first keeps every digit of the spread under a large offset.
    shift = 0.0 if name == "maxrl" else value_G[scored].min()
    advantage_G[scored] = BY_NAME[name](value_G[scored] - shift, ddof=ddof, eps=eps)
    return advantage_G


def _only_binary(reward_G: np.ndarray) -> None:
    other = reward_G[(reward_G != 0) & (reward_G != 1)]
    if other.size:
        raise RequestError(
            f"maxrl is defined for rewards 0 and 1; this group has {other[0]:g}",
            hint="use advantage.name = tailrl for graded rewards, or reward.kind = binary",
        )


def used(name: str) -> str:
    """The estimator's name with the function that computes it: "dr_grpo (centered)"."""
    function = BY_NAME[name].__name__
    return name if function == name else f"{name} ({function})"


def _plain(function: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """An estimator without ddof and eps, in the common call form."""

    @wraps(function)
    def called(reward_G: np.ndarray, *, ddof: int, eps: float) -> np.ndarray:
        return function(reward_G)

    return called


BY_NAME: dict[str, Callable[..., np.ndarray]] = {
    "grpo": grpo,
    "dr_grpo": _plain(centered),  # with seq-mean-token-sum-norm, arXiv:2503.20783
    "rloo": _plain(rloo),
    "maxrl": _plain(maxrl),
    "tailrl": _plain(tailrl),
    "centered": _plain(centered),
}
