"""Learning with transformers in one process: float32 master weights and AdamW.

What: log-probabilities of completion tokens (logits are computed at those positions only),
gradients in micro-batches, optimiser steps, snapshots, kept checkpoints and resumable state. Not
here: any formula of a loss (it comes as a `LossFunction`), which rows belong to a step. The model
stays in eval mode: nothing is dropped out. Rows are right-padded and attention is causal, so
padding changes no number and needs no mask.

Shapes: B rows, L tokens, M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rlfe.engines.base import Later, LossFunction, Pass, Snapshot, Source, Work
from rlfe.engines.compiled import compile_layers
from rlfe.engines.counting import Counter, peak_of
from rlfe.engines.fingerprint import fingerprint
from rlfe.engines.flops import flops_of
from rlfe.engines.logprobs import Logits, scored
from rlfe.engines.microbatches import (
    Budget,
    micro_batches,
    rows_of,
    token_budget,
    with_the_few,
)
from rlfe.engines.packing import can_share
from rlfe.engines.recompute import T, in_words, recompute_layers, within_memory
from rlfe.engines.shards import is_sharded, load_shards
from rlfe.engines.source import model_folder
from rlfe.engines.transfer import Copies, fetched, on_device
from rlfe.engines.weights import (
    Lora,
    adapter_copies,
    device_of,
    dtype_of,
    host_copies,
    load_model,
    merged_weights,
    save_adapter_tensors,
    save_model,
)
from rlfe.engines.whole_state import load_state, state_later
from rlfe.errors import RlfeError
from rlfe.types import Batch

WIDTH = 8  # of rows, or a multiple: one graph of compiled layers serves these, another the others
FINITE = "finite"  # among the sums of a pass: micro-batches with a finite loss


class TransformersLearner:
    """A learner that holds one model in this process.

    Args:
        path: Model folder or Hub id; also the reference of the KL term.
        dtype: Of kept checkpoints and, off the CPU, of the forward pass and of snapshots.
        temperature: Logits are divided by it, as when sampling.
        micro_batch: Rollouts per forward pass; None: as many as the token budget takes.
        tokens: The budget of a forward pass, padding included; None: the device's.
        logits: How log-probabilities are computed (`logprobs.scored`).
        checkpointing: Layers are computed again for the gradient instead of kept.
        compiles: torch.compile makes layers and the arithmetic of logits faster.
        peak: FLOP/s of the device; None: by its name, "measured": by a trial.
        betas, eps, weight_decay: AdamW. grad_clip: gradient norm; 0: off.
        lora: LoRA layers; None: full fine-tuning.
        share: Snapshots refer to the live weights (a sampler of this process shares the model).
    """

    name = "transformers"

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        threads: int = 0,
        temperature: float = 1.0,
        micro_batch: int | None = None,
        tokens: int | None = None,
        logits: Logits = "chunked",
        checkpointing: bool = False,
        compiles: bool = False,
        peak: float | Literal["measured"] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        lora: Lora | None = None,
        revision: str | None = None,
        share: bool = False,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._name, self._folder = str(path), model_folder(path, revision)
        self._device, self._dtype = device_of(device), dtype_of(dtype)
        self._temperature, self._share, self._compiles = temperature, share, compiles
        self._logits: Logits = "compiled" if compiles and logits == "chunked" else logits
        self._budget = Budget(micro_batch, tokens or token_budget(self._device.type))
        self._lora, self._grad_clip, self._finite = lora, grad_clip, True
        self.model = self._loaded(torch.float32, lora)
        self._trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._trained.values()),
            lr=0.0,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=self._device.type in ("cpu", "cuda"),
        )
        self._packs = can_share(self.model, self._device.type)
        self._work, self._peak = Counter(flops_of(self.model)), peak_of(self._device, peak)
        if compiles:
            compile_layers(self.model)
        if checkpointing:
            recompute_layers(self.model)
        self._reference: Any = None
        self._copies = Copies(self._device)

    @property
    def exact(self) -> bool:
        return self._device.type == "cpu" and torch.get_num_threads() == 1

    @property
    def _snapshot_dtype(self) -> torch.dtype:
        """What the sampler computes in: float32 on a CPU, whatever is stored."""
        return torch.float32 if self._device.type == "cpu" else self._dtype

    def forward_backward(self, batch: Batch, loss: LossFunction) -> Pass:
        before = self._taken_gradients()

        def run() -> Pass:
            self._taken_gradients()  # of a first try that memory did not do for
            return self._graded_pass(batch, loss)

        try:
            seen = self._within_memory(run)
        except BaseException:
            self._taken_gradients()
            raise
        finally:
            self._add_gradients(before)
        return seen

    def _graded_pass(self, batch: Batch, loss: LossFunction) -> Pass:
        """Every micro-batch forward and backward; nothing waits for the device before the end."""
        logp_BL = torch.zeros(batch.ids_BL.shape, device=self._device)
        entropy_BL, found = torch.zeros_like(logp_BL), []
        graded_B = loss.needs_gradient(batch)
        if self._compiles:
            graded_B = with_the_few(batch, graded_B, self._budget)
        for rows in self._micro_batches(batch, graded_B):
            part, place = rows_of(batch, rows), on_device(rows, self._device)
            width, graded = part.ids_BL.shape[1], bool(graded_B[rows].any())
            with torch.set_grad_enabled(graded), self._autocast():
                logp, entropy = self._scored(self.model, part, loss.entropy_gradient)
            value, shares = loss(part, logp, entropy)
            if value.requires_grad:
                value.backward()
            found.append(shares | {FINITE: torch.isfinite(value.detach())})
            logp_BL[place, :width], entropy_BL[place, :width] = logp.detach(), entropy.detach()
            self._work.add(part, graded=graded, share=self._packs)
        sums, arrays = _summed(found, logp_BL, entropy_BL)
        self._finite = self._finite and sums.pop(FINITE, 0.0) == len(found)
        return Pass(sums=sums, logp_BL=arrays[0], entropy_BL=arrays[1])

    def _taken_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that have come together so far, which are taken off the weights."""
        taken = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        for parameter in self._trained.values():
            parameter.grad = None
        return taken

    def _add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            own = self._trained[name].grad
            self._trained[name].grad = gradient if own is None else own.add_(gradient)

    @property
    def peak(self) -> float | None:
        """FLOP/s that the device can do, None where that is not known."""
        return self._peak

    def work(self) -> Work:
        """What the passes since the last call computed."""
        return self._work.taken()

    def optim_step(self, lr: float) -> float:
        for parameter in self._trained.values():
            if parameter.grad is None:  # no row asked for a gradient: it is zero, not absent
                parameter.grad = torch.zeros_like(parameter)
        limit = self._grad_clip or float("inf")
        found = self._norm([p.grad for p in self._trained.values() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(self._trained.values(), limit, found)
        norm = found.item()
        if not self._finite:
            norm = float("nan")
        if np.isfinite(norm):
            self._copies.settle()  # what is being kept is as it was before this step
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            with in_words("the optimiser step"):
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._finite = True
        return norm

    def gradient_norm(self, batch: Batch, loss: LossFunction) -> float:
        kept = self._taken_gradients()
        self.forward_backward(batch, loss)
        grads = list(self._taken_gradients().values())
        norm = self._norm(grads).item() if grads else 0.0
        self._add_gradients(kept)
        return norm

    def logprobs(self, batch: Batch, source: Source = "current") -> np.ndarray:
        return self._measured(batch, source, entropy=False)

    def entropies(self, batch: Batch) -> np.ndarray:
        return self._measured(batch, "current", entropy=True)

    def _measured(self, batch: Batch, source: Source, *, entropy: bool) -> np.ndarray:
        def run() -> np.ndarray:
            return self._ungraded_pass(batch, source, entropy=entropy)

        return self._within_memory(run)

    def _ungraded_pass(self, batch: Batch, source: Source, *, entropy: bool) -> np.ndarray:
        value_BL = torch.zeros(batch.ids_BL.shape, device=self._device)
        nothing_B = np.zeros(len(batch.ids_BL), bool)
        kind = False if entropy else None
        with torch.no_grad(), self._weights(source) as model:
            for rows in self._micro_batches(batch, nothing_B):
                part, place = rows_of(batch, rows), on_device(rows, self._device)
                with self._autocast():
                    found = self._scored(model, part, kind)[1 if entropy else 0]
                value_BL[place, : part.ids_BL.shape[1]] = found
                self._work.add(part, graded=False, share=self._packs)
            return fetched([value_BL])[0]

    def snapshot(self, version: int) -> Snapshot:
        weights = {
            name: p.detach() if self._share else p.detach().to(self._snapshot_dtype, copy=True)
            for name, p in self._trained.items()
        }
        return Snapshot(version=version, fingerprint=fingerprint(weights), weights=weights)

    def export(self, folder: Path, sample: Batch | None = None) -> Mapping[str, float]:
        write, facts = self.export_later(sample)
        write(folder)
        return facts

    def export_later(self, sample: Batch | None = None) -> tuple[Later, Mapping[str, float]]:
        model, dtype, base, lora = self.model, self._dtype, self._folder, self._lora
        if lora is None:
            whole = model.state_dict()
            copies = self._copies.later(lambda: host_copies(whole, dtype))
            return lambda folder: save_model(model, copies.result(), dtype, base, folder), {}
        merged = merged_weights(model)
        state, adapter, name = host_copies(merged, dtype), adapter_copies(model), self._name

        def write(folder: Path) -> None:
            save_model(model, state, dtype, base, folder)
            save_adapter_tensors(adapter, model, lora, name, folder / "adapter")

        delta = {} if sample is None else {"save/merge_delta": self._merge_delta(merged, sample)}
        return write, delta

    def save_state(self, folder: Path) -> None:
        self.save_state_later()(folder)

    def save_state_later(self) -> Later:
        return state_later(self._trained, self._optimizer, self._copies)

    def load_state(self, folder: Path) -> None:
        self._copies.settle()
        if is_sharded(folder):
            load_shards(folder, self._trained, self._optimizer, self._group)
        else:
            load_state(
                folder,
                self._trained,
                self._optimizer,
                part=self._part,
                step_device=self._step_device,
            )

    def save_snapshot(self, snapshot: Snapshot, path: Path) -> None:
        from safetensors.torch import save_file

        facts = {"version": str(snapshot.version), "fingerprint": snapshot.fingerprint}
        weights = {name: tensor.contiguous() for name, tensor in snapshot.weights.items()}
        save_file(weights, str(path), metadata=facts)

    def load_snapshot(self, path: Path) -> Snapshot:
        from safetensors import safe_open

        with safe_open(str(path), framework="pt", device=str(self._device)) as file:
            facts = file.metadata()
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if fingerprint(weights) != facts["fingerprint"]:
            raise RlfeError(
                f"{path} is not the snapshot that was saved: its fingerprint differs",
                hint="The state is damaged; start the run again with --overwrite.",
            )
        version = int(facts["version"])
        return Snapshot(version=version, fingerprint=facts["fingerprint"], weights=weights)

    def close(self) -> None:
        self._copies.settle()
        self.model = self._reference = None

    # what differs where several ranks hold the weights (`sharded.py`)

    def _within_memory(self, run: Callable[[], T]) -> T:
        """`run()`, in smaller passes if memory runs out; no rank of several can do that alone."""
        return within_memory(run, self._budget, self._work.note)

    _group: Any = None  # ranks that a state in shards is read by

    def _loaded(self, dtype: torch.dtype, lora: Lora | None) -> Any:
        return load_model(self._folder, dtype, self._device, lora)

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        norm: torch.Tensor = torch.nn.utils.get_total_norm(gradients)
        return norm

    def _part(self, whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that this process holds of `held`."""
        return whole

    @property
    def _step_device(self) -> torch.device:
        """A fused optimiser keeps its step count on a CUDA device, others on the CPU."""
        return self._device if self._device.type == "cuda" else torch.device("cpu")

    def _micro_batches(self, batch: Batch, graded_B: np.ndarray) -> Iterator[np.ndarray]:
        return micro_batches(batch, graded_B, self._budget, share=self._packs)

    def _scored(
        self, model: Any, part: Batch, entropy_gradient: bool | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return scored(
            model,
            part,
            self._temperature,
            entropy_gradient,
            share=self._packs,
            logits=self._logits,
            multiple=WIDTH if self._compiles else 1,
        )

    def _autocast(self) -> Any:
        if self._device.type == "cpu" or self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    @contextmanager
    def _weights(self, source: Source) -> Iterator[Any]:
        """A callable model with the weights of `source`."""
        if source == "current":
            yield self.model
        elif isinstance(source, Snapshot):
            with self._swapped(source.weights):
                yield self.model
        elif self._lora is not None:
            nothing = {n: torch.zeros_like(p) for n, p in self._trained.items() if ".lora_B." in n}
            with self._swapped(nothing):
                yield self.model
        else:
            if self._reference is None:
                kind = torch.float32 if self._device.type == "cpu" else self._dtype
                self._reference = self._loaded(kind, None)
                if self._compiles:
                    compile_layers(self._reference)
            yield self._reference

    @contextmanager
    def _swapped(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Other weights in the live model for a while; the own ones come back bit for bit."""
        parameters = dict(self.model.named_parameters())
        own = {name: parameters[name].data for name in weights}
        try:
            for name, tensor in weights.items():
                parameters[name].data = tensor.to(own[name].dtype)
            yield
        finally:
            for name, tensor in own.items():
                parameters[name].data = tensor

    def _merge_delta(self, merged: Mapping[str, torch.Tensor], sample: Batch) -> float:
        """Largest change of a log-probability of `sample` by merging and casting."""
        before = self.logprobs(sample)
        parameters = dict(self.model.named_parameters())
        cast = {name: torch.zeros_like(p) for name, p in parameters.items() if ".lora_B." in name}
        for name, parameter in parameters.items():
            if ".base_layer." in name:
                plain = merged[name.replace(".base_layer.", ".")]
                cast[name] = plain.to(self._dtype).to(parameter.dtype)
        with self._swapped(cast):
            after = self.logprobs(sample)
        return float(np.abs(after - before)[sample.mask_BL].max(initial=0.0))


def _summed(
    shares: Sequence[Mapping[str, Any]], *tensors: torch.Tensor
) -> tuple[dict[str, float], list[np.ndarray]]:
    """The logged shares summed in order, and the tensors as arrays, after one wait for all."""
    waiting = [v for each in shares for v in each.values() if isinstance(v, torch.Tensor)]
    vector = torch.stack([v.detach().float() for v in waiting]) if waiting else torch.zeros(0)
    values, *arrays = fetched([vector, *tensors])
    there = iter(values.tolist())
    sums: dict[str, float] = {}
    for each in shares:
        for name, value in each.items():
            number = next(there) if isinstance(value, torch.Tensor) else value
            sums[name] = sums.get(name, 0.0) + number
    return sums, arrays
