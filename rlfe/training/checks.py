"""Settings that contradict each other, refused before anything is loaded.

What: rules over several keys of a recipe (a single key's range is the schema's). Not here: rules
that need the problems or a model (`replay.check_feasible`, `lengths.fitting`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlfe.errors import RequestError
from rlfe.schema import Recipe
from rlfe.training.diagnostics import checked_buckets


def check(recipe: Recipe) -> list[str]:
    """Things a user should know about settings that work but may not be meant.

    Raises:
        RequestError: The first contradiction, with the keys and the way out.
    """
    for refusal in (_advantage, _loss, _filter, _lengths, _validation):
        for what, hint in refusal(recipe):
            raise RequestError(what, hint=hint)
    checked_buckets(recipe.diagnostics.k_buckets, group_size=recipe.train.group_size)
    return list(_notes(recipe))


def _advantage(recipe: Recipe) -> Iterator[tuple[str, str]]:
    name, reward = recipe.advantage.name, recipe.reward
    if name == "maxrl":
        for key, value, needed in (
            ("reward.kind", reward.kind, "binary"),
            ("reward.format_penalty", reward.format_penalty, 0.0),
            ("reward.normalization", reward.normalization, "identity"),
        ):
            if value != needed:
                yield (
                    f"advantage.name = maxrl needs rewards 0 and 1, but {key} = {value}",
                    f"set {key} = {needed}, or advantage.name = tailrl",
                )
    if name == "dr_grpo" and recipe.loss.aggregation != "seq-mean-token-sum-norm":
        yield (
            f"advantage.name = dr_grpo goes with loss.aggregation = seq-mean-token-sum-norm, "
            f"got {recipe.loss.aggregation}",
            "set that aggregation, or advantage.name = centered",
        )


def _loss(recipe: Recipe) -> Iterator[tuple[str, str]]:
    recomputed = recipe.loss.old == "recomputed"
    if recomputed and recipe.lag.steps > 0:
        yield (
            f"loss.old = recomputed with lag.steps = {recipe.lag.steps}: the old policy would not "
            "be the one that sampled",
            "set loss.old = behavior, or lag.steps = 0",
        )
    mismatch = recipe.mismatch
    if mismatch.mode != "none" and not recomputed:
        yield (
            f"mismatch.mode = {mismatch.mode} with loss.old = behavior: the ratio already carries "
            "the correction",
            "set loss.old = recomputed, or mismatch.mode = none",
        )
    if mismatch.low >= mismatch.high:
        yield (
            f"mismatch.low = {mismatch.low:g} is not below mismatch.high = {mismatch.high:g}",
            "change one of them",
        )
    if recipe.loss.clip_low >= 1:
        yield (
            f"loss.clip_low = {recipe.loss.clip_low:g} leaves no lower bound above 0",
            "set loss.clip_low below 1",
        )


def _filter(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy, value = recipe.filter.strategy, recipe.filter.value
    if strategy == "top_k_abs" and (value < 1 or value != int(value)):
        yield (
            f"filter.value = {value:g} with top_k_abs has to be a whole number, 1 or more",
            "use filter.strategy = top_k for a share",
        )
    if strategy in ("top_p", "top_k", "min_p") and value > 1:
        yield (
            f"filter.value = {value:g} with {strategy} has to lie in (0, 1]",
            "use filter.strategy = top_k_abs for a number of groups",
        )


def _lengths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.train.max_tokens >= recipe.model.max_len:
        yield (
            f"train.max_tokens = {recipe.train.max_tokens} leaves no room for a prompt in "
            f"model.max_len = {recipe.model.max_len}",
            "raise model.max_len or lower train.max_tokens",
        )


def _validation(recipe: Recipe) -> Iterator[tuple[str, str]]:
    chosen = recipe.validate_
    if chosen.temperature == 0 and chosen.samples > 1:
        yield (
            f"validate.samples = {chosen.samples} at validate.temperature = 0 would be copies of "
            "one sample",
            "set validate.samples = 1, or a temperature above 0",
        )


def _notes(recipe: Recipe) -> Iterator[str]:
    if recipe.train.group_size == 1:
        yield "train.group_size = 1: every advantage is 0, nothing is learned from rewards"
    if recipe.filter.strategy == "top_k" and recipe.filter.include_zero:
        yield "filter: top_k with include_zero may keep flat groups, which teach nothing"
    defaults = type(recipe.lora)()
    if recipe.lora.rank == 0 and recipe.lora != defaults:
        yield "lora.alpha and lora.targets are not used: lora.rank = 0 trains all weights"
    if recipe.replay.strategy != "none" and recipe.replay.weight == 0:
        yield "replay.lambda = 0: no replay buffer is kept"
    if recipe.train.group_size != 8 and recipe.diagnostics.k_buckets is None:
        yield (
            f"train.group_size = {recipe.train.group_size}: no buckets of success counts are "
            "logged unless diagnostics.k_buckets names them"
        )
