"""What a task is: problems, prompts, and verdicts on replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlfe.types import Finish, Problem, Prompt, Verdict

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply to judge. `key` is the caller's and comes back with the verdict.

    `Reply(key="3/0", problem=problem, prompt=prompt, text="def f(): ...", finish=Finish.STOP)`
    """

    key: str
    problem: Problem
    prompt: Prompt
    text: str
    finish: Finish


class Task(Protocol):
    """One set of problems with its prompt formats and its judge."""

    name: str
    version: str  # of the judging rule; in every recorded row
    runs_programs: bool  # judging executes the reply and needs a Judge; else it is a pure function

    def problems(self, split: str) -> tuple[Problem, ...]:
        """All problems of `train` or `test`, in the data's order; RequestError for other splits."""
        ...

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        """The prompt in `base` or `chat` style; `examples` are problem ids of the training set."""
        ...

    def data_sha256(self) -> str:
        """Digest of the data that the problems come from."""
        ...

    def answer(self, reply: Reply) -> str:
        """What is judged: the extracted program or the number found ("" if there is none)."""
        ...

    def judge(self, replies: Sequence[Reply], judge: Judge | None) -> Iterator[tuple[str, Verdict]]:
        """Yield (key, verdict) for every reply, as they finish, in any order.

        Training calls it once a step, in a thread, with replies that are still being sampled:
        iterating waits for the next one, so a judge that reads them once overlaps generation.
        """
        ...
