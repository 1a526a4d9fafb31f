"""The optimiser steps of one training step: mini-batches, replay beside them, what they showed.

What: rows into batches, old and reference log-probabilities, forward-backward and step, replay
bookkeeping after an applied step. Not here: formulas (`losses`, `diagnostics`), which entries a
draw takes (`replay`). docs/algorithms.md 9, 10.5, 12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlfe.engines.base import Counting, Pass, Work
from rlfe.randomness import generator
from rlfe.training import batching, diagnostics, staleness
from rlfe.training.diagnostics import Metrics, TokenTable, row_nll, token_table
from rlfe.training.job import Job
from rlfe.training.objective import StepLoss, loss_settings
from rlfe.training.replay import Draw, Entry, ReplayBuffer
from rlfe.training.schedule import learning_rate
from rlfe.training.selection import Selection
from rlfe.types import Batch

PAD = 0  # any id: what lies right of a row is seen by nothing


@dataclass(slots=True)
class Updates:
    """What the optimiser steps of a training step did and saw, before each update."""

    lr: float
    draw: Draw | None = None
    norms: list[float | None] = field(default_factory=list)  # of tried steps; None: not told
    sums: list[dict[str, float | None]] = field(default_factory=list)
    tables: list[TokenTable] = field(default_factory=list)
    replayed: list[Metrics] = field(default_factory=list)
    mismatch: Metrics = field(default_factory=dict)
    fresh: staleness.Freshness | None = None
    grad_share: float | None = None
    work: Work | None = None

    @property
    def skipped(self) -> int:
        return sum(_skipped(norm) for norm in self.norms)

    @property
    def applied(self) -> bool:
        """Whether a step was applied whose gradient was not 0."""
        return self.lr > 0 and any(norm != 0 and not _skipped(norm) for norm in self.norms)


def _skipped(norm: float | None) -> bool:
    """Whether an optimiser step was not made: its gradient was not finite."""
    return norm is not None and not np.isfinite(norm)


def update(
    job: Job, step: int, chosen: Selection, buffer: ReplayBuffer | None, lag: int
) -> Updates:
    """Train on the kept groups of step `step` (0-based) and on what the buffer gives.

    Nothing is drawn and no optimiser step is made when the filter kept nothing. `lag` is the
    effective one; at 0 the sampler has to agree with the current weights.
    """
    recipe, train = job.recipe, job.recipe.train
    done = Updates(
        lr=learning_rate(
            step=step,
            total_steps=train.steps,
            lr=recipe.optim.lr,
            schedule=recipe.optim.schedule,
            warmup_steps=recipe.optim.warmup_steps,
        )
    )
    parts = _mini_batches(job, step, sum(len(group.rollouts) for group in chosen.kept_groups))
    if not parts:
        return done
    _work(job, step)  # what was computed outside of updates counts nowhere
    fresh = _fresh_batch(job, chosen, done)
    if buffer is not None:
        done.draw = buffer.draw(step, generator(job.seed, "replay", step))
    entries = done.draw.entries if done.draw else ()
    shares = batching.split_evenly(len(entries), len(parts))
    for rows, share in zip(parts, shares, strict=True):
        batch = batching.select(fresh, rows)
        _optimiser_step(job, step, batch, entries[share], buffer, done)
        if lag == 0 and done.fresh is None:
            done.fresh = _agreement(job, done.tables[0])
            done.mismatch = done.mismatch or _drift(done.tables[0])
    done.work = _work(job, step)
    return done


def _work(job: Job, step: int) -> Work | None:
    """What the learner computed since the last call; what it has to say goes to the user."""
    if not isinstance(job.learner, Counting):
        return None
    work = job.learner.work()
    for note in work.notes:
        job.warn(f"step {step + 1}: {note}")
    return work


def _mini_batches(job: Job, step: int, count: int) -> list[np.ndarray]:
    train = job.recipe.train
    pad = generator(job.seed, "pad", step)
    parts = []
    for epoch in range(train.epochs):
        parts += batching.mini_batches(
            count,
            size=train.mini_batch_rollouts,
            shuffle=generator(job.seed, "shuffle", step, epoch),
            remainder=train.remainder,
            pad=pad,
        )
    return parts


def _fresh_batch(job: Job, chosen: Selection, done: Updates) -> Batch:
    """The kept rollouts as a batch, with old and reference log-probabilities where needed."""
    recipe = job.recipe
    rows = batching.fresh_rows(
        chosen.kept_groups,
        chosen.advantages,
        [chosen.successes_P[index] for index in chosen.kept],
        mask_truncated=recipe.train.mask_truncated,
    )
    batch = batching.padded(rows, pad_id=PAD)
    if recipe.loss.old == "recomputed":
        old_logp_BL = job.learner.logprobs(batch)
        batch = replace(batch, old_logp_BL=old_logp_BL)
        done.mismatch = _mismatch(job, batch, old_logp_BL)
    if recipe.kl.beta > 0:
        batch = replace(batch, reference_logp_BL=job.learner.logprobs(batch, "reference"))
    return batch


def _mismatch(job: Job, batch: Batch, old_logp_BL: np.ndarray) -> Metrics:
    settings = job.recipe.mismatch
    arrays = (old_logp_BL, batch.behavior_logp_BL, batch.mask_BL)
    changed = diagnostics.changed_share(
        *arrays,
        mode=settings.mode,
        cap=settings.cap,
        low=settings.low,
        high=settings.high,
        limit=settings.limit,
    )
    return diagnostics.mismatch_metrics(*arrays) | {"mismatch/changed": changed}


def _drift(table: TokenTable) -> Metrics:
    """The mismatch without a pass of its own: what the first update saw, before it, at lag 0."""
    drift_BL = table.log_drift_T[None].astype(np.float32)
    whole_BL = np.ones(drift_BL.shape, bool)
    return diagnostics.mismatch_metrics(drift_BL, np.zeros_like(drift_BL), whole_BL)


def _optimiser_step(
    job: Job,
    step: int,
    batch: Batch,
    entries: Sequence[Entry],
    buffer: ReplayBuffer | None,
    done: Updates,
) -> None:
    count = len(batch.ids_BL)
    if entries:
        batch = batching.joined(batch, _replay_batch(entries), pad_id=PAD)
    weight = buffer.settings.weight if buffer is not None else 0.0
    loss = StepLoss(loss_settings(job.recipe, replay_weight=weight), batch)
    if _measures_share(job, step, done) and entries:
        done.grad_share = _grad_share(job, batch, weight)
    seen = job.learner.forward_backward(batch, loss)
    done.tables.append(token_table(batch, seen.logp_BL, is_level=job.recipe.loss.is_level))
    done.sums.append(_with_entropy(seen, batch))
    done.norms.append(job.learner.optim_step(done.lr))
    if entries and buffer is not None:
        done.replayed.append(diagnostics.replay_token_metrics(batch, seen.logp_BL))
        if not _skipped(done.norms[-1]):
            nll_B = row_nll(seen.logp_BL[count:], batch.mask_BL[count:])
            buffer.mark_replayed([entry.id for entry in entries], step=step, nll_B=list(nll_B))


def _replay_batch(entries: Sequence[Entry]) -> Batch:
    rows = [
        batching.Row(
            prompt_ids=entry.prompt_ids,
            completion_ids=entry.completion_ids,
            behavior_logp=entry.behavior_logp,
            source=batching.REPLAY,
        )
        for entry in entries
    ]
    return batching.padded(rows, pad_id=PAD)


def _with_entropy(seen: Pass, batch: Batch) -> dict[str, float | None]:
    """The pass's sums, with those of the entropy of fresh tokens in float64 (None: not seen)."""
    fresh_BL = batch.mask_BL & (batch.source_B == 0)[:, None]
    entropy = None
    if seen.entropy_BL is not None:
        entropy = float(seen.entropy_BL[fresh_BL].astype(np.float64).sum())
    return {**seen.sums, "entropy_sum": entropy, "tokens": float(fresh_BL.sum())}


def _measures_share(job: Job, step: int, done: Updates) -> bool:
    every = job.recipe.diagnostics.grad_every
    return every > 0 and step % every == 0 and done.grad_share is None


def _grad_share(job: Job, batch: Batch, weight: float) -> float | None:
    """Norm of the weighted replay gradient / (its norm + the policy's)."""
    norms = []
    for source, share in ((batching.REPLAY, weight), (batching.FRESH, 0.0)):
        part = batching.select(batch, np.flatnonzero(batch.source_B == source))
        loss = StepLoss(loss_settings(job.recipe, replay_weight=share), part)
        norms.append(job.learner.gradient_norm(part, loss))
    return norms[0] / sum(norms) if sum(norms) else None


def _agreement(job: Job, table: TokenTable) -> staleness.Freshness:
    """Guard 5: current against behaviour log-probabilities before the first update."""
    recipe = job.recipe
    limit, clip_limit = freshness_limits(job)
    drift_BL = table.log_drift_T[None]
    return staleness.freshness(
        drift_BL,
        np.zeros_like(drift_BL),
        np.ones(drift_BL.shape, bool),
        limit=limit,
        clip_limit=clip_limit,
        clip_low=recipe.loss.clip_low,
        clip_high=recipe.loss.clip_high,
    )


def freshness_limits(job: Job) -> tuple[float, float]:
    """(`lag.fresh_limit`, `lag.fresh_clip`) of this run."""
    lag = job.recipe.lag
    return staleness.limits(
        float32=job.float32, fresh_limit=lag.fresh_limit, fresh_clip=lag.fresh_clip
    )


def update_metrics(job: Job, done: Updates) -> Metrics:
    """Losses, optimiser, ratios, clipping and KL by success count, entropy, replay, freshness."""
    recipe = job.recipe
    finite = [norm for norm in done.norms if norm is not None and np.isfinite(norm)]
    tokens = _sum_of(done.sums, "tokens") or 0
    entropy = _sum_of(done.sums, "entropy_sum")
    metrics: Metrics = {
        **{name: _mean_of(done.sums, name) for name in LOSSES},
        "loss/dual_clipped": _sum_of(done.sums, "dual_clipped"),
        "entropy": entropy / tokens if tokens and entropy is not None else None,
        "optim/lr": done.lr,
        "optim/grad_norm": float(np.mean(finite)) if finite else None,
        "optim/steps": len(done.norms) - done.skipped,
        "optim/skipped": done.skipped,
        "tokens/trained": int(tokens),
        **done.mismatch,
        **(done.draw.metrics if done.draw else {}),
        **_replayed(done.replayed),
        **_work_metrics(done.work),
        "replay/grad_share": done.grad_share,
        "lag/fresh_ok": None if done.fresh is None else int(done.fresh.ok),
        "lag/fresh_mean_abs": None if done.fresh is None else done.fresh.mean_abs_log_ratio,
        "lag/fresh_clip": None if done.fresh is None else done.fresh.clip_raw,
    }
    if done.tables:
        metrics |= diagnostics.step_metrics(
            done.tables,
            group_size=recipe.train.group_size,
            buckets=diagnostics.used_buckets(
                recipe.diagnostics.k_buckets, group_size=recipe.train.group_size
            ),
            clip_low=recipe.loss.clip_low,
            clip_high=recipe.loss.clip_high,
        )
    return metrics


def _work_metrics(work: Work | None) -> Metrics:
    if work is None:
        return {}
    return {
        "update/passes": work.passes,
        "update/tokens": work.tokens,
        "update/padding_share": work.padding / work.tokens if work.tokens else None,
        "update/flops": work.flops,
    }


LOSSES = ("loss/policy", "loss/kl", "loss/entropy", "loss/replay", "loss/total")


def _mean_of(sums: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    """Mean over the optimiser steps; None without one."""
    known = [value for each in sums if (value := each[name]) is not None]
    return float(np.mean(known)) if known else None


def _sum_of(sums: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    known = [value for each in sums if (value := each.get(name)) is not None]
    return float(sum(known)) if known else None


def _replayed(parts: Sequence[Metrics]) -> Metrics:
    """Replay metrics of a training step: tokens summed, the rest token-weighted."""
    if not parts:
        return {}
    tokens = [part["replay/tokens"] or 0 for part in parts]
    found: Metrics = {"replay/tokens": int(sum(tokens))}
    for name in ("replay/loss_nll", "replay/kl_to_behaviour"):
        pairs = [(part[name], n) for part, n in zip(parts, tokens, strict=True)]
        total = sum(value * n for value, n in pairs if value is not None)
        found[name] = total / sum(tokens) if sum(tokens) else None
    return found
