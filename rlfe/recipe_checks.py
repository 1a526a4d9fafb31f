"""Settings that may not stand together: refused before anything is loaded.

The one place for rules over several keys; `config show`, `sweep`, `train` and its dry run use it.
Ranges of single values are the schema's. What needs the data (prompt lengths, whether the replay
buffer can ever fill) is checked by the training command. Try: `check(load(["tiny"]).recipe)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlfe.budget import used_gpus
from rlfe.errors import RequestError
from rlfe.schema import Engine, EvalTask, Recipe

FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")  # of a data.source that is a file
TINKER_ALPHA = 32.0  # the service's; SkyRL's api.py sets the same
DEFAULT_SAMPLES, DEFAULT_SAMPLES_GSM8K = 160, 8  # docs/statistics.md


def check(recipe: Recipe, *, training: bool = False, ranks: int = 1) -> list[str]:
    """Refuse settings that contradict each other (docs/algorithms.md 1, 2.3, 3, 7, 11).

    Returns what a user should know about settings that work but may not be meant.

    Args:
        recipe: The resolved recipe.
        training: Ask also for what only training needs: a model and a prompt style.
        ranks: Processes that train together.

    Raises:
        RequestError: Every contradiction, one a line.
    """
    checks = (
        *(_advantage, _filter, _policy, _clip, _lengths),
        *(_buckets, _engine, _tinker, _validation, _evaluation, _source),
        _declared,
    )
    lines = [line for part in checks for line in part(recipe)]
    if training:
        lines += _training(recipe)
    if lines:
        raise RequestError("\n".join(lines), hint="Change one of the named keys with --set.")
    check_ranks(recipe, ranks)
    return list(notes(recipe, ranks))


def _training(recipe: Recipe) -> Iterator[str]:
    if recipe.prompt.style is None:
        yield 'prompt.style is not set: say "base" or "chat", the prompt the model is trained on'
    if not recipe.model.path and recipe.engine.learner != "fake":
        yield "model.path is not set: a model folder or a Hub id to start from"


def _advantage(recipe: Recipe) -> Iterator[str]:
    reward = recipe.reward
    if recipe.advantage.name == "maxrl":
        graded = {
            "reward.kind": reward.kind if reward.kind != "binary" else None,
            "reward.format_penalty": reward.format_penalty or None,
            "reward.normalization": None
            if reward.normalization == "identity"
            else reward.normalization,
        }
        for key, value in graded.items():
            if value is not None:
                yield f'advantage.name = "maxrl" needs 0/1 rewards, {key} = {value} gives others'
    wanted, given = "seq-mean-token-sum-norm", recipe.loss.aggregation
    if recipe.advantage.name == "dr_grpo" and given != wanted:
        yield f'advantage.name = "dr_grpo" needs loss.aggregation = "{wanted}", not "{given}"'


def _filter(recipe: Recipe) -> Iterator[str]:
    strategy, value = recipe.filter.strategy, recipe.filter.value
    if strategy == "top_k_abs" and value != int(value):
        yield f'filter.value = {value}: "top_k_abs" keeps a whole number of groups'
    if strategy in ("top_p", "top_k", "min_p") and value > 1:
        yield f'filter.value = {value}: "{strategy}" takes a share, above 0 and at most 1'
    if strategy == "top_k_abs" and value < 1:
        yield f'filter.value = {value}: "top_k_abs" keeps at least one group'


def _policy(recipe: Recipe) -> Iterator[str]:
    if recipe.mismatch.mode != "none" and recipe.loss.old == "behavior":
        yield (
            f'mismatch.mode = "{recipe.mismatch.mode}" needs loss.old = "recomputed": '
            'with "behavior" the ratio already carries the correction'
        )
    if recipe.loss.old == "recomputed" and recipe.lag.steps:
        yield f'loss.old = "recomputed" needs lag.steps = 0, it is {recipe.lag.steps}'
    low, high = recipe.mismatch.low, recipe.mismatch.high
    if low >= high:
        yield f"mismatch.low = {low} is not below mismatch.high = {high}"


def _clip(recipe: Recipe) -> Iterator[str]:
    if recipe.loss.clip_low >= 1:
        yield f"loss.clip_low = {recipe.loss.clip_low:g} leaves no lower bound above 0"


def _lengths(recipe: Recipe) -> Iterator[str]:
    if recipe.train.max_tokens >= recipe.model.max_len:
        yield (
            f"train.max_tokens = {recipe.train.max_tokens} leaves no room for a prompt in "
            f"model.max_len = {recipe.model.max_len}"
        )


def _declared(recipe: Recipe) -> Iterator[str]:
    from rlfe.criteria import declared_by

    try:
        declared_by(recipe)
    except RequestError as error:
        yield error.what


def _buckets(recipe: Recipe) -> Iterator[str]:
    size, taken = recipe.train.group_size, set[int]()
    for bucket in recipe.diagnostics.k_buckets or ():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", bucket)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 1 <= first <= last < size:
            yield f'diagnostics.k_buckets: "{bucket}" is no range within 1 to {size - 1} successes'
        elif taken & set(range(first, last + 1)):
            yield f'diagnostics.k_buckets: "{bucket}" overlaps another bucket'
        taken |= set(range(first, last + 1))


def _engine(recipe: Recipe) -> Iterator[str]:
    pair = (recipe.engine.sampler, recipe.engine.learner)
    for name in ("fake", "tinker"):
        if name in pair and pair != (name, name):
            yield (
                f'engine.sampler = "{pair[0]}", engine.learner = "{pair[1]}": '
                f'"{name}" goes with itself only'
            )


def _tinker(recipe: Recipe) -> Iterator[str]:
    """What the Tinker API cannot do: it trains LoRA weights from log-probabilities of tokens."""
    if recipe.engine.learner != "tinker":
        return
    engine, lora = 'engine.learner = "tinker"', recipe.lora
    if lora.rank == 0:
        yield f"lora.rank = 0: {engine} trains LoRA weights only"
    elif lora.alpha != TINKER_ALPHA:
        yield f"lora.alpha = {lora.alpha:g}: {engine} has a fixed alpha of {TINKER_ALPHA:g}"
    whole = f"{engine} sees log-probabilities of tokens, not of the whole vocabulary"
    if recipe.entropy.coef > 0:
        yield f"entropy.coef = {recipe.entropy.coef:g}: {whole}"
    if recipe.filter.metric.startswith("entropy") and recipe.filter.strategy != "none":
        yield f'filter.metric = "{recipe.filter.metric}": {whole}'
    if recipe.diagnostics.grad_every:
        yield (
            f"diagnostics.grad_every = {recipe.diagnostics.grad_every}: {engine} cannot measure a "
            "gradient without applying it"
        )
    if recipe.train.temperature != 1:
        yield (
            f"train.temperature = {recipe.train.temperature:g}: {engine} scores at temperature 1, "
            "so ratios would compare different distributions"
        )
    if recipe.service.reduction == "mean" and recipe.optim.grad_clip:
        yield (
            f"optim.grad_clip = {recipe.optim.grad_clip:g}: servers with service.reduction = "
            '"mean" do not clip; set it to 0'
        )


def _validation(recipe: Recipe) -> Iterator[str]:
    chosen = recipe.validate_
    if chosen.temperature == 0 and chosen.samples > 1:
        yield (
            f"validate.samples = {chosen.samples} at validate.temperature = 0 would be copies of "
            "one sample"
        )


def _source(recipe: Recipe) -> Iterator[str]:
    """Keys of `data` that this task would not read."""
    data = recipe.data
    given = [key for key in ("source", "subsets", "revision", "columns") if getattr(data, key)]
    if recipe.task.module is not None:
        for key in given:
            yield f"data.{key} is not read with task.module: the own task gives its problems itself"
    elif data.source is None:
        for key in given:
            yield f"data.{key} needs data.source: packaged problems are whole"
    elif data.source.endswith(FILE_ENDINGS):
        for key in given:
            if key in ("subsets", "revision"):
                yield f"data.{key} is for data sets of the Hub, data.source is a file"


def _evaluation(recipe: Recipe) -> Iterator[str]:
    for task, settings in recipe.eval.items():
        samples = _samples(task, settings)
        too_many = [k for k in settings.k if k > samples]
        if too_many:
            yield f"eval.{task}.k = {max(too_many)} needs as many samples, n is {samples}"


def _samples(task: str, settings: EvalTask) -> int:
    default = DEFAULT_SAMPLES_GSM8K if task.startswith("gsm8k") else DEFAULT_SAMPLES
    return settings.n or default


def device_names(engine: Engine) -> list[str]:
    """The GPUs that `engine.devices` names; none where it is not set."""
    return [name.strip() for name in (engine.devices or "").split(",") if name.strip()]


def check_ranks(recipe: Recipe, count: int) -> None:
    """Refuse settings with which `count` ranks cannot train together.

    Raises:
        RequestError: Every contradiction, one a line.
    """
    engine, lines = recipe.engine, []
    if count == 1:
        return
    if engine.learner != "transformers":
        lines.append(f'engine.learner = "{engine.learner}" trains in one process, not in {count}')
    if engine.sampler == "vllm" and engine.tensor_parallel > 1:
        lines.append(
            f"engine.tensor_parallel = {engine.tensor_parallel}: with {count} ranks every rank "
            "samples on its own GPU"
        )
    if engine.device not in ("auto", "cuda", "cpu"):
        lines.append(f'engine.device = "{engine.device}": every rank takes a GPU of its own')
    if lines:
        raise RequestError("\n".join(lines), hint="Change these with --set, or leave --gpus out.")


def _gpus(engine: Engine) -> Iterator[str]:
    """Say that one process uses fewer GPUs than are asked for."""
    asked = max(engine.gpus_per_node or 1, len(device_names(engine)))
    sampling = used_gpus(engine)
    if asked <= sampling:
        return
    used = f"one learns, {sampling} sample" if sampling > 1 else "one is used"
    alone = " --set engine.tensor_parallel=1" if sampling > 1 else ""
    yield f"{asked} GPUs are asked for, {used}: rlfe train --gpus {asked}{alone} would use all"


def notes(recipe: Recipe, ranks: int = 1) -> Iterator[str]:
    """What a user should know about settings that work but may not be meant; recorded too."""
    if ranks == 1:
        yield from _gpus(recipe.engine)
    elif (planned := recipe.engine.gpus_per_node or ranks) != ranks:
        yield f"engine.gpus_per_node = {planned}, and {ranks} ranks train"
    if ranks > recipe.train.prompts_per_step:
        count = recipe.train.prompts_per_step
        yield f"train.prompts_per_step = {count}: of {ranks} ranks some sample nothing"
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
