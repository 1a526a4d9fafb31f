"""What an evaluation has to do: which checkpoints, which tasks, with whose settings.

A checkpoint takes the settings of its own run's config.toml; a base model those of the runs that
are scored beside it (all must agree), else the recipe's. Everything that can be refused is refused
here, before a model is loaded. Not here: doing it (`runner.py`), finding folders
(`rlfe.checkpoints`).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfe.checkpoints import Checkpoint
from rlfe.errors import RequestError
from rlfe.eval.jobs import Job, Target, make_job
from rlfe.eval.settings import Settings, resolve
from rlfe.naming import cell_of, model_name
from rlfe.rundir import RunDir
from rlfe.schema import Recipe
from rlfe.tasks.base import Task

DEFAULT_TASKS = ("mbpp_plus", "gsm8k")
RANGE = re.compile(r"(\d+):(\d+):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A checkpoint or base model with the configuration that decides how it is asked.

    `recipe` is its run's (or, for a base model, the given one); `fallback` the sections of
    `--recipe`, for tasks that the run says nothing about.
    """

    target: Target
    recipe: Recipe
    fallback: Recipe
    has_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed. `flags` hold None where an option was not given.

    `on_gpu`: whether samplers elsewhere have a GPU; None: this machine's devices say so.
    """

    tasks: tuple[str, ...]
    flags: Mapping[str, Any]
    shard: tuple[int, int] | None = None
    on_gpu: bool | None = None


def parse_shard(text: str) -> tuple[int, int]:
    """`"2/4"` -> (2, 4): the second of four parts.

    Raises:
        RequestError: Not of that form, or i outside 1..k.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise RequestError(f'--shard "{text}" is no part', hint="Write --shard 1/4 to 4/4.")
    return int(match[1]), int(match[2])


def parse_steps(text: str) -> tuple[frozenset[int], bool]:
    """`30:500:30,last` -> (steps 30, 60, ..., 480, and True: the last one of each run too).

    Raises:
        RequestError: A part is no step, no first:last:stride and not "last".
    """
    steps: set[int] = set()
    last = False
    for part in text.replace(" ", "").split(","):
        match = RANGE.fullmatch(part)
        if part == "last":
            last = True
        elif part.isdecimal():
            steps.add(int(part))
        elif match is not None and int(match[3]) > 0:
            first, end, stride = (int(number) for number in match.groups())
            steps.update(range(first, end + 1, stride))
        else:
            raise RequestError(
                f'"{part}" in --steps is no step', hint="Write 30:500:30,last or 30,60,90."
            )
    return frozenset(steps), last


def chosen(checkpoints: Sequence[Target], text: str | None) -> list[Target]:
    """The checkpoints that `--steps` keeps; all without it.

    Raises:
        RequestError: None is left; the message says which steps there are.
    """
    if text is None:
        return list(checkpoints)
    steps, last = parse_steps(text)
    newest: dict[str, int] = {}
    for point in checkpoints:
        newest[point.cell] = max(point.step, newest.get(point.cell, 0))
    kept = [
        point
        for point in checkpoints
        if point.step in steps or (last and point.step == newest[point.cell])
    ]
    if checkpoints and not kept:
        there = ", ".join(str(step) for step in sorted({point.step for point in checkpoints}))
        raise RequestError(f"--steps {text} leaves no checkpoint; steps found: {there}")
    return kept


def checkpoint_target(point: Checkpoint) -> Target:
    """Where a run's checkpoint lies and where its samples go."""
    evals = RunDir(point.path.parent).evals("x").parent
    return Target(path=point.path, cell=point.cell_text, step=point.step, evals=evals)


def base_target(path: Path, name: str, runs_dir: Path) -> Target:
    """A base model: step 0 of the cell that is named like the model."""
    return Target(path=path, cell=name, step=0, evals=runs_dir / "_base" / name / "evals")


def base_cell(model: str, runs: Iterable[Subject]) -> str:
    """The base model's name in tables: as its runs call it, else the last part of its path."""
    for subject in runs:
        if subject.recipe.model.path.rstrip("/") == model.rstrip("/"):
            return cell_of(subject.recipe).model
    return model_name(model)


def tasks_of(asked: Asked, subjects: Sequence[Subject]) -> tuple[str, ...]:
    """Tasks to score: those asked for, else those that runs or recipe configure, else two."""
    if asked.tasks:
        return tuple(dict.fromkeys(asked.tasks))
    named = [task for s in subjects for task in (*s.recipe.eval, *s.fallback.eval)]
    return tuple(dict.fromkeys(named)) or DEFAULT_TASKS


def settings_of(subject: Subject, task: str, asked: Asked) -> Settings:
    """Settings of one subject on one task; RequestError where they cannot give a score."""
    recipe = subject.recipe
    style = recipe.prompt.style
    if style is None and not subject.has_run:
        style = subject.fallback.prompt.style
    return resolve(
        task,
        section=recipe.eval.get(task) or subject.fallback.eval.get(task),
        flags=asked.flags,
        style=style,
        max_len=min(recipe.model.max_len, context_of(subject.target.path)),
        thinking=recipe.prompt.thinking,
    )


def context_of(folder: Path) -> int:
    """Positions that a model has, from its config.json; practically endless where it says none."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return sys.maxsize
    inner = config.get("text_config", config)
    named = [inner.get(name) for name in ("max_position_embeddings", "n_positions")]
    return min((number for number in named if isinstance(number, int)), default=sys.maxsize)


def base_settings(base: Subject, runs: Sequence[Subject], task: str, asked: Asked) -> Settings:
    """A base model is asked as the runs beside it are, or as the recipe says.

    Raises:
        RequestError: The runs differ, so no setting fits them all.
    """
    kin = [s for s in runs if base_cell(s.recipe.model.path, [s]) == base.target.cell] or list(runs)
    found = {settings_of(subject, task, asked) for subject in kin}
    if len(found) > 1:
        raise RequestError(
            f"the runs ask {task} in {len(found)} ways, so the base model cannot be asked like all",
            hint="Score them in separate calls, or give the settings as flags.",
        )
    return found.pop() if found else settings_of(base, task, asked)


def plan_jobs(
    subjects: Sequence[Subject],
    asked: Asked,
    task_of: Callable[[str, Subject], Task],
) -> list[Job]:
    """Jobs in order: base models first, then runs; all tasks of a checkpoint stand together."""
    runs = [subject for subject in subjects if subject.has_run]
    names = tasks_of(asked, subjects)
    jobs = []
    for subject in sorted(subjects, key=lambda s: (s.has_run, s.target.cell, s.target.step)):
        for name in names:
            settings = (
                settings_of(subject, name, asked)
                if subject.has_run
                else base_settings(subject, runs, name, asked)
            )
            asker = runs[0] if runs and not subject.has_run else subject
            kin, task = asker.recipe, task_of(name, asker)
            facts = engine_facts(kin, asked.on_gpu)
            jobs.append(make_job(subject.target, task, settings, kin, facts, asked.shard))
    return jobs


def engine_facts(recipe: Recipe, on_gpu: bool | None = None) -> dict[str, Any]:
    """What of the engine shapes a sample: which one, and in which precision it computes."""
    return {"sampler": recipe.engine.sampler, "dtype": compute_dtype(recipe, on_gpu)}


def compute_dtype(recipe: Recipe, on_gpu: bool | None = None) -> str:
    """float32 on a CPU, as in training; else what checkpoints are stored in.

    `on_gpu`: whether the samplers have a GPU; None: as this machine does.
    """
    if recipe.engine.sampler == "fake":
        return "float32"
    if on_gpu is not None:
        return recipe.model.dtype if on_gpu and recipe.engine.device != "cpu" else "float32"
    try:
        from rlfe.engines.devices import choose
        from rlfe.engines.weights import device_of
    except ModuleNotFoundError as error:
        raise RequestError(
            f'engine "{recipe.engine.sampler}" needs {error.name}, which is not installed',
            hint="pip install 'rlfe[train]'",
        ) from error
    choose(recipe.engine)
    on_cpu = device_of(recipe.engine.device).type == "cpu"
    return "float32" if on_cpu else recipe.model.dtype
