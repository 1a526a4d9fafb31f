"""The sampling loop over transformers forward passes: one prompt pass, then a token per row.

What: a request's prompt is computed once and shared by its rows; rows end at end tokens, stop
strings or the token limit; finished rows leave the batch. Not here: which requests share a batch
(`transformers.py`) and how a token is drawn (`drawing.py`). Rows of several prompts are
left-padded and masked; a batch of one request has no padding and no mask, so its bits depend on
the request alone.

Shapes: R rows of the batch, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlfe.engines.drawing import draw, uniforms
from rlfe.engines.kvcache import empty_cache, joined_cache, keep_rows
from rlfe.engines.packing import full_attention
from rlfe.types import Completion, Finish, Request

KEEP_SHARE = 0.8  # rows are compacted when at most this share is still running
WINDOW_SLACK = 8  # tokens beyond the longest stop string that are decoded to look for one


@dataclass(slots=True, eq=False)
class Row:
    """One completion in the making."""

    request: Request
    index: int
    uniform: np.ndarray
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    text: str = ""

    def completion(self, policy_step: int) -> Completion:
        assert self.finish is not None
        return Completion(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            text=self.text,
            finish=self.finish,
            policy_step=policy_step,
        )


def make_rows(request: Request, indices: Sequence[int], tokenizer: Any) -> list[Row]:
    """The rows of a request with these numbers; a row's draws depend on (seed, number) only."""
    sampling = request.sampling
    uniform = uniforms(sampling)
    special = {tokenizer.token_of(text) for text in sampling.stop} - {None}
    ends = frozenset({*sampling.stop_token_ids, *tokenizer.stop_token_ids, *special})
    return [Row(request, index, uniform[index], ends) for index in indices]


class Generation:
    """Rows sampled together.

    Args:
        model: A transformers causal LM in eval mode.
        tokenizer: For stop strings and texts (`HfTokenizer`).
        rows: Rows, those of one request beside each other; one temperature and truncation for all.
    """

    def __init__(self, model: Any, tokenizer: Any, rows: Sequence[Row]) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._device = next(model.parameters()).device
        self._cache_name, self._plain = cache_argument(model), not full_attention(model)
        self._sampling = rows[0].request.sampling
        self._rows = list(rows)

    def run(self) -> Iterator[list[Row]]:
        """Yield the rows that finished, token by token, until none is left."""
        logits_RV = self._start()
        while True:
            token_R, finished = self._take(logits_RV)
            if finished:
                yield finished
            if all(row.finish is not None for row in self._rows):
                return
            logits_RV = self._step(self._compacted(token_R))

    @torch.inference_mode()
    def _start(self) -> torch.Tensor:
        """Logits [R, V] after the prompts; fills cache, mask and positions."""
        counts: dict[str, int] = {}
        for row in self._rows:
            counts[row.request.id] = counts.get(row.request.id, 0) + 1
        requests = list({row.request.id: row.request for row in self._rows}.values())
        copies = [counts[request.id] for request in requests]
        passes = [self._prompt(request) for request in requests]
        self._cache = self._repeated([cache for _, cache in passes], copies)
        lengths = [len(row.request.prompt_ids) for row in self._rows]
        self._position_R = torch.tensor(lengths, device=self._device)
        width = max(lengths)
        places = torch.arange(width, device=self._device)
        mask = (places[None] >= width - self._position_R[:, None]).long()
        self._mask = None if bool(mask.all()) else mask
        repeated = [logits.expand(n, -1) for (logits, _), n in zip(passes, copies, strict=True)]
        return torch.cat(repeated)

    def _repeated(self, caches: Sequence[Any], copies: Sequence[int]) -> Any:
        """One cache with a row for each of the batch's rows."""
        if not self._plain:
            return joined_cache(caches, copies)
        assert len(caches) == 1, "such an architecture samples one request at a time"
        same = torch.zeros(copies[0], dtype=torch.long, device=self._device)
        keep_rows(caches[0], same, plain=True)
        return caches[0]

    def _prompt(self, request: Request) -> tuple[torch.Tensor, Any]:
        cache = empty_cache(self._model, plain=self._plain)
        ids = torch.tensor([request.prompt_ids], device=self._device)
        arguments = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        logits = self._model(**arguments, **{self._cache_name: cache}).logits
        return logits[:, -1], cache

    @torch.inference_mode()
    def _step(self, token_R: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] after one more token of each row."""
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        arguments = {
            "input_ids": token_R[:, None],
            "position_ids": self._position_R[:, None],
            "attention_mask": self._mask,
            "use_cache": True,
            self._cache_name: self._cache,
        }
        self._position_R = self._position_R + 1
        logits: torch.Tensor = self._model(**arguments).logits[:, -1]
        return logits

    @torch.inference_mode()
    def _take(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, list[Row]]:
        """Draw a token for each row; returns the tokens and the rows that ended with it."""
        numbers = [
            0.5 if row.finish is not None else row.uniform[len(row.tokens)] for row in self._rows
        ]
        if self._device.type == "mps":  # knows no float64
            logits_RV = logits_RV.cpu()
        uniform_R = torch.tensor(numbers, dtype=torch.float64, device=logits_RV.device)
        token_R, logp_R = draw(logits_RV, uniform_R, self._sampling)
        finished: list[Row] = []
        for row, token, logp in zip(self._rows, token_R.tolist(), logp_R.tolist(), strict=True):
            if row.finish is not None:
                continue  # waits to be compacted; what is drawn for it is not looked at
            row.tokens.append(token)
            row.logprobs.append(logp)
            self._end(row, token)
            if row.finish is not None:
                finished.append(row)
        return token_R.to(self._device), finished

    def _end(self, row: Row, token: int) -> None:
        """Set how a row ended, if it did, and its text."""
        stop = row.request.sampling.stop
        if token in row.ends:
            row.finish, row.text = Finish.STOP, self._tokenizer.decode(row.tokens[:-1])
        elif stop and self._has_stop(row, stop):
            text = self._tokenizer.decode(row.tokens)
            row.finish, row.text = Finish.STOP, cut(text, stop)
        elif len(row.tokens) >= row.request.sampling.max_tokens:
            row.finish, row.text = Finish.LENGTH, self._tokenizer.decode(row.tokens)

    def _has_stop(self, row: Row, stop: Sequence[str]) -> bool:
        window = max(len(text) for text in stop) + WINDOW_SLACK
        tail = self._tokenizer.decode(row.tokens[-window:])
        if not any(text in tail for text in stop):
            return False
        whole = self._tokenizer.decode(row.tokens)
        return any(text in whole for text in stop)

    @torch.inference_mode()
    def _compacted(self, token_R: torch.Tensor) -> torch.Tensor:
        """Drop finished rows once enough of them wait; a function of the rows' own ends only."""
        running = [place for place, row in enumerate(self._rows) if row.finish is None]
        if len(running) > KEEP_SHARE * len(self._rows):
            return token_R
        kept = torch.tensor(running, device=self._device)
        self._rows = [self._rows[place] for place in running]
        self._position_R = self._position_R[kept]
        self._mask = None if self._mask is None else self._mask[kept]
        keep_rows(self._cache, kept, plain=self._plain)
        return token_R[kept]


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min(text.find(mark) for mark in stop if mark in text)]


def cache_argument(model: Any) -> str:
    """transformers 5.24 renamed `past_key_values` to `cache`."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
