"""One job of an evaluation: a checkpoint, a task, the settings, and where its samples lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlfe.errors import RequestError
from rlfe.eval.settings import BLOCK, Settings, sample_facts, sample_key, settings_text
from rlfe.eval.store import Store
from rlfe.naming import checkpoint_name
from rlfe.schema import Recipe
from rlfe.tasks.base import Task
from rlfe.types import Problem, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checkpoint to score. `text` is its name in seeds and samples: `<cell>/global_step_30`.

    `Target(path=Path("runs/x/global_step_30"), cell="x", step=30, evals=Path("runs/x/evals"))`
    """

    path: Path
    cell: str
    step: int
    evals: Path

    @property
    def text(self) -> str:
        return f"{self.cell}/{checkpoint_name(self.step)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checkpoint on one task: what to ask, where samples lie, how the row is labelled."""

    target: Target
    task: Task
    settings: Settings
    problems: tuple[Problem, ...]
    prompts: tuple[Prompt, ...]
    facts: Mapping[str, Any]
    store_path: Path
    recipe: Recipe
    shard: tuple[int, int] | None = None

    @property
    def beside(self) -> tuple[Path, ...]:
        """Files of the same evaluation that other shards, or the unsharded call, wrote."""
        step = self.store_path.name.split(".")[0]
        found = sorted(self.store_path.parent.glob(f"{step}.*jsonl.zst"))
        return tuple(path for path in found if path != self.store_path)

    def absolute(self) -> Job:
        """The same job for a process with another working folder."""
        target = replace(self.target, path=self.target.path.absolute())
        return replace(self, target=target)

    def read(self, texts: bool = False) -> Store:
        """All samples of this job that are on disk."""
        return Store.read(self.store_path, self.rule, texts, self.beside)

    @property
    def ids(self) -> set[str]:
        return {problem.id for problem in self.problems}

    @property
    def rule(self) -> str:
        return f"{self.task.name} {self.task.version}"

    @property
    def settings_text(self) -> str:
        return settings_text(self.facts, self.settings, self.rule)

    def missing(self, store: Store) -> list[tuple[int, int, int]]:
        """(index of the problem, block, samples) still to be drawn."""
        n = self.settings.n
        return [
            (index, block, count)
            for index, problem in enumerate(self.problems)
            for block, count in store.missing(problem.id, n, BLOCK)
        ]


def make_job(
    target: Target,
    task: Task,
    settings: Settings,
    recipe: Recipe,
    engine: Mapping[str, Any],
    shard: tuple[int, int] | None = None,
) -> Job:
    """Plan one checkpoint on one task; loads problems, no model.

    `recipe` says which engine samples and how; `engine` is what of it shapes a sample. `shard`
    (i, k) takes problems i-1, i-1+k, ... only and writes a file of its own.

    Raises:
        RequestError: an unknown example id, or a limit above the task's size.
    """
    everything = task.problems("test")
    if settings.limit is not None and settings.limit > len(everything):
        raise RequestError(
            f"limit {settings.limit} is more than the {len(everything)} problems of {task.name}",
            hint="Leave --limit out to score all of them.",
        )
    prompts = tuple(task.prompt(p, settings.style, settings.examples) for p in everything)
    facts = sample_facts(settings, prompts, data_sha256=task.data_sha256(), engine=engine)
    folder = target.evals / task.name / sample_key(facts)
    start, stride = (shard[0] - 1, shard[1]) if shard else (0, 1)
    part = f"shard{shard[0]}of{shard[1]}." if shard else ""
    return Job(
        target=target,
        task=task,
        settings=settings,
        problems=everything[: settings.limit][start::stride],
        prompts=prompts[: settings.limit][start::stride],
        facts=facts,
        store_path=folder / f"step_{target.step:06d}.{part}jsonl.zst",
        recipe=recipe,
        shard=shard,
    )
