"""Engines without a model: for tests, for trying a task or a recipe, and for reading in a minute.

`FakeSampler` answers from a function of (request, row); `FakeLearner` counts calls, and its only
weight is that count. Both are deterministic and import no torch. What they write loads as a
folder, not as a model that says anything.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlfe.engines.base import Later, LossFunction, Pass, Snapshot, Source
from rlfe.errors import RlfeError
from rlfe.types import Batch, Completion, Finish, Prompt, Request

END = 0  # the end token; every other token id is a code point
Reply = Callable[[Request, int], str]


class FakeTokenizer:
    """One token per character."""

    stop_token_ids: tuple[int, ...] = (END,)
    vocabulary_size = 0x110000
    has_chat_template = True

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        text = "".join(f"{turn.role}: {turn.text}\n" for turn in prompt.messages) + prompt.text
        return tuple(ord(character) for character in text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != END)


def babble(request: Request, row: int) -> str:
    """Up to 24 letters that depend on the request's seed and the row."""
    source = random.Random(f"{request.sampling.seed}/{row}")
    return "".join(source.choices(string.ascii_lowercase, k=source.randrange(1, 25)))


class FakeSampler:
    """Replies from a function. `FakeSampler(lambda request, row: "#### 4")`"""

    name = "fake"
    exact = True

    def __init__(self, reply: Reply = babble) -> None:
        self.tokenizer = FakeTokenizer()
        self._reply, self._version = reply, 0

    def load(self, source: Snapshot | Path) -> str:
        if isinstance(source, Snapshot):
            self._version = source.version
            return _fingerprint(source.weights)
        return _fingerprint(str(source))

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        for request in requests:
            yield request.id, [self._completion(request, row) for row in range(request.sampling.n)]

    def close(self) -> None:
        pass

    def _completion(self, request: Request, row: int) -> Completion:
        text, limit = self._reply(request, row), request.sampling.max_tokens
        tokens = [*(ord(character) for character in text), END][:limit]
        finish = Finish.STOP if tokens[-1] == END else Finish.LENGTH
        return Completion(
            token_ids=tuple(tokens),
            logprobs=(-1.0,) * len(tokens),
            text=text[:limit],
            finish=finish,
            policy_step=self._version,
        )


class FakeLearner:
    """Counts optimiser steps; every log-probability is what the sampler said."""

    name = "fake"
    exact = True

    def __init__(self) -> None:
        self.updates = 0
        self.calls: list[str] = []

    def forward_backward(self, batch: Batch, loss: LossFunction) -> Pass:
        self.calls.append("forward_backward")
        nothing_BL = np.zeros(batch.ids_BL.shape, np.float32)
        sums = {f"loss/{part}": 0.0 for part in ("policy", "kl", "entropy", "replay", "total")}
        return Pass(sums=sums, logp_BL=batch.behavior_logp_BL.copy(), entropy_BL=nothing_BL)

    def optim_step(self, lr: float) -> float:
        self.calls.append("optim_step")
        self.updates += 1
        return 1.0

    def gradient_norm(self, batch: Batch, loss: LossFunction) -> float:
        return 1.0

    def logprobs(self, batch: Batch, source: Source = "current") -> np.ndarray:
        return batch.behavior_logp_BL.copy()

    def entropies(self, batch: Batch) -> np.ndarray:
        return np.zeros(batch.ids_BL.shape, np.float32)

    def snapshot(self, version: int) -> Snapshot:
        fingerprint = _fingerprint(self.updates)
        return Snapshot(version=version, fingerprint=fingerprint, weights=self.updates)

    def export(self, folder: Path, sample: Batch | None = None) -> Mapping[str, float]:
        (folder / "config.json").write_text(json.dumps({"model_type": "fake"}) + "\n")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}) + "\n")
        (folder / "tokenizer.json").write_text("{}\n")
        (folder / "tokenizer_config.json").write_text("{}\n")
        (folder / "model.safetensors").write_bytes(_one_tensor(float(self.updates)))
        return {}

    def export_later(self, sample: Batch | None = None) -> tuple[Later, Mapping[str, float]]:
        return self._as_it_is().export, {}

    def save_state(self, folder: Path) -> None:
        (folder / "fake.json").write_text(json.dumps({"updates": self.updates}))

    def save_state_later(self) -> Later:
        return self._as_it_is().save_state

    def _as_it_is(self) -> FakeLearner:
        still = FakeLearner()
        still.updates = self.updates
        return still

    def load_state(self, folder: Path) -> None:
        if not (folder / "fake.json").is_file():
            raise RlfeError(f"{folder} lacks fake.json: it is no whole state")
        self.updates = json.loads((folder / "fake.json").read_text())["updates"]

    def save_snapshot(self, snapshot: Snapshot, path: Path) -> None:
        path.write_text(json.dumps([snapshot.version, snapshot.weights]))

    def load_snapshot(self, path: Path) -> Snapshot:
        version, weights = json.loads(path.read_text())
        return Snapshot(version=version, fingerprint=_fingerprint(weights), weights=weights)

    def close(self) -> None:
        pass


def _fingerprint(weights: object) -> str:
    return hashlib.sha256(repr(weights).encode()).hexdigest()


def _one_tensor(value: float) -> bytes:
    """A safetensors file with one float32 number."""
    header = {"updates": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + struct.pack("<f", value)
