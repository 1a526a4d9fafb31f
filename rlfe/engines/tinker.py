"""Sampling at a server that speaks the Tinker API.

What: every request of a call is submitted at once, so that the server always has the next one;
end tokens and stop strings are the same union as in the other engines and are checked again here,
because servers differ in what a list of stop strings switches off. A request's seed goes along;
what a server makes of it is its own affair, so nothing is claimed to be exact. Not here: the
connection (`tinker_service.py`), learning (`tinker_learner.py`).
Try it: `rlfe train --engine tinker` (docs/tinker.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlfe.engines.base import Snapshot
from rlfe.engines.tinker_service import Service
from rlfe.engines.tokenizer import HfTokenizer
from rlfe.errors import RequestError, RlfeError
from rlfe.types import Completion, Finish, Request, Sampling

# Servers add the number of the sample to the seed and may hold it in 32 bits with a sign.
SEED_RANGE = 2_000_000_000


class TinkerSampler:
    """A sampler that holds a name: which of the server's snapshots it draws from.

    Args:
        service: The session, shared with the learner.
        tokenizer: Of the base model; the server sees token ids only.
        model: The base model as the server knows it; drawn from until `load`.
    """

    name = "tinker"
    exact = False

    def __init__(self, service: Service, tokenizer: HfTokenizer, model: str) -> None:
        self._service, self._tokenizer, self._model = service, tokenizer, model
        self._client: Any = None
        self._policy_step = 0

    @property
    def tokenizer(self) -> HfTokenizer:
        return self._tokenizer

    def load(self, source: Snapshot | Path) -> str:
        """Draw from a snapshot; its fingerprint if the server confirms that it is that one.

        The server is asked which path the new sampler draws from. That this path holds the
        learner's bytes is its word (docs/tinker.md).
        """
        if not isinstance(source, Snapshot):
            raise RequestError(
                f'{source}: engine "tinker" samples from what the service holds, not from a folder',
                hint="Evaluate checkpoints with --engine transformers or --engine vllm.",
            )
        self._client = self._service.sampling_client(model_path=source.weights)
        held = self._service.path_of(self._client)
        self._policy_step = source.version
        if held == source.weights:
            return source.fingerprint
        return hashlib.sha256(f"other weights: {held}".encode()).hexdigest()

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        from tinker import types

        if self._client is None:
            self._client = self._service.sampling_client(base_model=self._model)
        waiting = {
            request.id: self._client.sample(
                prompt=types.ModelInput.from_ints(list(request.prompt_ids)),
                num_samples=_asked(request.sampling),
                sampling_params=sampling_params(request.sampling, self._tokenizer),
            )
            for request in requests
        }
        assert len(waiting) == len(requests), "request ids have to differ"
        by_id = {request.id: request for request in requests}
        for name, response in self._service.finished(waiting, "sampling"):
            request = by_id[name]
            yield name, completions(request, response, self._tokenizer, self._policy_step)

    def close(self) -> None:
        self._client = None


def _asked(sampling: Sampling) -> int:
    return 1 if sampling.temperature == 0 else sampling.n  # greedy ones are all the same


def sampling_params(sampling: Sampling, tokenizer: HfTokenizer) -> Any:
    """`tinker.types.SamplingParams` with nothing left to a default.

    The API takes stop strings or end tokens, not both: with strings the end tokens are looked
    for when the reply is here.

    Raises:
        RequestError: min-p, which the API does not have.
    """
    from tinker import types

    if sampling.min_p > 0:
        raise RequestError(
            f'min_p = {sampling.min_p:g}: engine "tinker" has no such setting',
            hint="Use top_p or top_k.",
        )
    return types.SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed % SEED_RANGE,
        stop=list(sampling.stop) if sampling.stop else sorted(_ends(sampling, tokenizer)),
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.top_k > 0 else -1,
        top_p=sampling.top_p,
    )


def completions(
    request: Request, response: Any, tokenizer: HfTokenizer, policy_step: int
) -> list[Completion]:
    """The n completions of a sample response, in order.

    Raises:
        RlfeError: The server gave fewer, or no log-probabilities.
    """
    sampling, found = request.sampling, response.sequences
    if len(found) != _asked(sampling):
        raise RlfeError(f"the service gave {len(found)} samples, {_asked(sampling)} were asked for")
    done = [_completion(sampling, each, tokenizer, policy_step) for each in found]
    return done * sampling.n if len(done) < sampling.n else done


def _completion(
    sampling: Sampling, sequence: Any, tokenizer: HfTokenizer, policy_step: int
) -> Completion:
    tokens, logprobs = list(sequence.tokens), sequence.logprobs
    if logprobs is None or len(logprobs) != len(tokens):
        raise RlfeError("the service gave no log-probability for each sampled token")
    tokens, finish, text = _ended(tokens, str(sequence.stop_reason), sampling, tokenizer)
    return Completion(
        token_ids=tuple(tokens),
        logprobs=tuple(float(value) for value in logprobs[: len(tokens)]),
        text=text,
        finish=finish,
        policy_step=policy_step,
    )


def _ended(
    tokens: list[int], stop_reason: str, sampling: Sampling, tokenizer: HfTokenizer
) -> tuple[list[int], Finish, str]:
    """Tokens up to the end, how they ended, and their text."""
    ends = _ends(sampling, tokenizer)
    place = next((place for place, token in enumerate(tokens) if token in ends), None)
    if place is not None:
        return tokens[: place + 1], Finish.STOP, tokenizer.decode(tokens[:place])
    text = tokenizer.decode(tokens)
    marks = [text.find(mark) for mark in sampling.stop if mark in text]
    if marks:
        return tokens, Finish.STOP, text[: min(marks)]
    return tokens, Finish.STOP if stop_reason == "stop" else Finish.LENGTH, text


def _ends(sampling: Sampling, tokenizer: HfTokenizer) -> set[int]:
    """Every token that ends a reply, as in the other engines."""
    special = {tokenizer.token_of(text) for text in sampling.stop} - {None}
    ends = {*sampling.stop_token_ids, *tokenizer.stop_token_ids, *special}
    return {token for token in ends if token is not None}
