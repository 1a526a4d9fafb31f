"""The training loop: read this first. One page, in the order of docs/algorithms.md 0.1.

What: which step happens when, and nothing else; every formula is a function of its own module
(`rollouts`, `selection`, `update`, `replay`, `staleness`, `diagnostics`), every engine is behind
`rlfe.engines.base`. Versions count from 0: step t trains version t into version t + 1; what is
shown and stored as `step` is t + 1. Try it: `rlfe train --recipe tiny`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfe.engines.base import Snapshot
from rlfe.randomness import epoch_of_step
from rlfe.training import account, batching, saving, staleness, state, validation
from rlfe.training.clock import Clock
from rlfe.training.diagnostics import Metrics
from rlfe.training.job import Job
from rlfe.training.lock import held
from rlfe.training.recording import open_trackers, record, sample_rows, warn, warn_flat
from rlfe.training.rollouts import sampled_groups, write_rollouts
from rlfe.training.selection import Selection, select, selection_metrics
from rlfe.training.stops import Stop
from rlfe.training.tracking import Trackers
from rlfe.training.update import Updates, freshness_limits, update, update_metrics
from rlfe.training.writing import Writer
from rlfe.types import Group

CHECKED_ROLLOUTS = 2  # rollouts of the regular check against a stored snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended: done, nothing_left, interrupted, or the status of a stop rule."""

    status: str
    step: int
    reason: str = ""


def train(job: Job) -> Ending:
    """Train `job` to its last step, or until a rule or the user ends it.

    Raises:
        RlfeError: Something failed; the last saved state is whole (`--resume`).
    """
    with held(job.run) if job.ranks.first else nullcontext():
        now = state.resumed(job) if job.resume else state.fresh(job)
        stop = now.stops.standing(now.step)
        if stop is not None:  # a rule ended this run; more steps would not be the same run
            return ended(job, now.step, stop)
        if now.step >= job.recipe.train.steps:
            return Ending(status="nothing_left", step=now.step)
        account.record_start(job, now.step)
        with (
            closing(open_trackers(job, now.step)) as trackers,
            closing(Writer(job.log)) as writer,
        ):
            return steps(job, now, trackers, writer)


def steps(job: Job, now: state.Progress, trackers: Trackers, writer: Writer) -> Ending:
    """The loop over training steps."""
    total = job.recipe.train.steps
    job.log(f"training from step {now.step + 1} to {total}")
    held_out = validation.validation_list(job.recipe, job.task, job.sampler.tokenizer, job.data)
    first = validation.due(job, held_out, 0) if now.step == 0 else {}
    warn_flat(job, first)
    begin = now.step
    for step in range(begin, total):
        writer.check()
        clock = Clock()
        job.within(f"step {step + 1}: handing the weights over")
        with clock.phase("sync"):
            behavior, current = hand_over(job, now, step)
        groups = sampled_groups(job, step, clock)
        compiles = step == begin and job.recipe.compute.compile  # that takes a while
        job.within(f"step {step + 1}: training{', compiling first' if compiles else ''}")
        with clock.phase("train"):
            chosen = select(job, groups)
            observe(now, chosen)
            checked = check_snapshot(job, step, behavior, groups)
            done = update(job, step, chosen, now.buffer, lag=step - behavior.version)
        metrics = {
            "lag": step - behavior.version,
            "lag/fingerprint_ok": 1,
            **selection_metrics(job.recipe, chosen),
            **update_metrics(job, done),
            **checked,
            **data_metrics(job, step, groups),
            **(first if step == 0 else {}),
        }
        if now.buffer is not None:
            now.buffer.admit(groups, step=step)
        stop = advance(now, step, current, metrics, done)
        ends = stop is not None or job.ranks.any(job.watch.stopping())
        with clock.phase("validate"):
            metrics |= validation.due(job, held_out, now.step)
        job.within(f"step {step + 1}: saving")
        with clock.phase("save"):
            write_rollouts(job, step, groups, chosen.advantages_by_slot())
            if saving.keeps_checkpoint(job, now.step) or stop is not None:
                metrics |= saving.save_checkpoint(job, writer, now.step, chosen)
                trackers.samples(sample_rows(chosen, step, job.data.texts()), step=now.step)
        record(job, trackers, step, metrics, clock)
        if ends or saving.saves_state(job, now.step):
            saving.save_state(job, writer, now)
        warn(job, now, step, metrics)
        if stop is not None or (ends and now.step < total):
            break
    writer.wait()
    return ended(job, now.step, stop)


def hand_over(job: Job, now: state.Progress, step: int) -> tuple[Snapshot, Snapshot]:
    """Give the sampler the weights that step `step` samples from; (behaviour, current) snapshots.

    Raises:
        RlfeError: The sampler does not hold the weights that it was given (guard 1).
    """
    current = job.learner.snapshot(step)
    job.ranks.same(current.fingerprint, "weights")
    same = staleness.unchanged_weights(
        previous=now.fingerprint,
        current=current.fingerprint,
        version=step,
        updated=now.updated,
    )
    if same is not None:
        job.warn(same, kind="unchanged")
    now.queue.push(current)
    behavior = now.queue.behavior(step)
    held = job.sampler.load(behavior)
    staleness.check_arrival(sent=behavior.fingerprint, received=held, version=behavior.version)
    return behavior, current


def observe(now: state.Progress, chosen: Selection) -> None:
    """Tell the buffer how each prompt went, also where the filter drops the group."""
    if now.buffer is None:
        return
    for group, k, n in zip(chosen.groups, chosen.successes_P, chosen.scored_P, strict=True):
        now.buffer.observe(group.problem_id, successes=k, scored=n)


def check_snapshot(
    job: Job, step: int, behavior: Snapshot, groups: Sequence[Group]
) -> dict[str, Any]:
    """Guard 4: teacher-forced log-probabilities of some rollouts under the stored snapshot."""
    every, lag = job.recipe.lag.check_every, step - behavior.version
    if not every or lag == 0 or step % every:
        return {}
    first = groups[0]
    rows = batching.fresh_rows([first], [np.zeros(len(first.rollouts))], [0])
    batch = batching.padded(rows[:CHECKED_ROLLOUTS], pad_id=0)
    limit, _ = freshness_limits(job)
    found = staleness.freshness(
        job.learner.logprobs(batch, behavior),
        batch.behavior_logp_BL,
        batch.mask_BL,
        limit=limit,
        clip_limit=float("inf"),
    )
    return {"lag/fresh_ok": int(found.ok), "lag/fresh_mean_abs": found.mean_abs_log_ratio}


def data_metrics(job: Job, step: int, groups: Sequence[Group]) -> Metrics:
    """Epochs seen, prompts left out, tokens sampled."""
    per_step, count = job.recipe.train.prompts_per_step, len(job.data.problems)
    done = [rollout.completion for group in groups for rollout in group.rollouts]
    return {
        "data/epoch": epoch_of_step(step=step, prompts_per_step=per_step, count=count),
        "data/prompts_too_long": len(job.data.left_out),
        "tokens/sampled": sum(len(completion.token_ids) for completion in done),
    }


def advance(
    now: state.Progress, step: int, current: Snapshot, metrics: Metrics, done: Updates
) -> Stop | None:
    """Count the finished step; the rule that ends the run, if one does."""
    now.step, now.fingerprint, now.updated = step + 1, current.fingerprint, done.applied
    reward = metrics["reward/mean"]
    empty = metrics["filter/kept_groups"] == 0
    stop = now.stops.observe(
        step=now.step,
        reward_mean=None if reward is None else float(reward),
        empty=empty,
        optim_steps=len(done.norms),
        skipped=done.skipped,
    )
    metrics |= {"filter/empty": int(empty), **now.stops.metrics()}
    return stop


def ended(job: Job, step: int, stop: Stop | None) -> Ending:
    """Write down how the run ended."""
    if stop is None and step == job.recipe.train.steps:
        account.record_end(job, None, None)
        job.log("done")
        return Ending(status="done", step=step)
    status = "interrupted" if stop is None else stop.status
    reason = f"interrupted after step {step}" if stop is None else stop.reason
    account.record_end(job, stop, reason)
    job.log(f"ended: {reason}")
    return Ending(status=status, step=step, reason=reason)
