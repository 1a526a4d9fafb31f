"""Learning at a server that speaks the Tinker API: LoRA weights and the optimiser are there.

What: the four primitives as requests. The optimiser step is submitted while the backward pass
still runs, so the server does not wait for this machine. Weights are known by name only: a
snapshot's identity is the history of what was sent (`_lineage`), and what that proves is said in
docs/tinker.md. Not here: the connection, how a loss becomes weights (`tinker_loss.py`), kept
checkpoints (`tinker_weights.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlfe.engines.base import LossFunction, Pass, Snapshot, Source
from rlfe.engines.tinker_loss import (
    ClientLoss,
    check_mean,
    check_sum,
    datums,
    lengths,
    no_custom_losses,
    placed,
)
from rlfe.engines.tinker_service import Service
from rlfe.engines.tinker_weights import export
from rlfe.engines.weights import Lora
from rlfe.errors import RequestError, RlfeError
from rlfe.types import Batch

STATE = "tinker.json"
KEPT_SECONDS = 30 * 24 * 3600  # how long the server is asked to keep snapshots and states
NORMS = ("grad_norm", "unclipped_grad_l2")  # how servers call the norm before clipping
MOVED_STEPS = 4  # after these, one more forward pass of the first batch
SCORING, BACKWARD, STEPPING = "scoring a batch", "computing gradients", "stepping the optimiser"


class TinkerLearner:
    """A learner whose weights lie on a server.

    Args:
        service: The session, shared with the sampler.
        path: Model folder or Hub id of the base model, for kept checkpoints.
        model: The same model as the server knows it.
        lora: rank and seed are the server's to apply; `train_attn`, `train_mlp` by targets.
        dtype: Of kept checkpoints.
        reduction: How the server reduces a loss: "sum" or "mean" (`tinker_loss.py`).
        stale: Whether older snapshots are sampled from (`lag.steps` > 0).
        adam: beta1, beta2, eps, weight_decay, grad_clip_norm.
    """

    name = "tinker"
    exact = False

    def __init__(
        self,
        service: Service,
        path: Path | str,
        *,
        model: str,
        lora: Lora,
        adam: Mapping[str, float],
        dtype: str = "bfloat16",
        device: str = "cpu",
        reduction: str = "sum",
        revision: str | None = None,
        stale: bool = False,
    ) -> None:
        self._stale, self._oldest = stale, ""
        self._service, self._path, self._model, self._lora = service, path, model, lora
        self._dtype, self._device, self._revision = dtype, device, revision
        self._adam, self._sums = dict(adam), reduction == "sum"
        self._training: Any = None  # made when first needed: a resumed run makes another one
        self._lineage = _digest(model, lora.rank, lora.alpha, lora.targets, lora.seed)
        self._pending: tuple[Any, ClientLoss] | None = None
        self._checked, self._saved = False, 0
        self._first: tuple[Batch, np.ndarray] | None = None  # and how it was scored
        self._steps = 0  # with a gradient, in this session
        self._scorers: dict[str, Any] = {}

    def forward_backward(self, batch: Batch, loss: LossFunction) -> Pass:
        self._finish_backward()
        rows, scored = datums(batch), ClientLoss(batch, loss)
        self._pending = (self._submitted(rows, scored), scored)
        if self._steps == 0:
            self._first = (batch, scored.logp_BL)
        if not self._checked:  # before the first optimiser step, not after it
            self._finish_backward(keep=True)
            self._checked = True
        return Pass(sums=scored.sums, logp_BL=scored.logp_BL, entropy_BL=None)

    def optim_step(self, lr: float) -> float | None:
        """The norm if the server tells it, else None; not finite: nothing was sent."""
        assert self._pending is not None, "optim_step follows forward_backward"
        scored = self._pending[1]
        if not scored.finite:  # its gradient went as zeros, so there is nothing to undo
            self._finish_backward()
            return math.nan
        from tinker import types

        step = self.training.optim_step(types.AdamParams(learning_rate=lr, **self._adam))
        self._finish_backward()
        metrics = self._service.wait(step, STEPPING).metrics or {}
        self._lineage = _digest(self._lineage, scored.digest(), lr, sorted(self._adam.items()))
        if lr > 0 and scored.scale > 0:
            self._steps += 1
            self._check_moved()
        norm = next((v for k, v in metrics.items() if any(n in k for n in NORMS)), None)
        if norm is not None and not math.isfinite(norm):
            raise RlfeError(
                f"the service stepped with a gradient norm of {norm}: its weights are spoilt",
                hint="Go on from the last saved state with --resume.",
            )
        return None if norm is None else float(norm)

    def gradient_norm(self, batch: Batch, loss: LossFunction) -> float:
        raise RequestError(
            'engine "tinker" cannot measure a gradient without applying it',
            hint="Set diagnostics.grad_every = 0.",
        )

    def entropies(self, batch: Batch) -> np.ndarray:
        raise RequestError(
            'engine "tinker" has no entropies: the API gives the log-probability of each token, '
            "not those of the whole vocabulary",
            hint="Choose another filter.metric.",
        )

    def logprobs(self, batch: Batch, source: Source = "current") -> np.ndarray:
        if source == "current":
            future = self.training.forward(datums(batch), "cross_entropy")
            found = self._service.wait(future, SCORING).loss_fn_outputs
            return placed([row["logprobs"].data for row in found], batch)
        from tinker import types

        place = source.weights if isinstance(source, Snapshot) else ""
        scorer = self._scorer(place)
        ends = zip(batch.ids_BL, lengths(batch), strict=True)
        waiting = {
            row: scorer.compute_logprobs(types.ModelInput.from_ints(ids_L[:length].tolist()))
            for row, (ids_L, length) in enumerate(ends)
        }
        scored = dict(self._service.finished(waiting, SCORING))
        return placed([scored[row] for row in range(len(scored))], batch)

    def snapshot(self, version: int) -> Snapshot:
        self._finish_backward()
        name = self._name(f"v{version:06d}")
        saving = self.training.save_weights_for_sampler(name, ttl_seconds=KEPT_SECONDS)
        path = self._service.wait(saving, f"saving version {version}").path
        self._oldest = self._oldest or path
        return Snapshot(version=version, fingerprint=self._lineage, weights=path)

    def export(self, folder: Path, sample: Batch | None = None) -> Mapping[str, float]:
        return export(
            self._service,
            self.training,
            self._name("export"),
            path=self._path,
            revision=self._revision,
            dtype=self._dtype,
            device=self._device,
            folder=folder,
            sample=sample,
        )

    def save_state(self, folder: Path) -> None:
        self._finish_backward()
        saving = self.training.save_state(self._name("state"), ttl_seconds=KEPT_SECONDS)
        path = self._service.wait(saving, "saving the state").path
        facts = {"path": path, "lineage": self._lineage}
        (folder / STATE).write_text(json.dumps(facts, sort_keys=True))

    def load_state(self, folder: Path) -> None:
        if not (folder / STATE).is_file():
            raise RlfeError(
                f"{folder} lacks {STATE}: it is no whole state",
                hint="Start the run again with --overwrite.",
            )
        facts, phase = json.loads((folder / STATE).read_text()), "loading the state"
        make = self._service.client.create_training_client_from_state_with_optimizer
        self._training = _made(self._service, lambda: make(facts["path"]), phase)
        self._lineage, self._pending, self._checked = facts["lineage"], None, False

    def save_snapshot(self, snapshot: Snapshot, path: Path) -> None:
        facts = {
            "version": snapshot.version,
            "fingerprint": snapshot.fingerprint,
            "path": snapshot.weights,
        }
        path.write_text(json.dumps(facts, sort_keys=True))

    def load_snapshot(self, path: Path) -> Snapshot:
        """The name of a snapshot; whether the server still has it shows when it is sampled from."""
        facts = json.loads(path.read_text())
        return Snapshot(
            version=facts["version"], fingerprint=facts["fingerprint"], weights=facts["path"]
        )

    def close(self) -> None:
        self._service.close()

    @property
    def training(self) -> Any:
        """The client of the model that is trained; the first call makes the model."""
        if self._training is None:
            attention, mlp = trained_parts(self._lora.targets)
            make = self._service.client.create_lora_training_client
            self._training = _made(
                self._service,
                lambda: make(
                    self._model,
                    rank=self._lora.rank,
                    seed=self._lora.seed % (1 << 31),
                    train_attn=attention,
                    train_mlp=mlp,
                    train_unembed=False,
                ),
                f"creating a LoRA model on {self._model}",
            )
        return self._training

    def _submitted(self, rows: list[Any], scored: ClientLoss) -> Any:
        """The backward pass under way; returns once the batch is scored and the loss is known."""
        service, training = self._service, self.training
        if self._sums:
            call = training.forward_backward_custom
            future = service.call(lambda: call(rows, scored), SCORING)
            while not scored.scored.wait(0.01):
                if future.future().done():
                    service.wait(future, SCORING)  # raises; a success has set `scored`
            return future
        found = service.wait(training.forward(rows, "cross_entropy"), SCORING).loss_fn_outputs
        logprobs = [torch.tensor(row["logprobs"].data).requires_grad_() for row in found]
        scored(rows, logprobs)
        return training.forward_backward(scored.averaged(), "importance_sampling")

    def _finish_backward(self, *, keep: bool = False) -> None:
        """Wait for the backward pass and check that the server did what was asked."""
        if self._pending is None:
            return
        future, scored = self._pending
        try:
            metrics = self._service.wait(future, BACKWARD).metrics
        except RlfeError as error:
            if isinstance(error.__cause__, KeyError):  # the client looks for the reported sum
                raise no_custom_losses("it reports no loss:sum") from error
            raise
        if self._sums:
            check_sum(metrics, scored)
        else:
            check_mean(metrics)
        if not keep:
            self._pending = None

    def _check_moved(self) -> None:
        """After some steps, once: they changed what the first batch's tokens are worth.

        The identity of a version is what was sent (module docstring), so a server that steps an
        optimiser without its weights would not show otherwise.
        """
        if self._steps != MOVED_STEPS or self._first is None:
            return
        batch, before_BL = self._first
        now_BL = self.logprobs(batch)
        moved = float(np.abs(now_BL - before_BL).max())
        if moved == 0:
            raise RlfeError(
                f"{MOVED_STEPS} optimiser steps at the service changed no log-probability",
                hint="It does not train: check its versions (docs/tinker.md).",
            )
        if self._stale and self._oldest:
            self._check_kept(batch, before_BL, now_BL, moved)

    def _check_kept(
        self, batch: Batch, before_BL: np.ndarray, now_BL: np.ndarray, moved: float
    ) -> None:
        """An older snapshot scores as it did, and scoring it leaves the trained weights alone.

        SkyRL's JAX backend has one slot for a model's trained and sampled weights.
        """
        scorer = Snapshot(version=0, fingerprint="", weights=self._oldest)
        then_BL, again_BL = self.logprobs(batch, scorer), self.logprobs(batch)
        kept = float(np.abs(then_BL - before_BL).max())
        disturbed = float(np.abs(again_BL - now_BL).max())
        if max(kept, disturbed) > moved / 2:
            raise RlfeError(
                f"the service does not keep {self._oldest}: after {MOVED_STEPS} steps, which moved "
                f"log-probabilities by {moved:.2g}, it scores {kept:.2g} from what it did, and the "
                f"trained weights moved by {disturbed:.2g} when it was asked",
                hint="Its samplers are not apart from its trainer: run it with lag.steps = 0.",
            )

    def _scorer(self, path: str) -> Any:
        """A sampling client that scores: of a snapshot, or of the base model ("")."""
        if path not in self._scorers:
            source = {"model_path": path} if path else {"base_model": self._model}
            self._scorers[path] = self._service.sampling_client(**source)
        return self._scorers[path]

    def _name(self, kind: str) -> str:
        """A name that this model has not had yet; a server refuses to write over one."""
        self._saved += 1
        return f"{kind}-{self._saved}"


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def trained_parts(targets: str | tuple[str, ...]) -> tuple[bool, bool]:
    """(attention, MLP) as the API divides a model.

    Raises:
        RequestError: Modules that it does not name that way.
    """
    if targets == "all-linear":
        return True, True
    names = {targets} if isinstance(targets, str) else set(targets)
    for attention, mlp in ((True, True), (True, False), (False, True)):
        if names == (ATTENTION if attention else set()) | (MLP if mlp else set()):
            return attention, mlp
    raise RequestError(
        f'lora.targets = {targets!r}: engine "tinker" trains attention, MLP, or both',
        hint="Use all-linear, all four of q_proj k_proj v_proj o_proj, or gate_proj up_proj "
        "down_proj.",
    )


def _made(service: Service, make: Any, phase: str) -> Any:
    """A client, or the future of one that newer clients give."""
    found = service.call(make, phase)
    return service.wait(found, phase) if hasattr(found, "result") else found


def _digest(*parts: object) -> str:
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()
