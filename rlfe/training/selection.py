"""From judged groups to the kept ones with their advantages, and what to log about that.

Order as in docs/algorithms.md 0.1: statistics over all sampled groups, filter on whole groups,
advantages of the kept ones. The formulas are in `rewards`, `filters` and `advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlfe.schema import Recipe
from rlfe.training import batching, diagnostics, filters, rewards
from rlfe.training.advantages import advantages
from rlfe.training.job import Job
from rlfe.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The groups of a step (P), what they are worth, and which are trained on.

    reward_PG as judged (NaN: unscored); `kept` indices in batch order, one entry of `advantages`
    [G] for each.
    """

    groups: tuple[Group, ...]
    reward_PG: tuple[np.ndarray, ...]
    successes_P: tuple[int, ...]
    scored_P: tuple[int, ...]
    score_P: np.ndarray
    kept: tuple[int, ...]
    advantages: tuple[np.ndarray, ...]

    @property
    def kept_groups(self) -> list[Group]:
        return [self.groups[index] for index in self.kept]

    def advantages_by_slot(self) -> dict[int, np.ndarray]:
        pairs = zip(self.kept_groups, self.advantages, strict=True)
        return {group.slot: advantage_G for group, advantage_G in pairs}


def select(job: Job, groups: Sequence[Group]) -> Selection:
    """Steps 4 to 6 of a training step."""
    recipe = job.recipe
    reward_PG = [rewards.as_array([r.reward for r in group.rollouts]) for group in groups]
    shaped_PG = [_shaped(recipe, group, r) for group, r in zip(groups, reward_PG, strict=True)]
    score_P = _scores(job, groups, shaped_PG)
    kept = filters.kept_indices(
        score_P,
        strategy=recipe.filter.strategy,
        value=recipe.filter.value,
        side=recipe.filter.type,
        include_zero=recipe.filter.include_zero,
        eps=recipe.filter.eps,
        prob_mode=recipe.filter.top_p_prob_mode,
    ).tolist()
    scale = filters.loss_scale(
        kept=len(kept), groups=len(groups), scaling=recipe.filter.loss_scaling
    )
    choice = recipe.advantage
    threshold = recipe.reward.success_threshold
    return Selection(
        groups=tuple(groups),
        reward_PG=tuple(reward_PG),
        successes_P=tuple(rewards.successes(r, threshold=threshold) for r in reward_PG),
        scored_P=tuple(int(np.count_nonzero(~np.isnan(r))) for r in reward_PG),
        score_P=score_P,
        kept=tuple(kept),
        advantages=tuple(
            scale * advantages(choice.name, shaped_PG[i], ddof=choice.ddof, eps=choice.eps)
            for i in kept
        ),
    )


def _shaped(recipe: Recipe, group: Group, reward_G: np.ndarray) -> np.ndarray:
    unparsed_G = np.array([rewards.unparsed(r.verdict) for r in group.rollouts], bool)
    return rewards.shaped(
        reward_G,
        unparsed_G=unparsed_G,
        format_penalty=recipe.reward.format_penalty,
        normalization=recipe.reward.normalization,
    )


def _scores(job: Job, groups: Sequence[Group], shaped_PG: Sequence[np.ndarray]) -> np.ndarray:
    metric = job.recipe.filter.metric
    if metric in filters.REWARD_METRICS:
        return filters.reward_scores(shaped_PG, metric=metric)
    if metric == "length":
        values = [_lengths([group]).astype(np.float64) for group in groups]
    else:
        values = _entropies(job, groups)
    return filters.rollout_scores(values, metric=metric)


def _entropies(job: Job, groups: Sequence[Group]) -> list[np.ndarray]:
    """Token-mean entropy of each rollout under the current weights, by group."""
    nothing = [np.zeros(len(group.rollouts)) for group in groups]
    rows = batching.fresh_rows(groups, nothing, [0] * len(groups))
    batch = batching.padded(rows, pad_id=0)
    entropy_BL = job.learner.entropies(batch).astype(np.float64)
    count_B = np.maximum(batch.mask_BL.sum(axis=1), 1)
    mean_B = np.where(batch.mask_BL, entropy_BL, 0.0).sum(axis=1) / count_B
    ends = np.cumsum([len(group.rollouts) for group in groups])[:-1]
    return list(np.split(mean_B, ends))


def selection_metrics(recipe: Recipe, chosen: Selection) -> diagnostics.Metrics:
    """Rewards before and after the filter, groups, filter, advantages and lengths."""
    threshold = recipe.reward.success_threshold
    kept_reward = [chosen.reward_PG[index] for index in chosen.kept]
    done = [rollout for group in chosen.groups for rollout in group.rollouts]
    correct_B = np.array([r.reward is not None and r.reward >= threshold for r in done], bool)
    return {
        **diagnostics.reward_metrics(chosen.reward_PG, success_threshold=threshold),
        **diagnostics.reward_metrics(
            kept_reward, success_threshold=threshold, prefix="reward/kept_"
        ),
        **diagnostics.group_metrics(
            chosen.successes_P, chosen.scored_P, group_size=recipe.train.group_size
        ),
        **_filter_metrics(recipe, chosen),
        **diagnostics.advantage_metrics(chosen.advantages),
        **diagnostics.length_metrics(
            _lengths(chosen.groups),
            np.array([r.completion.finish == "length" for r in done], bool),
            correct_B,
        ),
    }


def _filter_metrics(recipe: Recipe, chosen: Selection) -> diagnostics.Metrics:
    kept = np.array(chosen.kept, np.int64)
    return {
        "filter/groups": len(chosen.groups),
        "filter/kept_groups": len(chosen.kept),
        "filter/kept_ratio": len(chosen.kept) / len(chosen.groups),
        "filter/zero_groups": int(np.count_nonzero(np.abs(chosen.score_P) <= filters.ZERO_SCORE)),
        "filter/threshold": filters.threshold(
            chosen.score_P,
            strategy=recipe.filter.strategy,
            value=recipe.filter.value,
            side=recipe.filter.type,
            include_zero=recipe.filter.include_zero,
            eps=recipe.filter.eps,
            prob_mode=recipe.filter.top_p_prob_mode,
        ),
        "filter/score_mean": float(chosen.score_P.mean()),
        "filter/score_min_kept": float(chosen.score_P[kept].min()) if len(kept) else None,
    }


def _lengths(groups: Sequence[Group]) -> np.ndarray:
    return np.array(
        [len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts],
        np.int64,
    )
