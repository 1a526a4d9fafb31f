"""What a training run works with, put together once: problems, prompts, engines, judge, record.

What: the length rule before a model is loaded, the hash of the data list, warnings and the log
file. Not here: anything that changes from step to step (`state.py`).
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rlfe.engines.base import Learner, Sampler, Tokenizer
from rlfe.engines.ranks import Ranks
from rlfe.errors import RequestError
from rlfe.records import canonical_json
from rlfe.rundir import RunDir
from rlfe.schema import Recipe
from rlfe.tasks.base import Task
from rlfe.training.lengths import fitting
from rlfe.types import Problem, Prompt, StepRecord

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge


class Watch(Protocol):
    """Whoever looks on: the command line, or nobody."""

    def step(self, record: StepRecord) -> None:
        """A finished step."""
        ...

    def within(self, text: str) -> None:
        """How far the running step is, in words."""
        ...

    def warn(self, text: str) -> None: ...

    def stopping(self) -> bool:
        """Whether to save and stop after the running step."""
        ...


class Nobody:
    """A watch that looks away. `train(job, Nobody())`"""

    def step(self, record: StepRecord) -> None:
        pass

    def within(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def stopping(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingList:
    """The problems of a run with their prompts, in the data's order; `left_out` were too long."""

    problems: tuple[Problem, ...]
    prompts: tuple[Prompt, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    left_out: tuple[str, ...] = ()

    def texts(self) -> dict[str, str]:
        """What a reader sees of each prompt, by problem id."""
        return {
            problem.id: "\n".join([*(turn.text for turn in prompt.messages), prompt.text]).strip()
            for problem, prompt in zip(self.problems, self.prompts, strict=True)
        }

    def sha256(self) -> str:
        """Digest of ids and prompt tokens: a resumed run has to see the same list."""
        rows = [
            [problem.id, list(ids)]
            for problem, ids in zip(self.problems, self.prompt_ids, strict=True)
        ]
        return hashlib.sha256(canonical_json(rows).encode()).hexdigest()


def training_list(recipe: Recipe, task: Task, tokenizer: Tokenizer) -> TrainingList:
    """Problems of the training split under the length rule (docs/algorithms.md 11).

    Raises:
        RequestError: No problems, no prompt style, or prompts that do not fit.
    """
    if recipe.prompt.style is None:
        has = "has" if tokenizer.has_chat_template else "has no"
        raise RequestError(
            f"prompt.style is not set; the tokenizer {has} chat template",
            hint="Say --set prompt.style=base or --set prompt.style=chat.",
        )
    problems = chosen_problems(recipe, task)
    prompts = [task.prompt(p, recipe.prompt.style, recipe.prompt.examples) for p in problems]
    ids = {p.id: tokenizer.encode(prompt) for p, prompt in zip(problems, prompts, strict=True)}
    fits, long = fitting(
        {name: len(tokens) for name, tokens in ids.items()},
        max_tokens=recipe.train.max_tokens,
        max_len=recipe.model.max_len,
        fail=recipe.data.fail_on_prompt_too_long,
    )
    wanted = set(fits)
    pairs = [(p, prompt) for p, prompt in zip(problems, prompts, strict=True) if p.id in wanted]
    return TrainingList(
        problems=tuple(problem for problem, _ in pairs),
        prompts=tuple(prompt for _, prompt in pairs),
        prompt_ids=tuple(ids[problem.id] for problem, _ in pairs),
        left_out=tuple(long),
    )


def chosen_problems(recipe: Recipe, task: Task) -> tuple[Problem, ...]:
    """The task's training problems, or those that `data.ids` and `data.size` leave of them.

    Raises:
        RequestError: There are none, or an id is not one of them.
    """
    problems = task.problems(recipe.data.split or "train")
    if recipe.data.ids:
        known = {problem.id: problem for problem in problems}
        unknown = [name for name in recipe.data.ids if name not in known]
        if unknown:
            raise RequestError(
                f'data.ids: "{unknown[0]}" is not a training problem of {task.name}',
                hint=f'Ids look like "{next(iter(known))}".',
            )
        problems = tuple(known[name] for name in dict.fromkeys(recipe.data.ids))
    problems = problems[: recipe.data.size]
    if not problems:
        raise RequestError(f"task {task.name} has no training problems")
    return problems


@dataclass(slots=True, kw_only=True)
class Job:
    """A run that is about to train. `float32`: sampler and learner both compute in it.

    Every rank has its own; the first writes the run's folder.
    """

    recipe: Recipe
    run: RunDir
    task: Task
    data: TrainingList
    sampler: Sampler
    learner: Learner
    judge: Judge | None = None
    watch: Watch = field(default_factory=Nobody)
    float32: bool = True
    resume: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    _said: set[str] = field(default_factory=set)

    @property
    def seed(self) -> int:
        return self.recipe.run.seed

    def within(self, text: str) -> None:
        """Where the run is, for whoever looks on and for an error about a rank that is lost."""
        self.ranks.phase = text
        self.watch.within(text)

    def log(self, text: str) -> None:
        """One dated line in logs/train.log."""
        if not self.ranks.first:
            return
        self.run.log.parent.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        with self.run.log.open("a", encoding="utf-8") as file:
            file.write(f"{stamp} {text}\n")

    def warn(self, text: str, kind: str | None = None) -> None:
        """Tell whoever looks on, once per kind, and the log."""
        if (kind or text) in self._said:
            return
        self._said.add(kind or text)
        self.log(f"warning: {text}")
        self.watch.warn(text)
