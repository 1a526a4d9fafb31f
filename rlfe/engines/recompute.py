"""Less memory for more work: layers computed again in the backward pass, a budget that is halved.

What: gradient checkpointing of a model in eval mode; a second try with smaller passes after
memory ran out. Not here: how much memory a run needs (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from rlfe.engines.microbatches import Budget
from rlfe.errors import RequestError, RlfeError

T = TypeVar("T")
WAYS_OUT = (
    "--set compute.gradient_checkpointing=true, a smaller compute.token_budget, engine.sleep=true, "
    "a smaller engine.gpu_share, or lora.rank"
)


def recompute_layers(model: Any) -> int:
    """Let every layer keep its input only and compute the rest again for the gradient.

    transformers' own switch acts in training mode alone, where dropout would act too; here the
    same layers go through torch's `checkpoint` themselves. Returns the number of layers.

    Raises:
        RequestError: The architecture has no such layers.
    """
    layers = layers_of(model, "compute.gradient_checkpointing")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)
    return len(layers)


def layers_of(model: Any, key: str) -> list[Any]:
    """The decoder layers of a transformers model.

    Raises:
        RequestError: The architecture has none that `key` could work with.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise RequestError(
            f"{key}: {type(model).__name__} has no layers for it",
            hint="Set it to false; a smaller compute.token_budget saves memory too.",
        )
    return layers


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Nothing is drawn at random in eval mode, so no generator state has to be kept.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def within_memory(run: Callable[[], T], budget: Budget, warn: Callable[[str], None]) -> T:
    """`run()`; if memory runs out, once more with half the budget, once in a run.

    `run` has to start from scratch: what the first try left behind is its to clear.

    Raises:
        RlfeError: The memory does not do for half the budget either.
    """
    while True:
        try:
            return run()
        except torch.OutOfMemoryError as error:
            said = _first_line(error)
        # Only here, behind the handler: the error's traceback held the failed pass's tensors.
        if budget.halved:
            raise RlfeError(
                f"out of memory with {budget.words()}, which is half of what was set: {said}",
                hint=f"Go on with {WAYS_OUT}.",
            )
        before = budget.words()
        budget.halve()
        warn(f"out of memory with {before}: going on with {budget.words()}, which is to be set")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Where nothing smaller can be tried: running out of memory as one clear error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RlfeError(
            f"out of memory in {what}: {_first_line(error)}",
            hint=f"Go on with {WAYS_OUT}.",
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or "no details"
