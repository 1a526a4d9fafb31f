"""Doubles of a task and a sampler that read in a minute, shared by the evaluation tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlfe.engines.base import Snapshot
from rlfe.errors import RequestError
from rlfe.schema import Recipe
from rlfe.tasks.base import Reply
from rlfe.types import Completion, Finish, Problem, Prompt, Request, Status, Verdict

RECIPE = Recipe()
ENGINE = {"sampler": "fake", "dtype": "float32"}


class WordTokenizer:
    """One token a word; prompts of `problem i` have 3 words."""

    stop_token_ids = (0,)
    vocabulary_size = 100
    has_chat_template = True

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(range(1, 1 + len(prompt.text.split())))

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in token_ids)


class SeedSampler:
    """Replies are a digest of (weights, prompt length, seed, index): `answer 0` to `answer 5`."""

    name = "fake"

    def __init__(self, path: Path) -> None:
        self.tokenizer = WordTokenizer()
        self.requests: list[Request] = []
        self.loaded = [path]

    def load(self, source: Snapshot | Path) -> str:
        assert isinstance(source, Path)
        self.loaded.append(source)
        return "fake"

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        for request in requests:
            self.requests.append(request)
            yield request.id, [self._one(request, i) for i in range(request.sampling.n)]

    def close(self) -> None:
        self.loaded.clear()

    def _one(self, request: Request, index: int) -> Completion:
        text = f"{self.loaded[-1].name}/{request.sampling.seed}/{index}"
        number = hashlib.sha256(text.encode()).digest()[0] % 6
        return Completion(
            token_ids=(number, 0),
            logprobs=(-1.0, -1.0),
            text=f"answer {number}",
            finish=Finish.STOP,
        )


class ParityTask:
    """Even answers are right; answers below 4 pass the base tests. `judged` counts the work."""

    name = "toy_plus"
    version = "v1"
    runs_programs = True

    def __init__(self, size: int = 5) -> None:
        self.size = size
        self.judged: list[str] = []
        self.broken: set[str] = set()  # problems whose judging fails through our fault

    def problems(self, split: str) -> tuple[Problem, ...]:
        if split != "test":
            raise RequestError(f"no split {split}")
        return tuple(
            Problem(id=f"toy/{i}", task=self.name, split=split, prompt=f"problem {i} ?")
            for i in range(self.size)
        )

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        return Prompt(format=f"toy-{style}-v1", text=problem.prompt, stop=("\n",))

    def data_sha256(self) -> str:
        return hashlib.sha256(b"toy").hexdigest()

    def answer(self, reply: Reply) -> str:
        return reply.text.removeprefix("answer ")

    def judge(self, replies: Sequence[Reply], judge: Any) -> Iterator[tuple[str, Verdict]]:
        for reply in reversed(replies):
            self.judged.append(f"{reply.problem.id}:{self.answer(reply)}")
            if reply.problem.id in self.broken:
                yield reply.key, Verdict(status=Status.INFRASTRUCTURE, detail="no jail")
                continue
            number = int(self.answer(reply))
            status = Status.FAILED if number % 2 else Status.PASSED
            base = "passed" if number < 4 or status is Status.PASSED else "failed"
            yield reply.key, Verdict(status=status, facts={"base": base}, seconds=0.001)
