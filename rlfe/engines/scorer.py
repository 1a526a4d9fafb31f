"""Log-probabilities of given text under the weights of a folder: teacher-forced, no gradient.

For measures that compare two models on the same tokens (`rlfe.eval.kl`). It runs on transformers,
whatever samples: one forward pass over prompt and reply gives what `log pi(y)` needs. Temperature
1 and the whole vocabulary, so it is the model's own distribution. Not here: learning.
Try it: `TransformersScorer("model").logprobs((1, 15), [(9, 2)])`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlfe.errors import RequestError
from rlfe.schema import Engine
from rlfe.types import Batch


class Scorer(Protocol):
    """Scores given tokens."""

    def load(self, path: Path) -> None:
        """Take the weights of a model folder."""
        ...

    def logprobs(
        self, prompt_ids: Sequence[int], replies: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """log pi(token) of every token of each reply to one prompt, float64 [L] each."""
        ...

    def close(self) -> None: ...


class TransformersScorer:
    """Holds one model of this process.

    Args:
        path: Model folder.
        dtype: What it computes in; None: float32 on a CPU, bfloat16 elsewhere.
        device: `auto`, `cpu`, `cuda`, `mps`.
        threads: CPU threads of torch; 0: the library's default.
    """

    def __init__(
        self, path: Path, *, dtype: str | None = None, device: str = "auto", threads: int = 0
    ) -> None:
        import torch

        from rlfe.engines.weights import device_of, dtype_of

        if threads:
            torch.set_num_threads(threads)
        self._device = device_of(device)
        self._dtype = dtype_of(dtype or ("float32" if self._device.type == "cpu" else "bfloat16"))
        self._model: Any = None
        self.load(path)

    def load(self, path: Path) -> None:
        from rlfe.engines.weights import load_model

        self._model = None  # one model in memory at a time
        self._model = load_model(path, self._dtype, self._device, None)

    def logprobs(
        self, prompt_ids: Sequence[int], replies: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Replies are scored in order, so many at a time as the device's token budget takes.

        The division depends on these replies alone: on the exact engine (CPU, float32, one
        thread) the same call gives the same bits.
        """
        import torch

        from rlfe.engines.logprobs import scored
        from rlfe.engines.microbatches import token_budget

        found: list[np.ndarray] = []
        for part in parts(len(prompt_ids), replies, token_budget(self._device.type)):
            batch = rows(prompt_ids, part)
            with torch.no_grad():
                logp_BL = scored(self._model, batch, 1.0, None)[0].double().cpu().numpy()
            start = len(prompt_ids)
            found += [logp_BL[b, start : start + len(reply)] for b, reply in enumerate(part)]
        return found

    def close(self) -> None:
        self._model = None


class FakeScorer:
    """Every token has one log-probability, which depends on the folder's name alone."""

    def __init__(self, path: Path) -> None:
        self.load(path)

    def load(self, path: Path) -> None:
        self._value = -1.0 - hashlib.sha256(path.name.encode()).digest()[0] / 1024

    def logprobs(
        self, prompt_ids: Sequence[int], replies: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        return [np.full(len(reply), self._value) for reply in replies]

    def close(self) -> None:
        pass


def parts(
    prompt: int, replies: Sequence[Sequence[int]], budget: int
) -> Iterator[list[Sequence[int]]]:
    """Runs of replies whose padded rows hold at most `budget` tokens, at least one each."""
    part: list[Sequence[int]] = []
    for reply in replies:
        longest = max(len(one) for one in [*part, reply])
        if part and (len(part) + 1) * (prompt + longest) > budget:
            yield part
            part = []
        part.append(reply)
    if part:
        yield part


def rows(prompt_ids: Sequence[int], replies: Sequence[Sequence[int]]) -> Batch:
    """Prompt and reply in a row each, right-padded, the reply's tokens masked to be scored."""
    start, longest = len(prompt_ids), max(len(reply) for reply in replies)
    ids_BL = np.zeros((len(replies), start + longest), np.int64)
    mask_BL = np.zeros(ids_BL.shape, bool)
    for b, reply in enumerate(replies):
        ids_BL[b, :start] = prompt_ids
        ids_BL[b, start : start + len(reply)] = reply
        mask_BL[b, start : start + len(reply)] = True
    nothing_B = np.zeros(len(replies))
    return Batch(
        ids_BL=ids_BL,
        mask_BL=mask_BL,
        behavior_logp_BL=np.zeros(ids_BL.shape, np.float32),
        advantage_B=nothing_B,
        weight_B=nothing_B,
        successes_B=np.zeros(len(replies), np.int64),
        group_B=np.zeros(len(replies), np.int64),
        source_B=np.zeros(len(replies), np.int8),
    )


def make_scorer(engine: Engine, path: Path, *, dtype: str | None = None) -> Scorer:
    """A scorer for what `engine` samples with: fake for the fake engine, else transformers.

    Raises:
        RequestError: torch or transformers is not installed.
    """
    maker = SCORERS.get(engine.sampler, _transformers_scorer)
    try:
        return maker(engine, path, dtype)
    except ModuleNotFoundError as error:
        raise RequestError(
            f"scoring given text needs {error.name}, which is not installed",
            hint="pip install 'rlfe[train]'",
        ) from error


def _transformers_scorer(engine: Engine, path: Path, dtype: str | None) -> Scorer:
    return TransformersScorer(path, dtype=dtype, device=engine.device, threads=engine.threads)


SCORERS: dict[str, Callable[[Engine, Path, str | None], Scorer]] = {
    "fake": lambda engine, path, dtype: FakeScorer(path),
}
