"""From groups and replay entries to padded arrays, and their division into optimiser steps.

What: rows of a step as one `Batch`, mini-batches (one optimiser step each). Not here: what a row is
worth (advantages.py), how losses divide (losses.py), micro-batches (engines). A group may be split
over mini-batches: its advantages are already fixed. docs/algorithms.md 2.5, 10.5, 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rlfe.types import Batch, Finish, Group

FRESH, REPLAY = 0, 1
NO_GROUP = -1  # successes_B and group_B of a replay row


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence of an optimiser step.

    `Row(prompt_ids=(1, 2), completion_ids=(5, 0), behavior_logp=(-.1, -.2), advantage=2.47)`
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    behavior_logp: tuple[float, ...]
    advantage: float = 0.0
    successes: int = NO_GROUP
    group: int = NO_GROUP
    source: int = FRESH
    trained: bool = True  # False: no token in the mask (a cut rollout under train.mask_truncated)


def fresh_rows(
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    successes: Sequence[int],
    *,
    mask_truncated: bool = False,
) -> list[Row]:
    """Rows of the kept groups in batch order, all per-rollout fields cut alike.

    Args:
        groups: Kept groups.
        advantages: One vector [G] per group.
        successes: k of each group.
        mask_truncated: Take cut rollouts out of the loss mask (they stay in the statistics).
    """
    if not len(groups) == len(advantages) == len(successes):
        raise ValueError(
            f"{len(groups)} groups, {len(advantages)} advantages, {len(successes)} success counts"
        )
    rows = []
    for group, advantage_G, k in zip(groups, advantages, successes, strict=True):
        for rollout, advantage in zip(group.rollouts, advantage_G, strict=True):
            done = rollout.completion
            row = Row(
                prompt_ids=rollout.prompt_ids,
                completion_ids=done.token_ids,
                behavior_logp=done.logprobs,
                advantage=float(advantage),
                successes=k,
                group=group.slot,
                trained=not (mask_truncated and done.finish is Finish.LENGTH),
            )
            rows.append(row)
    return rows


def padded(rows: Sequence[Row], *, pad_id: int) -> Batch:
    """Rows as right-padded arrays; the width is that of the longest row (at least 1)."""
    count = len(rows)
    width = max([1, *(len(row.prompt_ids) + len(row.completion_ids) for row in rows)])
    ids_BL = np.full((count, width), pad_id, np.int64)
    mask_BL = np.zeros((count, width), bool)
    behavior_logp_BL = np.zeros((count, width), np.float32)
    for index, row in enumerate(rows):
        if len(row.completion_ids) != len(row.behavior_logp):
            raise ValueError(
                f"row {index} has {len(row.completion_ids)} completion tokens and "
                f"{len(row.behavior_logp)} log-probabilities"
            )
        start = len(row.prompt_ids)
        end = start + len(row.completion_ids)
        ids_BL[index, :start] = row.prompt_ids
        ids_BL[index, start:end] = row.completion_ids
        behavior_logp_BL[index, start:end] = row.behavior_logp
        mask_BL[index, start:end] = row.trained
    return Batch(
        ids_BL=ids_BL,
        mask_BL=mask_BL,
        behavior_logp_BL=behavior_logp_BL,
        advantage_B=np.array([row.advantage for row in rows], np.float64),
        weight_B=np.ones(count, np.float64),
        successes_B=np.array([row.successes for row in rows], np.int64),
        group_B=np.array([row.group for row in rows], np.int64),
        source_B=np.array([row.source for row in rows], np.int8),
    )


def mini_batches(
    count: int,
    *,
    size: int | None,
    shuffle: np.random.Generator,
    remainder: str = "short",
    pad: np.random.Generator | None = None,
) -> list[np.ndarray]:
    """Row indices of each optimiser step of one epoch, int64.

    Args:
        count: Trained rows of the step; 0 gives no optimiser step.
        size: Rollouts per optimiser step; None: all of them.
        shuffle: Generator (run_seed, "shuffle", t, epoch), used if there is more than one.
        remainder: `short`: the last one is smaller. `copy`: uniformly drawn rows are repeated up
            to a multiple. `drop`: the incomplete one is left out (fewer rows than `size`: none).
        pad: Generator (run_seed, "pad", t), needed by `copy`.
    """
    if size is not None and size < 1:
        raise ValueError(f"size has to be at least 1, got {size}")
    if remainder not in ("short", "copy", "drop"):
        raise ValueError(f'unknown remainder "{remainder}"; known: short, copy, drop')
    rows = np.arange(count, dtype=np.int64)
    if count == 0 or size is None:
        return [rows] if count else []
    missing = -count % size
    if remainder == "copy" and missing:
        assert pad is not None, "remainder copy draws from a generator"
        rows = np.concatenate([rows, pad.integers(count, size=missing)])
    if rows.size > size:
        rows = shuffle.permutation(rows)
    parts = [rows[start : start + size] for start in range(0, rows.size, size)]
    return [part for part in parts if remainder != "drop" or part.size == size]


def split_evenly(count: int, parts: int) -> list[slice]:
    """`count` things in order over `parts`, sizes differing by at most 1: 5 over 2 -> 3, 2."""
    if parts < 1:
        raise ValueError(f"parts has to be at least 1, got {parts}")
    small, larger = divmod(count, parts)
    ends = np.cumsum([0] + [small + (index < larger) for index in range(parts)])
    return [slice(int(start), int(end)) for start, end in pairwise(ends)]


def select(batch: Batch, rows: np.ndarray) -> Batch:
    """Some rows of a batch in the given order (repeats allowed), same width."""
    old, reference = batch.old_logp_BL, batch.reference_logp_BL
    return Batch(
        ids_BL=batch.ids_BL[rows],
        mask_BL=batch.mask_BL[rows],
        behavior_logp_BL=batch.behavior_logp_BL[rows],
        advantage_B=batch.advantage_B[rows],
        weight_B=batch.weight_B[rows],
        successes_B=batch.successes_B[rows],
        group_B=batch.group_B[rows],
        source_B=batch.source_B[rows],
        old_logp_BL=None if old is None else old[rows],
        reference_logp_BL=None if reference is None else reference[rows],
    )


def joined(first: Batch, second: Batch, *, pad_id: int) -> Batch:
    """Rows of both, padded to the wider. An optional field of one only is 0 for the other's rows.

    Fresh rows come first, so that a run with replay numbers them as one without.
    """
    width = max(first.ids_BL.shape[1], second.ids_BL.shape[1])
    a, b = _widened(first, width, pad_id), _widened(second, width, pad_id)

    def rows(name: str) -> np.ndarray:
        return np.concatenate([getattr(a, name), getattr(b, name)])

    return Batch(
        ids_BL=rows("ids_BL"),
        mask_BL=rows("mask_BL"),
        behavior_logp_BL=rows("behavior_logp_BL"),
        advantage_B=rows("advantage_B"),
        weight_B=rows("weight_B"),
        successes_B=rows("successes_B"),
        group_B=rows("group_B"),
        source_B=rows("source_B"),
        old_logp_BL=_optional(a.old_logp_BL, b.old_logp_BL, a, b),
        reference_logp_BL=_optional(a.reference_logp_BL, b.reference_logp_BL, a, b),
    )


def _widened(batch: Batch, width: int, pad_id: int) -> Batch:
    extra = ((0, 0), (0, width - batch.ids_BL.shape[1]))
    if extra[1][1] == 0:
        return batch
    old, reference = batch.old_logp_BL, batch.reference_logp_BL
    return replace(
        batch,
        ids_BL=np.pad(batch.ids_BL, extra, constant_values=pad_id),
        mask_BL=np.pad(batch.mask_BL, extra),
        behavior_logp_BL=np.pad(batch.behavior_logp_BL, extra),
        old_logp_BL=None if old is None else np.pad(old, extra),
        reference_logp_BL=None if reference is None else np.pad(reference, extra),
    )


def _optional(
    first: np.ndarray | None, second: np.ndarray | None, a: Batch, b: Batch
) -> np.ndarray | None:
    if first is None and second is None:
        return None
    zeros = [np.zeros(batch.ids_BL.shape, np.float32) for batch in (a, b)]
    return np.concatenate(
        [zeros[0] if first is None else first, zeros[1] if second is None else second]
    )
