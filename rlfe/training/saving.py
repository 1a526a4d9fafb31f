"""Kept checkpoints and the resumable state: when, in which order, and which may go.

Checkpoints and states are copied to the host's memory and written by a thread (`writing.py`), if
the learner can be copied. Order: a step's checkpoint is whole before its state, the line in
metrics.jsonl stands before the state is begun, and what `save.keep` lets go goes last. A kill
between any two of them costs work, never correctness: the run goes on from the last whole state
and writes the same again. docs/algorithms.md 13.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from rlfe.checkpoints import expired, kept_steps, problems
from rlfe.engines.base import Copying, Later
from rlfe.rundir import new_folder
from rlfe.training import batching, state
from rlfe.training.folders import new_folder_of_all
from rlfe.training.job import Job
from rlfe.training.selection import Selection
from rlfe.training.writing import Work, Writer
from rlfe.types import Batch

SAMPLE_ROLLOUTS = 4  # rollouts on which the loss by merging an adapter is measured


def keeps_checkpoint(job: Job, done: int) -> bool:
    """Whether the checkpoint after `done` steps is kept."""
    recipe = job.recipe
    return done in kept_steps(recipe.train.steps, recipe.save.every)


def saves_state(job: Job, done: int) -> bool:
    """Whether the state after `done` steps is saved: at kept checkpoints and `save.state_every`."""
    every = job.recipe.save.state_every
    return keeps_checkpoint(job, done) or (every is not None and done % every == 0)


def save_checkpoint(job: Job, writer: Writer, done: int, chosen: Selection) -> Mapping[str, float]:
    """global_step_N as a complete model folder; returns what merging an adapter cost."""
    sample = _sample(chosen) if job.recipe.lora.rank else None
    path, copying = job.run.checkpoint(done), _copying(job)
    facts: dict[str, float] = {}
    if copying is None:
        with new_folder_of_all(job.ranks, path) as folder:
            facts |= job.learner.export(folder, sample)
        job.log(f"kept {path.name}")
        return facts

    def prepare() -> Work:
        write, found = copying.export_later(sample)
        facts.update(found)
        return partial(_write, job, path, write, f"kept {path.name}")

    writer.submit(done, prepare)
    return facts


def save_state(job: Job, writer: Writer, progress: state.Progress) -> None:
    """The state after this step, then what `save.keep` lets go."""
    done, copying = progress.step, _copying(job)
    said = f"saved the state after step {done}"
    if copying is None:
        state.save(job, progress)
        job.log(said)
        drop_expired(job, done)
        return
    later = partial(state.save_later, job, progress, copying)
    writer.submit(done, lambda: partial(_write, job, job.run.state, later(), said))
    writer.submit(done, lambda: partial(drop_expired, job, done))


def _copying(job: Job) -> Copying | None:
    """The learner, if what it holds can be written while it goes on; ranks write together."""
    alone = job.ranks.size == 1
    return job.learner if alone and isinstance(job.learner, Copying) else None


def _write(job: Job, path: Path, write: Later, said: str) -> None:
    with new_folder(path) as folder:
        write(folder)
    job.log(said)


def drop_expired(job: Job, done: int) -> None:
    """Delete what `save.keep` no longer keeps, once the newest checkpoint is complete."""
    if not job.ranks.first:
        return
    for leftover in job.run.path.glob(".global_step_*.deleted"):
        shutil.rmtree(leftover)
    lacks = {step: problems(job.run.checkpoint(step)) for step in job.run.steps()}
    complete = [step for step, missing in lacks.items() if not missing]
    incomplete = [step for step, missing in lacks.items() if missing]
    for step in expired(complete, incomplete, done, job.recipe.save.keep):
        folder = job.run.checkpoint(step)
        gone = folder.with_name(f".{folder.name}.deleted")  # never half a checkpoint in sight
        os.rename(folder, gone)
        shutil.rmtree(gone)
        job.log(f"deleted {folder.name} (save.keep = {job.recipe.save.keep})")


def _sample(chosen: Selection) -> Batch:
    """The first rollouts of the step, kept or not."""
    nothing = [np.zeros(len(group.rollouts)) for group in chosen.groups]
    rows = batching.fresh_rows(chosen.groups, nothing, [0] * len(nothing))
    return batching.padded(rows[:SAMPLE_ROLLOUTS], pad_id=0)
