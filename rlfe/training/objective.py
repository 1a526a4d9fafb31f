"""The loss of one optimiser step in the form that a learner calls (`engines.base.LossFunction`).

What: the recipe's numbers as `LossSettings`, and which rows can have a gradient at all. Not here:
formulas (`losses.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlfe.schema import Recipe
from rlfe.training.losses import (
    Denominators,
    LossSettings,
    denominators,
    micro_batch,
    micro_batch_terms,
)
from rlfe.types import Batch


def loss_settings(recipe: Recipe, *, replay_weight: float) -> LossSettings:
    """The numbers of a recipe that the loss reads; `replay_weight` 0 without a buffer."""
    loss, mismatch = recipe.loss, recipe.mismatch
    return LossSettings(
        max_tokens=recipe.train.max_tokens,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        is_level=loss.is_level,
        aggregation=loss.aggregation,
        kl_beta=recipe.kl.beta,
        kl_estimator=recipe.kl.estimator,
        kl_gradient_of=recipe.kl.gradient_of,
        entropy_coef=recipe.entropy.coef,
        mismatch_mode=mismatch.mode,
        mismatch_cap=mismatch.cap,
        mismatch_low=mismatch.low,
        mismatch_high=mismatch.high,
        mismatch_limit=mismatch.limit,
        replay_weight=replay_weight,
    )


def describe(settings: LossSettings) -> str:
    """The objective in words: "clipped importance sampling [0.8, 1.2] per token"."""
    words = [
        f"clipped importance sampling [{1 - settings.clip_low:g}, {1 + settings.clip_high:g}]",
        f"per {settings.is_level}",
    ]
    if settings.dual_clip is not None:
        words.append(f"with dual clip {settings.dual_clip:g}")
    return " ".join(words)


class StepLoss:
    """The loss over one optimiser step's batch; denominators are counted here, once.

    Every rank of a run knows the whole batch, so they are those of all ranks.
    """

    def __init__(self, settings: LossSettings, batch: Batch) -> None:
        self.settings = settings
        self.denominators: Denominators = denominators(batch)
        self.entropy_gradient = settings.entropy_coef > 0

    def needs_gradient(self, batch: Batch) -> np.ndarray:
        """Replay rows, rows with an advantage, and all fresh rows under a KL or entropy term.

        The others add exactly 0 to the gradient; they are still scored for the diagnostics.
        """
        settings, fresh_B = self.settings, batch.source_B == 0
        everything = settings.kl_beta > 0 or settings.entropy_coef > 0
        trained_B: np.ndarray = fresh_B & (everything | (batch.advantage_B != 0))
        replayed_B: np.ndarray = ~fresh_B & (settings.replay_weight > 0)
        return np.asarray(trained_B | replayed_B)

    def __call__(self, rows: Batch, logp_BL: Any, entropy_BL: Any) -> tuple[Any, dict[str, Any]]:
        micro = micro_batch(rows, slice(None), device=logp_BL.device)
        return micro_batch_terms(logp_BL, entropy_BL, micro, self.settings, self.denominators)
