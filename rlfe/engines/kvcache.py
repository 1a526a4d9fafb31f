"""A key-value cache that grows in place, starts from shared prompts, and drops finished rows.

transformers' own cache copies everything at every token. This one writes into spare room and
grows by blocks. Prompts are right-aligned, so that rows of different prompt lengths end at the
same place; what lies left of a prompt is masked by the caller. Full attention only: other
architectures (windows, recurrent layers) use transformers' own (`plain`), one prompt at a time.
Not here: which row is finished (`generation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

BLOCK = 128  # positions of spare room


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, [R, heads, length, size] views of roomier buffers."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.lazy_initialization(keys, values)
        self._length = keys.shape[-2]
        self._room: list[torch.Tensor] = [_roomy(keys), _roomy(values)]
        self._show()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.begin(key_states, value_states)
            return self.keys, self.values
        end = self._length + key_states.shape[-2]
        if end > self._room[0].shape[-2]:
            self._room = [_roomy(self.keys), _roomy(self.values)]
        self._room[0][:, :, self._length : end] = key_states
        self._room[1][:, :, self._length : end] = value_states
        self._length = end
        self._show()
        return self.keys, self.values

    def keep_rows(self, rows: torch.Tensor) -> None:
        self._room = [_roomy(part[rows]) for part in (self.keys, self.values)]
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (part[:, :, : self._length] for part in self._room)


def empty_cache(model: Any, *, plain: bool) -> Any:
    """A cache for one forward pass over a prompt; `plain`: the one that the architecture needs."""
    if plain:
        return DynamicCache(config=model.config.get_text_config())
    return Cache(layer_class_to_replicate=GrowingLayer)


def keep_rows(cache: Any, rows: torch.Tensor, *, plain: bool) -> None:
    """Leave only these rows, in this order; a row may be named several times when `plain`."""
    if plain:
        cache.reorder_cache(rows)
        return
    for layer in cache.layers:
        layer.keep_rows(rows)


def joined_cache(prompts: Sequence[Any], copies: Sequence[int]) -> Any:
    """One cache of sum(copies) rows: each prompt's cache (one row) repeated, right-aligned."""
    width = max(prompt.layers[0].keys.shape[-2] for prompt in prompts)
    layers = []
    for index in range(len(prompts[0].layers)):
        layer = GrowingLayer()
        parts = [prompt.layers[index] for prompt in prompts]
        keys = _aligned([part.keys for part in parts], copies, width)
        layer.begin(keys, _aligned([part.values for part in parts], copies, width))
        layers.append(layer)
    return Cache(layers=layers)


def _aligned(parts: Sequence[torch.Tensor], copies: Sequence[int], width: int) -> torch.Tensor:
    rows = []
    for part, count in zip(parts, copies, strict=True):
        padded = torch.nn.functional.pad(part, (0, 0, width - part.shape[-2], 0))
        rows.append(padded.expand(count, -1, -1, -1))
    return torch.cat(rows)


def _roomy(part: torch.Tensor) -> torch.Tensor:
    """A copy with spare positions behind it."""
    rows, heads, length, size = part.shape
    room = part.new_zeros((rows, heads, (length // BLOCK + 1) * BLOCK, size))
    room[:, :, :length] = part
    return room
