"""The boundary to whatever samples and learns: two small protocols.

The training loop is written on the four primitives that a training service offers (sample,
forward-backward with a loss, optimiser step, snapshot). Everything algorithmic stays above this
line and is the same whatever runs below. Heavy libraries are imported inside the classes that
need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlfe.types import Batch, Completion, Prompt, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Weights of one version, as handed from a learner to a sampler.

    `weights` is opaque to the loop (a state dict, an adapter, a service's name); `fingerprint` is
    exact on any device (algorithms 8) and proves that the receiver holds these weights.
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
    tokenizer: Tokenizer

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


class Learner(Protocol):
    """Holds float32 master weights and the optimiser."""

    name: str

    def forward_backward(self, batch: Batch, loss: Any) -> Mapping[str, float]:
        """Accumulate gradients of one optimiser step (`loss`: rlfe.training.losses.LossSettings)."""
        ...

    def optim_step(self, lr: float) -> float:
        """Clip, step, zero the gradients. Returns the norm before clipping; skips if not finite."""
        ...

    def logprobs(self, batch: Batch) -> Any:
        """Per-token log-probabilities [B, L] float32 at the training temperature, no gradient."""
        ...

    def snapshot(self, version: int) -> Snapshot: ...
    def export(self, folder: Path) -> None:
        """Write a complete Hugging Face model directory into `folder` (which exists, empty)."""
        ...

    def save_state(self, folder: Path) -> None: ...
    def load_state(self, folder: Path) -> None: ...
    def close(self) -> None: ...
