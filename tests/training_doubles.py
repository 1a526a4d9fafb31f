"""A task that a random model succeeds at now and then, and a job on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfe import config
from rlfe.engines import computes_in_float32, make_engines, make_tokenizer
from rlfe.rundir import RunDir
from rlfe.tasks.base import Reply
from rlfe.training.job import Job, Nobody, training_list
from rlfe.training.loop import Ending, train
from rlfe.types import Problem, Prompt, Status, Verdict

SETTINGS = {
    "model.dtype": "float32",
    "model.max_len": 128,
    "prompt.style": "base",
    "train.steps": 4,
    "train.prompts_per_step": 3,
    "train.group_size": 4,
    "train.max_tokens": 10,
    "diagnostics.k_buckets": ["1", "2", "3"],
    "optim.lr": 1e-2,
    "save.every": 2,
    "engine.device": "cpu",
    "engine.threads": 1,
}
REPLAY = {
    "replay.strategy": "hard_cooldown",
    "replay.rollouts": 3,
    "replay.cooldown_steps": 1,
    "replay.min_eligible": 1,
}


class Letters:
    """Right is a reply that holds a vowel; `wanted` makes success rarer or commoner."""

    name, version = "letters", "letters v1"

    def __init__(self, wanted: str = "aeiouAEIOU", problems: int = 5) -> None:
        self.wanted, self.count = wanted, problems

    def problems(self, split: str) -> tuple[Problem, ...]:
        assert split in ("train", "test")
        return tuple(
            Problem(id=f"letters/{i}", task=self.name, split=split, prompt="say " + "ab" * i)
            for i in range(self.count)
        )

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        return Prompt(format=f"letters-{style}", text=problem.prompt)

    def data_sha256(self) -> str:
        return "0" * 64

    def answer(self, reply: Reply) -> str:
        return reply.text

    def judge(self, replies: Sequence[Reply], judge: Any) -> Iterator[tuple[str, Verdict]]:
        for reply in replies:
            good = any(letter in reply.text for letter in self.wanted)
            yield reply.key, Verdict(status=Status.PASSED if good else Status.FAILED)


def a_recipe(model: Path | str, changes: Mapping[str, Any] | None = None) -> config.Resolved:
    flags = {"model.path": str(model), **SETTINGS, **(changes or {})}
    return config.load([], flags=flags)


def a_job(
    model: Path | str,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    task: Any = None,
    resume: bool = False,
    watch: Any = None,
) -> Job:
    resolved = a_recipe(model, changes)
    run = RunDir(folder)
    again = run.create(resolved.recipe, resolved.origins, resume=resume)
    task = task or Letters()
    data = training_list(resolved.recipe, task, make_tokenizer(resolved.recipe))
    sampler, learner = make_engines(resolved.recipe)
    return Job(
        recipe=resolved.recipe,
        run=run,
        task=task,
        data=data,
        sampler=sampler,
        learner=learner,
        watch=watch or Nobody(),
        float32=computes_in_float32(resolved.recipe),
        resume=again,
    )


def a_run(model: Path | str, folder: Path, changes: Any = None, **other: Any) -> Ending:
    return train(a_job(model, folder, changes, **other))
