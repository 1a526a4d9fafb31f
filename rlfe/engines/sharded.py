"""Learning over several ranks: each holds a share of the weights, of the optimiser and of the rows.

What: FSDP2 (`fully_shard`) around the model of `learner.py`; who computes which rows; sums over the
ranks, so that loss, gradient and update are those of one process, whatever the number of ranks;
whole weights for samplers and checkpoints; a state in shards (torch.distributed.checkpoint) that
any number of ranks can read. Not here: what a pass computes, how ranks meet (`ranks.py`).

Every rank is given the whole batch and computes its part. FSDP2 gathers a layer's weights on all
ranks at once, so every rank makes the same number of passes; one that has no row left repeats a
short one and counts it nowhere. FSDP2 averages gradients over ranks unless told otherwise; here
they are summed, for the denominators of the loss are those of the whole batch.

Shapes: B rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlfe.engines.base import LossFunction, Pass, Snapshot, Source
from rlfe.engines.fingerprint import fingerprint
from rlfe.engines.learner import TransformersLearner
from rlfe.engines.microbatches import lengths, rows_of
from rlfe.engines.ranks import TorchRanks
from rlfe.engines.recompute import T, in_words
from rlfe.engines.shards import save_shards
from rlfe.engines.weights import Lora, load_model, merged_weights, save_adapter, save_model
from rlfe.types import Batch

FILLER = -2  # group of a row that is computed and counts nowhere
FILLERS = 2  # rows behind the batch: one for passes with a gradient, one for those without


class ShardedLearner(TransformersLearner):
    """A learner that is one rank of several; the ranks make the same calls with the same values.

    Args:
        ranks: Who takes part; they have joined.
        settings: As `TransformersLearner`; `device` is this rank's.
    """

    def __init__(self, path: Path | str, *, ranks: TorchRanks, **settings: Any) -> None:
        self._ranks, self._group = ranks, ranks.group
        self._passes: dict[int, Any] = {}  # the outermost module of each model, by its id
        super().__init__(path, **settings)
        self._packs = False  # a packed pass calls the model once per prompt: ranks would differ

    # passes

    def forward_backward(self, batch: Batch, loss: LossFunction) -> Pass:
        whole, count = with_fillers(batch), len(batch.ids_BL)
        with self._ranks.waiting():
            seen = super().forward_backward(whole, _Filled(loss))
        assert seen.entropy_BL is not None
        found = self._ranks.gather((dict(seen.sums), self._finite))
        self._finite = all(finite for _, finite in found)
        names = dict.fromkeys(name for sums, _ in found for name in sums)
        arrays = self._ranks.added(seen.logp_BL[:count], seen.entropy_BL[:count])
        return Pass(
            sums={name: sum(sums.get(name, 0.0) for sums, _ in found) for name in names},
            logp_BL=arrays[0],
            entropy_BL=arrays[1],
        )

    def _measured(self, batch: Batch, source: Source, *, entropy: bool) -> np.ndarray:
        with self._ranks.waiting():
            value_BL = super()._measured(with_fillers(batch), source, entropy=entropy)
        return self._ranks.added(value_BL[: len(batch.ids_BL)])[0]

    def _micro_batches(self, batch: Batch, graded_B: np.ndarray) -> Iterator[np.ndarray]:
        """This rank's passes over a batch with fillers: as many of each kind as any rank has."""
        count = len(batch.ids_BL) - FILLERS
        length_B = lengths(batch.mask_BL[:count])
        shares = rows_by_rank(length_B, graded_B[:count], ranks=self._ranks.size)
        plans = [list(self._plan(batch, graded_B, rows)) for rows in shares]
        for filler, graded in ((count, True), (count + 1, False)):
            kind = [[rows for rows in plan if graded_B[rows[0]] == graded] for plan in plans]
            mine = kind[self._ranks.rank]
            yield from mine
            for _ in range(max(map(len, kind)) - len(mine)):
                # twice where layers are compiled: a pass of one row would need another graph
                yield np.array([filler] * (2 if self._compiles else 1))

    def _plan(self, batch: Batch, graded_B: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
        if rows.size:
            for part in super()._micro_batches(rows_of(batch, rows), graded_B[rows]):
                yield rows[part]

    def _scored(
        self, model: Any, part: Batch, entropy_gradient: bool | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        root = self._passes[id(model)]
        found: tuple[torch.Tensor, torch.Tensor] = root(super()._scored, part, entropy_gradient)
        if not torch.is_grad_enabled():
            root.reshard()  # else the next pass could still see these weights after an update
        return found

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return _full(super()._norm(gradients))

    def _within_memory(self, run: Callable[[], T]) -> T:
        """Once only: the others would not repeat the pass, and FSDP2 needs them in each."""
        with in_words("a pass of one of several ranks"):
            return run()

    # weights

    def _loaded(self, dtype: torch.dtype, lora: Lora | None) -> Any:
        """The model in shards; it is read into the CPU's memory and moved layer by layer."""
        model = load_model(self._folder, dtype, torch.device("cpu"), lora)
        mesh = init_device_mesh(self._device.type, (self._ranks.size,))
        lower = self._device.type != "cpu" and self._dtype != torch.float32
        # The residual stream stays float32, as in one process: inputs are not cast.
        policy = MixedPrecisionPolicy(
            param_dtype=self._dtype if lower else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for block in blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        root = _Whole(model)
        fully_shard(
            root,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        )
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._passes[id(model)] = root
        return model

    def snapshot(self, version: int) -> Snapshot:
        with self._ranks.waiting() as beat:
            weights = {}
            for name, parameter in self._trained.items():
                weights[name] = _full(parameter.detach().to(self._snapshot_dtype, copy=True))
                beat()
        return Snapshot(version=version, fingerprint=fingerprint(weights), weights=weights)

    def export(self, folder: Path, sample: Batch | None = None) -> Mapping[str, float]:
        """Every rank takes part; the first writes."""
        if self._lora is None:
            state = self._gathered()
            if self._ranks.first:
                save_model(self.model, state, self._dtype, self._folder, folder)
            return {}
        twin = self._twin(self._lora)
        merged = merged_weights(twin)
        if self._ranks.first:
            save_model(twin, merged, self._dtype, self._folder, folder)
            save_adapter(twin, self._lora, self._name, folder / "adapter")
        return {} if sample is None else {"save/merge_delta": self._merge_delta(merged, sample)}

    def _gathered(self) -> dict[str, torch.Tensor]:
        """The model's state as it is kept, in the first rank's CPU memory; elsewhere nothing."""
        whole: dict[int, torch.Tensor] = {}
        state = {}
        with self._ranks.waiting() as beat:
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                if id(tensor) not in whole:  # tied weights are one tensor
                    kind = self._dtype if tensor.is_floating_point() else tensor.dtype
                    found = _full(tensor.detach().to(kind))
                    whole[id(tensor)] = found.cpu() if self._ranks.first else found.new_empty(0)
                    beat()
                state[name] = whole[id(tensor)]
        return state if self._ranks.first else {}

    def _twin(self, lora: Lora) -> Any:
        """The whole model with these LoRA layers, on the CPU."""
        twin = load_model(self._folder, torch.float32, torch.device("cpu"), lora)
        held = dict(twin.named_parameters())
        with torch.no_grad(), self._ranks.waiting() as beat:
            for name, parameter in self._trained.items():
                held[name].copy_(_full(parameter.detach()))
                beat()
        return twin

    @contextmanager
    def _swapped(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Other weights in the live shards for a while; the own ones come back bit for bit."""
        parameters = dict(self.model.named_parameters())
        own = {name: parameters[name].detach().clone() for name in weights}

        def put(tensors: Mapping[str, torch.Tensor]) -> None:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    parameters[name].copy_(cut(tensor, parameters[name]))

        try:
            put(weights)
            yield
        finally:
            put(own)

    # state

    def save_state(self, folder: Path) -> None:
        with self._ranks.waiting():
            save_shards(folder, self._trained, self._optimizer, self._group)

    def load_state(self, folder: Path) -> None:
        with self._ranks.waiting():
            super().load_state(folder)

    def save_snapshot(self, snapshot: Snapshot, path: Path) -> None:
        if self._ranks.first:
            super().save_snapshot(snapshot, path)

    def _part(self, whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        return cut(whole, held)

    def close(self) -> None:
        super().close()
        self._passes.clear()


class _Whole(torch.nn.Module):
    """The outermost module of FSDP2: all that a pass computes, the output head's part too.

    `head.measured` and what architectures do behind their heads then see whole weights.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Any, *arguments: Any) -> Any:
        return work(self.model, *arguments)


class _Filled:
    """A loss to which fillers add nothing but their place in the backward pass."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss, self.entropy_gradient = loss, loss.entropy_gradient

    def needs_gradient(self, batch: Batch) -> np.ndarray:
        rows = np.arange(len(batch.ids_BL) - FILLERS)
        own_B = self._loss.needs_gradient(_picked(batch, rows))
        return np.concatenate([own_B, [True, False]])

    def __call__(self, rows: Batch, logp_BL: Any, entropy_BL: Any) -> tuple[Any, dict[str, Any]]:
        if (rows.group_B == FILLER).all():
            return (logp_BL + entropy_BL).sum() * 0.0, {}
        return self._loss(rows, logp_BL, entropy_BL)


def with_fillers(batch: Batch) -> Batch:
    """The batch and, behind it, copies of its shortest row that are in no group."""
    length_B = lengths(batch.mask_BL)
    there = np.flatnonzero(length_B)
    shortest = there[np.argmin(length_B[there])] if there.size else 0
    rows = np.concatenate([np.arange(len(length_B)), [shortest] * FILLERS])
    filled = _picked(batch, rows)
    filled.group_B[-FILLERS:] = FILLER
    return filled


def _picked(batch: Batch, rows: np.ndarray) -> Batch:
    arrays = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    found: dict[str, Any] = {name: a if a is None else a[rows] for name, a in arrays}
    return Batch(**found)


def rows_by_rank(length_B: np.ndarray, graded_B: np.ndarray, *, ranks: int) -> list[np.ndarray]:
    """Rows of each rank, ascending: the longest first, each to whom has the fewest tokens.

    Rows with a gradient and rows without are divided apart, for they cost differently. Rows of
    length 0 go to nobody: there is nothing to compute.
    """
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for graded in (True, False):
        load = [0] * ranks
        rows = np.flatnonzero((graded_B == graded) & (length_B > 0))
        for row in rows[np.argsort(-length_B[rows], kind="stable")].tolist():
            rank = load.index(min(load))
            mine[rank].append(row)
            load[rank] += int(length_B[row])
    return [np.array(sorted(rows), np.int64) for rows in mine]


def blocks(model: Any) -> list[Any]:
    """The layers whose weights are gathered together: what transformers never splits."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def cut(whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """A whole tensor in the shards of `held`; every rank has the whole, nothing is sent."""
    if not isinstance(held, DTensor) or isinstance(whole, DTensor):
        return whole
    here = whole.to(device=held.device, dtype=held.dtype)
    return distribute_tensor(here, held.device_mesh, held.placements, src_data_rank=None)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole
