"""Which groups of a step are trained on: whole groups, decided before advantages.

What: scores of groups and `kept_indices`, arrays in and indices out. Not here: anything about
single rollouts. Rules and their odd but right consequences (an all-flat step keeps nothing under
top_p, `smallest` stops at the first zero): docs/algorithms.md 2. Source: RAGEN
`ragen/trainer/rollout_filter.py` @20daedc, arXiv:2504.20073; its cases:
tests/fixtures/reference/ragen_filter.json. Among equal scores the lower index comes first.

Try it: `kept_indices(np.array([.0, .5, .3]), strategy="top_k", value=0.4)` -> [1].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlfe.training.rewards import is_flat

ZERO_SCORE = 1e-10  # |score| at or below this is no candidate unless include_zero
STRATEGIES = ("none", "top_p", "top_k", "top_k_abs", "min_p")
REWARD_METRICS = {
    "reward_variance": "std",  # the public code's name for a standard deviation
    "reward_std": "std",
    "reward_var": "var",
    "reward": "mean",
    "mean": "mean",
    "reward_sum": "sum",
}


def reward_scores(rewards: Sequence[np.ndarray], *, metric: str) -> np.ndarray:
    """Score of each group from its rewards [G] (NaN where unscored); float64 [P].

    Spread is 0 for flat groups and for fewer than two scored rollouts, ddof 1 otherwise.
    """
    kind = REWARD_METRICS.get(metric)
    if kind is None:
        raise ValueError(f'unknown reward metric "{metric}"; known: {", ".join(REWARD_METRICS)}')
    return np.array([_reward_score(np.asarray(reward_G), kind) for reward_G in rewards], np.float64)


def rollout_scores(values: Sequence[np.ndarray], *, metric: str) -> np.ndarray:
    """Score of each group from one number per rollout; float64 [P].

    `length`: mean completion tokens. `entropy`: mean of the rollouts' token-mean entropies;
    `entropy_variance` (= `entropy_std`): their ddof-1 standard deviation, 0 for a single one.
    """
    if metric in ("length", "entropy"):
        return np.array([float(np.mean(value_G)) for value_G in values], np.float64)
    if metric not in ("entropy_variance", "entropy_std"):
        raise ValueError(f'unknown rollout metric "{metric}"')
    return np.array([np.std(v, ddof=1) if len(v) > 1 else 0.0 for v in values], np.float64)


def kept_indices(
    score_P: np.ndarray,
    *,
    strategy: str,
    value: float = 1.0,
    side: str = "largest",
    include_zero: bool = True,
    eps: float = 0.01,
    prob_mode: str = "linear",
) -> np.ndarray:
    """Indices of the kept groups in batch order, int64; may be empty.

    Args:
        score_P: One finite score per group.
        strategy, value, include_zero: docs/algorithms.md 2.2 and 2.3.
        side: `largest` or `smallest`, the end of the ranking that stays (`filter.type`).
        eps: Absolute slack, `top_p` in linear mode only.
        prob_mode: `linear` or `softmax`, `top_p` with value < 1 only.
    """
    if score_P.ndim != 1 or not np.isfinite(score_P).all():
        raise ValueError(f"score_P has to be a finite vector, got {score_P}")
    if strategy not in STRATEGIES:
        raise ValueError(f'unknown filter strategy "{strategy}"; known: {", ".join(STRATEGIES)}')
    if side not in ("largest", "smallest"):
        raise ValueError(f'unknown filter type "{side}"; known: largest, smallest')
    if prob_mode not in ("linear", "softmax"):
        raise ValueError(f'unknown top_p mode "{prob_mode}"; known: linear, softmax')
    everything = np.arange(score_P.size, dtype=np.int64)
    if strategy == "none":
        return everything
    candidates = everything if include_zero else everything[np.abs(score_P) > ZERO_SCORE]
    if candidates.size == 0:
        return candidates
    ranked = candidates[_order(score_P[candidates], side)]
    return np.sort(_chosen(score_P, ranked, strategy, value, side, eps, prob_mode))


def loss_scale(*, kept: int, groups: int, scaling: str = "none") -> float:
    """Factor on the advantages for `filter.loss_scaling`: 1, kept/groups or its root."""
    share = kept / groups if groups else 0.0
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[scaling]
    return float(share**exponent)


def threshold(score_P: np.ndarray, kept: np.ndarray, *, side: str = "largest") -> float | None:
    """The weakest kept score (log value); None when nothing is kept."""
    if kept.size == 0:
        return None
    return float(score_P[kept].min() if side == "largest" else score_P[kept].max())


def _chosen(
    score_P: np.ndarray,
    ranked: np.ndarray,
    strategy: str,
    value: float,
    side: str,
    eps: float,
    prob_mode: str,
) -> np.ndarray:
    if strategy == "top_k":
        return ranked[: max(1, int(value * score_P.size))]  # of all groups, not of the candidates
    if strategy == "top_k_abs":
        return ranked[: max(1, int(value))]
    if strategy == "min_p":
        return np.compress(_above_min_p(score_P[ranked], value, side), ranked)
    if value >= 1:
        return ranked
    if prob_mode == "softmax":
        return ranked[: _softmax_count(score_P[ranked], value, side)]
    return ranked[: _linear_count(score_P[ranked], value, eps)]


def _linear_count(score_R: np.ndarray, value: float, eps: float) -> int:
    """How many of the ranked scores reach value * sum - eps without taking one that is <= 0."""
    target = value * score_R.sum() - eps
    total, count = 0.0, 0
    while count < score_R.size and total < target and score_R[count] > 0:
        total += score_R[count]
        count += 1
    return count if total >= target else 0


def _softmax_count(score_R: np.ndarray, value: float, side: str) -> int:
    signed_R = score_R if side == "largest" else -score_R
    weight_R = np.exp(signed_R - signed_R.max())
    below = int(np.count_nonzero(np.cumsum(weight_R / weight_R.sum()) < value))
    return min(below + 1, int(score_R.size))


def _above_min_p(score_R: np.ndarray, value: float, side: str) -> np.ndarray:
    kept_R: np.ndarray = (
        score_R >= value * score_R.max() - 1e-10
        if side == "largest"
        else score_R <= score_R.min() / (value + 1e-10) + 1e-10
    )
    return kept_R


def _order(score: np.ndarray, side: str) -> np.ndarray:
    return np.argsort(-score if side == "largest" else score, kind="stable")


def _reward_score(reward_G: np.ndarray, kind: str) -> float:
    scored = reward_G[~np.isnan(reward_G)].astype(np.float64)
    if kind == "sum":
        return float(scored.sum())
    if kind == "mean":
        return float(scored.mean()) if scored.size else 0.0
    if scored.size < 2 or is_flat(scored):
        return 0.0
    return float(scored.std(ddof=1) if kind == "std" else scored.var(ddof=1))
