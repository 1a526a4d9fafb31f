"""The boundary to whatever samples and learns: two small protocols.

The training loop is written on the four primitives that a training service offers (sample,
forward-backward with a loss, optimiser step, snapshot). Everything algorithmic stays above this
line and is the same whatever runs below. Heavy libraries are imported inside the classes that
need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from rlfe.types import Batch, Completion, Prompt, Request

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights of one version, as handed from a learner to a sampler.

    `weights` is opaque to the loop (a state dict, an adapter, a service's name); `fingerprint` is
    exact on any device (algorithms 8) and proves that the receiver holds these weights. Of
    weights on a server it is the history that made them (docs/tinker.md).
    """

    version: int
    fingerprint: str
    weights: Any


class Tokenizer(Protocol):
    """Text to token ids and back, with at most one BOS."""

    stop_token_ids: tuple[int, ...]  # union of tokenizer, config and generation config, sorted
    vocabulary_size: int
    has_chat_template: bool

    def encode(self, prompt: Prompt) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Sampler(Protocol):
    """Samples completions with the behaviour policy's log-probabilities."""

    name: str

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def exact(self) -> bool:
        """A request's completions are the same bits whatever else is in the call."""
        ...

    def load(self, source: Snapshot | Path) -> str:
        """Switch to these weights (prefix cache reset); returns the fingerprint it now holds."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        """Yield (request id, its n completions) as they finish, in any order.

        Completions of a request depend on its prompt, sampling and seed and on the weights only,
        up to the engine's stated exactness; never on the other requests of the call.
        """
        ...

    def close(self) -> None: ...


class LossFunction(Protocol):
    """What an optimiser step minimises: the formulas stay above the engine boundary.

    Called once per micro-batch with some rows of the step's batch (cut to their own width); the
    values of all calls add up to the loss of the step.
    """

    entropy_gradient: bool  # whether the entropy needs a gradient (or is only logged)

    def needs_gradient(self, batch: Batch) -> np.ndarray:
        """Rows [B] whose log-probabilities get a gradient that is not surely zero, bool."""
        ...

    def __call__(self, rows: Batch, logp_BL: Any, entropy_BL: Any) -> tuple[Any, dict[str, Any]]:
        """Loss share with gradient, and shares of the logged sums. Arrays of the engine's kind.

        The shares are numbers, or single values that are still on their device.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a forward-backward pass saw, with the weights before the update.

    `sums` add up over micro-batches (`loss/policy` ...); logp_BL and entropy_BL are float32
    arrays in the shape of the batch, 0 outside the mask. entropy_BL is None where the engine
    sees no whole distribution.
    """

    sums: Mapping[str, float]
    logp_BL: np.ndarray
    entropy_BL: np.ndarray | None


Later = Callable[[Path], object]  # writes into a folder; may be called in another thread


@runtime_checkable
class Copying(Protocol):
    """A learner whose weights can be written while they move on: from copies on the host."""

    def export_later(self, sample: Batch | None = None) -> tuple[Later, Mapping[str, float]]:
        """What `export` would write and return now."""
        ...

    def save_state_later(self) -> Later:
        """What `save_state` would write now."""
        ...

    def save_snapshot(self, snapshot: Snapshot, path: Path) -> None:
        """As of every learner; here another thread may call it."""
        ...


Source = Snapshot | Literal["current", "reference"]


class Learner(Protocol):
    """Holds float32 master weights and the optimiser."""

    name: str

    @property
    def exact(self) -> bool:
        """Float32 on one CPU thread: the same call gives the same bits."""
        ...

    def forward_backward(self, batch: Batch, loss: LossFunction) -> Pass:
        """Accumulate the gradients of one optimiser step."""
        ...

    def optim_step(self, lr: float) -> float | None:
        """Clip, step, zero the gradients. Returns the norm before clipping; skips if not finite.

        None: the step was made and the engine does not tell the norm.
        """
        ...

    def gradient_norm(self, batch: Batch, loss: LossFunction) -> float:
        """Norm of a loss's gradient alone; accumulated gradients are left as they are."""
        ...

    def logprobs(self, batch: Batch, source: Source = "current") -> np.ndarray:
        """Per-token log-probabilities [B, L] float32 at the training temperature, no gradient.

        `source`: the current weights, the base model's ("reference"), or a stored snapshot's.
        """
        ...

    def entropies(self, batch: Batch) -> np.ndarray:
        """Entropy of every masked token's distribution [B, L] float32, no gradient."""
        ...

    def snapshot(self, version: int) -> Snapshot: ...

    def export(self, folder: Path, sample: Batch | None = None) -> Mapping[str, float]:
        """Write a complete Hugging Face model directory into `folder` (which exists, empty).

        Returns what the cast did to `sample` where weights were merged (`save/merge_delta`).
        """
        ...

    def save_state(self, folder: Path) -> None: ...
    def load_state(self, folder: Path) -> None: ...
    def save_snapshot(self, snapshot: Snapshot, path: Path) -> None: ...

    def load_snapshot(self, path: Path) -> Snapshot:
        """A snapshot as it was saved; RlfeError if its fingerprint is not the recorded one."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a learner computed: passes, their tokens, how many of these are padding, model FLOPs.

    `notes`: what a user should be told.
    """

    passes: int
    tokens: int
    padding: int
    flops: float
    notes: tuple[str, ...] = ()


@runtime_checkable
class Counting(Protocol):
    """A learner that counts what it computes; one on a server does not.

    `peak`: FLOP/s that its device can do, None where that is not known.
    """

    @property
    def peak(self) -> float | None: ...

    def work(self) -> Work:
        """What was computed since the last call."""
        ...
