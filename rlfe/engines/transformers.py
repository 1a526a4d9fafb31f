"""Sampling with transformers: on a laptop's CPU, or on a GPU where vLLM is not installed.

What: requests packed into batches by prompt length, sampled by `generation.py`. On the exact
engine (CPU, float32, one thread) every request is a batch of its own, for the shape of a batch
changes the last bits of a matrix product; elsewhere requests share batches and agree up to
rounding. Not here: learning (`learner.py`).
Try it: `TransformersSampler("model").generate([Request(...)])`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlfe.engines.base import Snapshot
from rlfe.engines.source import model_folder
from rlfe.engines.tokenizer import HfTokenizer
from rlfe.naming import step_of
from rlfe.types import Completion, Request, Sampling


class TransformersSampler:
    """A sampler that holds one model in this process.

    Args:
        path: Model folder or Hub id.
        dtype: What it computes in; None: float32 on a CPU, bfloat16 elsewhere.
        device: `auto`, `cpu`, `cuda`, `mps`.
        threads: CPU threads of torch; 0: the library's default.
        sample_batch: Sequences generated at a time.
        thinking: The chat template's switch; None: not passed.
        lora: LoRA layers to put in place; snapshots are then adapters only.
        model: A model to share with a learner of this process instead of loading one.
    """

    name = "transformers"

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: str | None = None,
        device: str = "auto",
        threads: int = 0,
        sample_batch: int = 64,
        thinking: bool | None = None,
        revision: str | None = None,
        lora: Any | None = None,
        model: Any | None = None,
    ) -> None:
        import torch

        from rlfe.engines.weights import device_of, dtype_of, load_model

        if threads:
            torch.set_num_threads(threads)
        self._folder = model_folder(path, revision)
        self._thinking, self._lora, self._sample_batch = thinking, lora, sample_batch
        self._tokenizer = HfTokenizer(self._folder, thinking=thinking)
        self._device = device_of(device)
        self._dtype = dtype_of(dtype or ("float32" if self._device.type == "cpu" else "bfloat16"))
        if model is None:
            model = load_model(self._folder, self._dtype, self._device, lora)
        self._model, self._policy_step = model, 0

    @property
    def tokenizer(self) -> HfTokenizer:
        return self._tokenizer

    @property
    def exact(self) -> bool:
        """Whether the same request always gives the same bits."""
        import torch

        one_thread = self._device.type == "cpu" and torch.get_num_threads() == 1
        return one_thread and self._dtype == torch.float32

    def load(self, source: Snapshot | Path) -> str:
        """Switch weights; returns the fingerprint of what the model holds after it."""
        from rlfe.engines.weights import load_model

        if isinstance(source, Snapshot):
            self._take_over(source)
            self._policy_step = source.version
        else:
            folder = model_folder(source)
            self._model = None  # one model in memory at a time
            self._model = load_model(folder, self._dtype, self._device, self._lora)
            self._tokenizer = HfTokenizer(folder, thinking=self._thinking)
            self._policy_step = step_of(folder.name) or 0
        return self._fingerprint()

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        """Yield (request id, completions in order) as the requests finish."""
        from rlfe.engines.generation import Generation, Row, make_rows
        from rlfe.engines.packing import full_attention

        alone = self.exact or not full_attention(self._model)
        waiting: dict[str, int] = {request.id: request.sampling.n for request in requests}
        assert len(waiting) == len(requests), "request ids have to differ"
        rows: dict[str, list[Row]] = {request.id: [] for request in requests}
        for pack in packed(requests, self._sample_batch, alone=alone):
            made = [row for r, part in pack for row in make_rows(r, part, self.tokenizer)]
            for row in made:
                rows[row.request.id].append(row)
            for finished in Generation(self._model, self.tokenizer, made).run():
                for row in finished:
                    waiting[row.request.id] -= 1
                for name in dict.fromkeys(row.request.id for row in finished):
                    if waiting[name] == 0:
                        done = rows.pop(name)
                        yield name, [row.completion(self._policy_step) for row in done]

    def close(self) -> None:
        self._model = None

    def _take_over(self, snapshot: Snapshot) -> None:
        import torch

        held = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in snapshot.weights.items():
                if held[name].data_ptr() != tensor.data_ptr():  # else it is the learner's own
                    held[name].copy_(tensor)

    def _fingerprint(self) -> str:
        from rlfe.engines.fingerprint import fingerprint
        from rlfe.engines.weights import is_lora

        held = dict(self._model.named_parameters())
        if self._lora is not None:
            held = {name: tensor for name, tensor in held.items() if is_lora(name)}
        return fingerprint(held)


def packed(
    requests: Sequence[Request], size: int, *, alone: bool
) -> Iterator[list[tuple[Request, range]]]:
    """Batches of at most `size` rows: (request, its row numbers). `alone`: one request in each.

    Neighbours in prompt length share a batch (less padding), and only those whose temperature
    and truncation agree. A request of more than `size` rows is divided.
    """
    batch: list[tuple[Request, range]] = []
    room, kind = size, None
    for request in sorted(requests, key=lambda r: (_kind(r.sampling), len(r.prompt_ids))):
        for start in range(0, request.sampling.n, size):
            part = range(start, min(start + size, request.sampling.n))
            if batch and (alone or len(part) > room or kind != _kind(request.sampling)):
                yield batch
                batch, room = [], size
            batch.append((request, part))
            room, kind = room - len(part), _kind(request.sampling)
    if batch:
        yield batch


def _kind(sampling: Sampling) -> tuple[float, float, int, float]:
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
