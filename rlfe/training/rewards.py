"""From a verdict to a reward, and what a group's rewards say.

A rollout that could not be scored (`infrastructure`) has no reward: None, never 0. Success counts
k, `acc` of replay and success rates are taken from the reward as judged; penalty and normalisation
only shape what filter and advantages see (docs/algorithms.md 0.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlfe.types import Status, Verdict

FLAT_SPREAD = 1e-8  # max - min at or below this is a flat group
UNPARSED = frozenset({Status.NO_ANSWER, Status.SYNTAX_ERROR})


def reward(verdict: Verdict, *, kind: str = "binary") -> float | None:
    """The reward as judged. None: could not be scored.

    `binary`: 1 if all tests hold. `fraction`: share of tests that hold, `facts["right"]` of
    `facts["total"]`; without these facts (nothing ran) 0, and 1 for a passed verdict.
    """
    if verdict.status is Status.INFRASTRUCTURE:
        return None
    if kind == "binary":
        return 1.0 if verdict.correct else 0.0
    if kind != "fraction":
        raise ValueError(f'unknown reward "{kind}"; known: binary, fraction')
    total = verdict.facts.get("total", 0)
    if total:
        return float(verdict.facts.get("right", 0)) / float(total)
    return 1.0 if verdict.correct else 0.0


def unparsed(verdict: Verdict) -> bool:
    """Whether the reply could not be parsed (`reward.format_penalty`).

    A cut reply carries the status beneath in its detail, which then decides.
    """
    if verdict.status is Status.TRUNCATED:
        return verdict.detail.split(":")[0].strip() in UNPARSED
    return verdict.status in UNPARSED


def as_array(rewards: Sequence[float | int | bool | None]) -> np.ndarray:
    """Rewards of one group as float64 [G]; None becomes NaN, the mark of an unscored rollout."""
    return np.array([np.nan if value is None else float(value) for value in rewards], np.float64)


def is_flat(reward_G: np.ndarray) -> bool:
    """Whether the scored rewards differ by at most 1e-8; true without any scored one."""
    scored = reward_G[~np.isnan(reward_G)]
    return scored.size == 0 or bool(scored.max() - scored.min() <= FLAT_SPREAD)


def successes(reward_G: np.ndarray, *, threshold: float = 1.0) -> int:
    """k: rollouts whose reward as judged reaches the threshold; unscored ones never do."""
    return int(np.count_nonzero(reward_G >= threshold))  # a comparison with NaN is false


def shaped(
    reward_G: np.ndarray,
    *,
    unparsed_G: np.ndarray | None = None,
    format_penalty: float = 0.0,
    normalization: str = "identity",
) -> np.ndarray:
    """What filter and advantages see: reward + penalty where unparsed, then normalised per group.

    `mean`: r - mean. `mean_std`: (r - mean) / (sd + 1e-6), ddof 1, zeros for a flat group. Mean
    and deviation are over the scored rollouts; NaN stays NaN. Empty in, empty out.
    """
    if unparsed_G is not None and unparsed_G.shape != reward_G.shape:
        raise ValueError(f"unparsed_G has shape {unparsed_G.shape}, reward_G {reward_G.shape}")
    if normalization not in ("identity", "mean", "mean_std"):
        raise ValueError(f'unknown normalization "{normalization}"')
    value_G = np.array(reward_G, np.float64)
    if unparsed_G is not None and format_penalty != 0.0:
        value_G = value_G + format_penalty * unparsed_G
    scored = ~np.isnan(value_G)
    if normalization == "identity" or not scored.any():
        return value_G
    if is_flat(value_G):
        return np.where(scored, 0.0, np.nan)
    value_G -= value_G[scored].mean()
    if normalization == "mean_std":
        value_G /= value_G[scored].std(ddof=1) + 1e-6
    return value_G


def flat_share(success_rate_P: np.ndarray, *, group_size: int) -> float:
    """Expected share of groups without signal, mean over problems of p^N + (1-p)^N."""
    if success_rate_P.size == 0:
        return 0.0
    return float(np.mean(success_rate_P**group_size + (1 - success_rate_P) ** group_size))
