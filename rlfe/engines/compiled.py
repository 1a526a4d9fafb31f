"""Layers and the output head's arithmetic compiled by torch.compile: fewer passes over memory.

A layer's norms, casts, rotations and activation are some sixty small kernels; compiled they are a
handful. The first passes take longer, last bits change, runs stay repeatable. All alike layers
of a model share one compiled graph, for any number of rows and tokens. Not here: which layers
there are (`recompute.py`), what the head computes (`head.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch

from rlfe.engines.recompute import layers_of
from rlfe.errors import RequestError

P = ParamSpec("P")
R = TypeVar("R")
KEY = "compute.compile"
CACHES = ("cache", "past_key_values", "layer_past")  # transformers' names of one argument


def compile_layers(model: Any) -> int:
    """Compile the forward pass of each layer, in place; before they are told to recompute.

    Returns the number of layers. Nothing is compiled before the first pass.

    Raises:
        RequestError: The architecture has no such layers.
    """
    # It counts its threads when it is imported; importing vLLM first would leave it one.
    import torch._inductor.config

    layers = layers_of(model, KEY)
    for layer in layers:
        layer.forward = _of_any_size(layer.forward, _in_words(torch.compile(layer.forward)))
    return len(layers)


def _of_any_size(plain: Callable[P, R], fast: Callable[P, R]) -> Callable[P, R]:
    """Say which sizes vary (rows, tokens), so that one graph does; all free would trace longer.

    With a cache of keys and values it is a sampler that calls: that would be a graph per layer.
    """

    def forward(*args: P.args, **kwargs: P.kwargs) -> R:
        if any(kwargs.get(name) is not None for name in CACHES):
            return plain(*args, **kwargs)
        for value in _tensors(args, kwargs):
            if value.ndim == 3:  # [rows, tokens, width]
                torch._dynamo.maybe_mark_dynamic(value, [0, 1])
        return fast(*args, **kwargs)

    return forward


def _tensors(*values: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A function of tensors whose first size varies, compiled when it is first called.

    They should not be views into larger tensors: another graph serves those that start at 0.
    """
    fast = _in_words(torch.compile(function))

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for value in _tensors(args, kwargs):
            torch._dynamo.maybe_mark_dynamic(value, 0)
        return fast(*args, **kwargs)

    return call


def _in_words(call: Callable[P, R]) -> Callable[P, R]:
    """What the compiler says as one error: most often that there is no C compiler or no Triton."""

    def forward(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            said = " ".join(str(error).split("\n")[:2]).strip()
            raise RequestError(
                f"{KEY}: torch.compile failed: {said}",
                hint="It needs a C compiler and, on a GPU, Triton; without them start again with "
                f"--overwrite --set {KEY}=false.",
            ) from error

    return forward
