"""Kept checkpoints and the resumable state: when, in which order, and which may go.

Order at the end of a step: checkpoint, then the line in metrics.jsonl, then `state/`, then what
`save.keep` lets go. A kill between any two of them costs work, never correctness: the run goes on
from the last whole state and writes the same again. docs/algorithms.md 13.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import numpy as np

from rlfe.checkpoints import expired, kept_steps, problems
from rlfe.training import batching, state
from rlfe.training.folders import new_folder_of_all
from rlfe.training.job import Job
from rlfe.training.selection import Selection
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


def save_checkpoint(job: Job, done: int, chosen: Selection) -> Mapping[str, float]:
    """global_step_N as a complete model folder; returns what merging an adapter cost."""
    sample = _sample(chosen) if job.recipe.lora.rank else None
    with new_folder_of_all(job.ranks, job.run.checkpoint(done)) as folder:
        facts = job.learner.export(folder, sample)
    job.log(f"kept {job.run.checkpoint(done).name}")
    return facts


def save_state(job: Job, progress: state.Progress) -> None:
    state.save(job, progress)
    job.log(f"saved the state after step {progress.step}")


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
