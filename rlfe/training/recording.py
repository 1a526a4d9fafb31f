"""What leaves a finished step: its line in metrics.jsonl, the trackers, warnings, the run's end.

metrics.jsonl comes first; trackers are copies of it and never stop a run. Not here: computing the
numbers (`selection`, `update`, `diagnostics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlfe.config import flat
from rlfe.engines.base import Counting
from rlfe.records import append_jsonl, plain
from rlfe.training.clock import Clock, peak_memory, speeds
from rlfe.training.job import Job
from rlfe.training.selection import Selection
from rlfe.training.state import Progress
from rlfe.training.tracking import SampleRow, Start, Trackers, run_id
from rlfe.training.update import freshness_limits
from rlfe.types import StepRecord

TRUNCATED_WARNING = 0.05  # share of cut rollouts above which the token limit is too short
FLAT_WARNING = 0.7  # expected share of groups without signal
SHOWN_SAMPLES = 16  # rows of a sample table


def open_trackers(job: Job, finished_steps: int) -> Trackers:
    """The trackers that `track.loggers` names; none of them is needed."""
    track = job.recipe.track
    if not job.ranks.first:
        track = track.model_copy(update={"loggers": ()})
    hosted = any(name != "console" for name in track.loggers)
    start = Start(
        project=track.project,
        name=track.name or job.run.name,
        run_id=run_id(job.run.private / "tracker_id") if hosted else job.run.name,
        folder=job.run.path if track.dir is None else job.run.path.parent / track.dir,
        config=plain(flat(job.recipe)),
        step=finished_steps,
    )
    return Trackers(track.loggers, start, samples=track.samples, warn=job.warn)


def record(
    job: Job, trackers: Trackers, step: int, metrics: Mapping[str, Any], clock: Clock
) -> None:
    """One line in metrics.jsonl; what costs time or memory stands apart from what is computed."""
    seconds = clock.seconds()
    peak = job.learner.peak if isinstance(job.learner, Counting) else None
    rollouts = metrics["filter/groups"] * job.recipe.train.group_size
    made = StepRecord(
        step=step + 1,
        version=step,
        behavior_version=step - metrics["lag"],
        metrics={**ABSENT, **metrics},
        seconds=seconds,
        speed=speeds(metrics, seconds, rollouts=rollouts, peak=peak),
    )
    head = {"step": made.step, "version": made.version, "behavior_version": made.behavior_version}
    costs = {"seconds": made.seconds, "memory": peak_memory(), "speed": made.speed}
    if job.ranks.first:
        append_jsonl(job.run.metrics, {**head, **made.metrics, **costs})
    trackers.log(made)
    job.watch.step(made)


def sample_rows(chosen: Selection, step: int, prompts: Mapping[str, str]) -> list[SampleRow]:
    """The first rollout of each group for a sample table; None where it was not kept."""
    advantages = chosen.advantages_by_slot()
    return [
        SampleRow(
            step=step + 1,
            prompt=prompts[group.problem_id],
            completion=group.rollouts[0].completion.text,
            reward=group.rollouts[0].reward,
            advantage=float(advantages[group.slot][0]) if group.slot in advantages else None,
        )
        for group in chosen.groups[:SHOWN_SAMPLES]
    ]


def warn(job: Job, now: Progress, step: int, metrics: Mapping[str, Any]) -> None:
    """What a user should know while the run goes on, each once."""
    if metrics.get("lag/fresh_ok") == 0:
        broken = disagreement(metrics, *freshness_limits(job))
        job.warn(f"step {step + 1}: sampler and trainer disagree: {broken}", kind="fresh")
    cut = metrics.get("length/truncated") or 0.0
    if cut > TRUNCATED_WARNING:
        text = f"{cut:.0%} of the rollouts of step {step + 1} were cut at train.max_tokens"
        job.warn(text, kind="truncated")
    if metrics.get("optim/skipped"):
        job.warn(f"step {step + 1}: non-finite loss or gradient, update skipped", kind="nonfinite")
    if now.buffer is not None:
        for text in now.buffer.warnings(step=step, total_steps=job.recipe.train.steps):
            job.warn(text)


def disagreement(metrics: Mapping[str, Any], limit: float, clip_limit: float) -> str:
    """Which of the two limits of freshness broke, by how much."""
    mean, clipped = metrics.get("lag/fresh_mean_abs"), metrics.get("lag/fresh_clip")
    found = []
    if mean is not None and mean > limit:
        found.append(f"{mean:.3g} per token on average (lag.fresh_limit = {limit:g})")
    if clipped is not None and clipped >= clip_limit:
        text = f"{clipped:.2%} of the tokens are outside the clip range"
        found.append(f"{text} (lag.fresh_clip = {clip_limit:g})")
    return ", and ".join(found)


def warn_flat(job: Job, before: Mapping[str, Any]) -> None:
    """Say at the start that most groups will carry no signal, if the base model's rates say so."""
    share = before.get("validate_before/flat_share")
    if share is not None and share > FLAT_WARNING:
        job.warn(
            f"about {share:.0%} of the groups will be all right or all wrong and teach nothing "
            "(from the validation before training)"
        )


# Names that every line has; absent is null, never 0 (docs/algorithms.md 15, docs/metrics.md).
ABSENT: dict[str, None] = dict.fromkeys(
    (
        *("reward/mean", "reward/std", "reward/success", "reward/unscored"),
        *("reward/kept_mean", "reward/kept_std", "reward/kept_success", "reward/kept_unscored"),
        *("loss/policy", "loss/kl", "loss/entropy", "loss/replay", "loss/total"),
        *("loss/dual_clipped", "entropy", "save/merge_delta"),
        *("optim/lr", "optim/grad_norm", "optim/steps", "optim/skipped"),
        *("update/passes", "update/tokens", "update/padding_share", "update/flops"),
        *("ratio/p05", "ratio/p50", "ratio/p95", "ratio/max", "ratio/logratio_std"),
        *("clip/tokens", "clip/groups", "clip/adv_mass", "clip/clip_mass", "clip/common_mass"),
        *("clip/adv_share", "clip/clip_raw", "clip/clip_active"),
        *("clip/wclip_raw", "clip/wclip_active", "clip/wclip_common"),
        *("kl/k1", "kl/k2", "kl/k3"),
        *("mismatch/mean", "mismatch/p95", "mismatch/max", "mismatch/k1", "mismatch/k3"),
        *("mismatch/abs_mean", "mismatch/abs_max"),
        *("mismatch/unscored", "mismatch/changed"),
        *("replay/loss_nll", "replay/lambda", "replay/tokens", "replay/rollouts", "replay/fill"),
        *("replay/waiting", "replay/buffer_size", "replay/prompts", "replay/eligible"),
        *("replay/drawable", "replay/blocked_by_cooldown", "replay/duplicates"),
        *("replay/acc_mean", "replay/weight_ess", "replay/age_mean", "replay/age_max"),
        *("replay/n_replayed_max", "replay/kl_to_behaviour", "replay/grad_share"),
        *("lag/fingerprint_ok", "lag/fresh_ok", "lag/fresh_mean_abs", "lag/fresh_clip"),
        *("validate/reward", "validate/success", "validate/problems", "validate/samples"),
        *("validate/unscored", "validate/length_mean", "validate/truncated"),
        *("validate/shortened", "validate/without_room", "validate/flat_share"),
    )
)
