"""Which engines exist, and how one is made from a recipe. Heavy libraries load on the first use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlfe.engines.base import Learner, Sampler, Tokenizer
from rlfe.engines.fake import FakeLearner, FakeSampler, FakeTokenizer
from rlfe.engines.ranks import Ranks, TorchRanks
from rlfe.errors import RequestError
from rlfe.randomness import derive
from rlfe.schema import Engine, Recipe

SAMPLE_BATCH = 64  # sequences that transformers generates at a time


def make_sampler(
    engine: Engine,
    path: Path | str,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    thinking: bool | None = None,
    max_len: int | None = None,
    lora: Any | None = None,
    model: Any | None = None,
    training: bool = False,
) -> Sampler:
    """The sampler that `engine.sampler` names, on a model folder or Hub id.

    Args:
        engine: The recipe's section: sampler, device, threads, sample_batch, and vLLM's keys.
        path: Model folder or Hub id.
        dtype: What it computes in; None: float32 on a CPU, bfloat16 elsewhere.
        thinking: The chat template's switch.
        max_len: Prompt plus completion (vllm); None: the model's.
        lora, model: For training in one process (`make_engines`).
        training: vLLM's core may live in this process, where it is faster but cannot be started
            again; an evaluation may need a fresh one.

    Raises:
        RequestError: A library that the engine needs is not installed.
        NotFoundError: There is no such model.
    """
    facts: dict[str, Any] = {
        "dtype": dtype,
        "revision": revision,
        "thinking": thinking,
        "max_len": max_len,
    }
    if engine.sampler == "vllm":
        facts["same_process"] = None if training else False
    made: Sampler = _made(SAMPLERS, engine.sampler, engine, path, lora=lora, model=model, **facts)
    return made


def make_learner(recipe: Recipe, *, share: bool = False, ranks: Ranks | None = None) -> Learner:
    """The learner that `engine.learner` names, on the recipe's model.

    `share`: snapshots refer to the live weights, for a sampler that shares the model. `ranks`:
    who trains together (they have joined); None: this process alone.
    """
    made: Learner = _made(LEARNERS, recipe.engine.learner, recipe, share, ranks or Ranks())
    return made


def make_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer alone, for measuring prompts before a model is loaded."""
    check_engines(recipe)
    if recipe.engine.sampler == "fake":
        return FakeTokenizer()
    from rlfe.engines.tokenizer import HfTokenizer

    model = recipe.model
    return HfTokenizer(model.path, thinking=recipe.prompt.thinking, revision=model.revision)


def make_engines(recipe: Recipe, ranks: Ranks | None = None) -> tuple[Sampler, Learner]:
    """Sampler and learner of a training run; they share one model where that changes nothing.

    Shared: both transformers, no lag, both compute in float32, and one process holds all weights.
    Of several ranks each has a sampler of its own, on its own GPU.
    """
    ranks = ranks or Ranks()
    recipe = _on_own_device(recipe, ranks)
    if recipe.engine.sampler == "tinker":
        return _tinker(recipe)
    both = recipe.engine.sampler == recipe.engine.learner == "transformers"
    alone = ranks.size == 1
    share = both and alone and recipe.lag.steps == 0 and computes_in_float32(recipe)
    learner = make_learner(recipe, share=share, ranks=ranks)
    sampler = make_sampler(
        recipe.engine,
        recipe.model.path,
        dtype="float32" if computes_in_float32(recipe) else recipe.model.dtype,
        revision=recipe.model.revision,
        thinking=recipe.prompt.thinking,
        max_len=recipe.model.max_len,
        lora=_lora(recipe),
        model=learner.model if share else None,  # type: ignore[attr-defined]
        training=True,
    )
    return sampler, learner


def rank_device(recipe: Recipe) -> str:
    """Where the weights of a rank are: `cuda` or `cpu`."""
    from rlfe.engines.weights import device_of

    return device_of(recipe.engine.device).type


def _on_own_device(recipe: Recipe, ranks: Ranks) -> Recipe:
    """The recipe as this rank's engines take it; the record keeps the recipe as it was given."""
    if ranks.size == 1 or rank_device(recipe) == "cpu":
        return recipe
    engine = recipe.engine.model_copy(update={"device": f"cuda:{ranks.local}"})
    return recipe.model_copy(update={"engine": engine})


def missing(recipe: Recipe) -> list[str]:
    """Libraries that the recipe's engines need and that are not installed; imports none."""
    engines = (recipe.engine.sampler, recipe.engine.learner)
    wanted = dict.fromkeys(library for name in engines for library in LIBRARIES[name])
    return [library for library in wanted if importlib.util.find_spec(library) is None]


def check_engines(recipe: Recipe) -> None:
    """RequestError if an engine of the recipe needs a library that is not installed."""
    lacks = missing(recipe)
    if recipe.engine.sampler == "vllm":
        from rlfe.engines.vllm_settings import need_vllm

        need_vllm()
    if lacks:
        extra = "tinker" if "tinker" in lacks else "train"
        raise RequestError(
            f'engine "{recipe.engine.learner}" needs {", ".join(lacks)}, which is not installed',
            hint=f"pip install 'rlfe[{extra}]'",
        )


def _made(names: dict[str, Callable[..., Any]], name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return names[name](*args, **kwargs)
    except ModuleNotFoundError as error:
        raise RequestError(
            f'engine "{name}" needs {error.name}, which is not installed',
            hint="pip install 'rlfe[train]'",
        ) from error


def computes_in_float32(recipe: Recipe) -> bool:
    """Whether sampler and learner both compute in float32: on a CPU, or if the recipe says so.

    Of a service only the recipe can say it.
    """
    if recipe.engine.sampler == "fake":
        return True
    if recipe.engine.sampler == "tinker":
        return recipe.model.dtype == "float32"
    from rlfe.engines.weights import device_of

    return device_of(recipe.engine.device).type == "cpu" or recipe.model.dtype == "float32"


def _lora(recipe: Recipe) -> Any | None:
    if recipe.lora.rank == 0:
        return None
    from rlfe.engines.weights import Lora

    return Lora(
        rank=recipe.lora.rank,
        alpha=recipe.lora.alpha,
        targets=recipe.lora.targets,
        seed=derive(recipe.run.seed, "lora"),
    )


def _transformers_sampler(
    engine: Engine, path: Path | str, max_len: int | None, **kwargs: Any
) -> Sampler:
    from rlfe.engines.transformers import TransformersSampler

    return TransformersSampler(
        path,
        device=engine.device,
        threads=engine.threads,
        sample_batch=engine.sample_batch or SAMPLE_BATCH,
        **kwargs,
    )


def _vllm_sampler(engine: Engine, path: Path | str, model: Any | None, **kwargs: Any) -> Sampler:
    from rlfe.engines.vllm import VllmSampler

    return VllmSampler(
        path,
        device=engine.device,
        gpu_share=engine.gpu_share,
        max_batched_tokens=engine.max_batched_tokens,
        sequences=engine.sample_batch,
        tensor_parallel=engine.tensor_parallel,
        compilation=engine.compilation,
        sleep=engine.sleep,
        **kwargs,
    )


def _transformers_learner(recipe: Recipe, share: bool, ranks: Ranks) -> Learner:
    from rlfe.engines.learner import TransformersLearner

    if isinstance(ranks, TorchRanks):
        from rlfe.engines.sharded import ShardedLearner

        return ShardedLearner(recipe.model.path, ranks=ranks, **_learning(recipe))
    return TransformersLearner(recipe.model.path, share=share, **_learning(recipe))


def _learning(recipe: Recipe) -> dict[str, Any]:
    optim = recipe.optim
    return {
        "dtype": recipe.model.dtype,
        "device": recipe.engine.device,
        "threads": recipe.engine.threads,
        "temperature": recipe.train.temperature,
        "micro_batch": recipe.train.micro_batch_rollouts,
        **_compute(recipe),
        "betas": (optim.beta1, optim.beta2),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "grad_clip": optim.grad_clip,
        "lora": _lora(recipe),
        "revision": recipe.model.revision,
    }


def _compute(recipe: Recipe) -> dict[str, Any]:
    """`[compute]` as the learner takes it, with `auto` decided."""
    from rlfe.engines.memory import needs_checkpointing

    compute, peak = recipe.compute, recipe.compute.peak_tflops
    chosen = compute.gradient_checkpointing
    return {
        "tokens": compute.token_budget,
        "logits": compute.logits,
        "checkpointing": needs_checkpointing(recipe) if chosen == "auto" else chosen,
        "compiles": compute.compile,
        "peak": peak * 1e12 if isinstance(peak, float) else peak,
    }


def _tinker(recipe: Recipe) -> tuple[Sampler, Learner]:
    """Sampler and learner of one session at a service that speaks the Tinker API."""
    from rlfe.engines.tinker import TinkerSampler
    from rlfe.engines.tinker_learner import TinkerLearner
    from rlfe.engines.tinker_service import Service
    from rlfe.engines.tokenizer import HfTokenizer

    model, optim, lora = recipe.model, recipe.optim, _lora(recipe)
    assert lora is not None, "recipe_checks refuses tinker without LoRA"
    tokenizer = HfTokenizer(model.path, thinking=recipe.prompt.thinking, revision=model.revision)
    service = Service(timeout_seconds=recipe.service.timeout_seconds)
    name = recipe.service.model or model.path
    service.need_model(name)
    learner = TinkerLearner(
        service,
        model.path,
        model=name,
        lora=lora,
        adam={
            "beta1": optim.beta1,
            "beta2": optim.beta2,
            "eps": optim.eps,
            "weight_decay": optim.weight_decay,
            "grad_clip_norm": optim.grad_clip,
        },
        dtype=model.dtype,
        device=recipe.engine.device,
        reduction=recipe.service.reduction,
        stale=recipe.lag.steps > 0,
        revision=model.revision,
    )
    return TinkerSampler(service, tokenizer, name), learner


def _not_alone(*args: Any, **kwargs: Any) -> Any:
    raise RequestError(
        'engine "tinker" samples what its own learner trains, nothing else',
        hint="Use --engine transformers or --engine vllm for checkpoints.",
    )


LIBRARIES = {
    "transformers": ("torch", "transformers"),
    "vllm": ("vllm",),
    "tinker": ("tinker", "torch", "transformers"),
    "fake": (),
}
SAMPLERS: dict[str, Callable[..., Any]] = {
    "transformers": _transformers_sampler,
    "vllm": _vllm_sampler,
    "tinker": _not_alone,
    "fake": lambda engine, path, **kwargs: FakeSampler(),
}
LEARNERS: dict[str, Callable[..., Any]] = {
    "transformers": _transformers_learner,
    "tinker": _not_alone,
    "fake": lambda recipe, share, ranks: FakeLearner(),
}
