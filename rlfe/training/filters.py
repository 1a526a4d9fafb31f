"""Which groups of a step are trained on: whole groups, decided before advantages.

Scores of groups and `kept_indices`: arrays in, indices out; nothing about single rollouts. Rules
and their odd but right consequences (top_p keeps nothing of an all-flat step): docs/algorithms.md
2. Source: RAGEN `ragen/trainer/rollout_filter.py` @20daedc, arXiv:2504.20073; its cases:
tests/fixtures/reference/ragen_filter.json. Among equal scores the lower index comes first.

Try it: `kept_indices(np.array([.0, .5, .3]), strategy="top_k", value=0.4)` -> [1].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlfe.training.rewards import is_flat

ZERO_SCORE = 1e-10  # |score| at or below this is no candidate unless include_zero
STRATEGIES = ("none", "top_p", "top_k", "top_k_abs", "min_p")
SIDES, MODES = ("largest", "smallest"), ("linear", "softmax")
REWARD_METRICS = {
    "reward_variance": "std",  # the public code's name for a standard deviation
    "reward_std": "std",
    "reward_var": "var",
    "reward": "mean",
    "mean": "mean",
    "reward_sum": "sum",
}


def score_name(metric: str) -> str:
    """What a metric computes, where its name says another thing: "reward_variance" is a std."""
    if metric not in REWARD_METRICS:
        return metric
    return f"{REWARD_METRICS[metric]} of a group's rewards"


def reward_scores(rewards: Sequence[np.ndarray], *, metric: str) -> np.ndarray:
    """Score of each group from its rewards [G] (NaN where unscored); float64 [P].

    Spread is 0 for flat groups and for fewer than two scored rollouts, ddof 1 otherwise.
    """
    if metric not in REWARD_METRICS:
        raise ValueError(f'unknown reward metric "{metric}"; known: {", ".join(REWARD_METRICS)}')
    return np.array([_reward_score(r, REWARD_METRICS[metric]) for r in rewards], np.float64)


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
        strategy, value, include_zero, side (`filter.type`): docs/algorithms.md 2.2 and 2.3.
        eps, prob_mode: Read by `top_p` with value < 1 only (eps: in linear mode).
    """
    if score_P.ndim != 1 or not np.isfinite(score_P).all():
        raise ValueError(f"score_P has to be a finite vector, got {score_P}")
    for name, known in ((strategy, STRATEGIES), (side, SIDES), (prob_mode, MODES)):
        if name not in known:
            raise ValueError(f'unknown filter setting "{name}"; known: {", ".join(known)}')
    everything = np.arange(score_P.size, dtype=np.int64)
    candidates = everything if include_zero else everything[np.abs(score_P) > ZERO_SCORE]
    if strategy == "none" or candidates.size == 0:
        return everything if strategy == "none" else candidates
    sign = 1 if side == "largest" else -1
    ranked = candidates[np.argsort(-sign * score_P[candidates], kind="stable")]
    score_R = score_P[ranked]
    if strategy == "top_k":
        count = max(1, int(value * score_P.size))  # of all groups, not of the candidates
    elif strategy == "top_k_abs":
        count = max(1, int(value))
    elif strategy == "min_p":
        count = int(np.count_nonzero(sign * score_R >= sign * _min_p_bound(score_R, value, side)))
    elif value >= 1:
        count = score_R.size
    elif prob_mode == "softmax":
        count = _softmax_count(sign * score_R, value)
    else:
        count = _linear_count(score_R, value, eps)
    return np.sort(ranked[:count])


def loss_scale(*, kept: int, groups: int, scaling: str = "none") -> float:
    """Factor on the advantages for `filter.loss_scaling`: 1, kept/groups or its root."""
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[scaling]
    return float((kept / groups if groups else 0.0) ** exponent)


def threshold(
    score_P: np.ndarray,
    *,
    strategy: str,
    value: float,
    side: str = "largest",
    include_zero: bool = True,
    eps: float = 0.01,
    prob_mode: str = "linear",
) -> float | None:
    """What decided (log value): the sum for top_p (linear), the bound for min_p, else None."""
    candidates = score_P if include_zero else score_P[np.abs(score_P) > ZERO_SCORE]
    if candidates.size and strategy == "min_p":
        return _min_p_bound(candidates, value, side)
    if candidates.size and strategy == "top_p" and value < 1 and prob_mode == "linear":
        return float(value * candidates.sum() - eps)
    return None


def _min_p_bound(score: np.ndarray, value: float, side: str) -> float:
    low, high = score.min(), score.max()
    return float(value * high - 1e-10 if side == "largest" else low / (value + 1e-10) + 1e-10)


def _linear_count(score_R: np.ndarray, value: float, eps: float) -> int:
    """How many of the ranked scores reach value * sum - eps without taking one that is <= 0."""
    target = value * score_R.sum() - eps
    count = 0
    while count < score_R.size and score_R[:count].sum() < target and score_R[count] > 0:
        count += 1
    return count if score_R[:count].sum() >= target else 0


def _softmax_count(signed_R: np.ndarray, value: float) -> int:
    weight_R = np.exp(signed_R - signed_R.max())
    return int(np.count_nonzero(np.cumsum(weight_R / weight_R.sum()) < value)) + 1


def _reward_score(reward_G: np.ndarray, kind: str) -> float:
    scored = np.asarray(reward_G, np.float64)[~np.isnan(reward_G)]
    if kind in ("sum", "mean"):
        return float(scored.sum()) / (max(scored.size, 1) if kind == "mean" else 1)
    if scored.size < 2 or is_flat(scored):
        return 0.0
    return float(scored.std(ddof=1) if kind == "std" else scored.var(ddof=1))
