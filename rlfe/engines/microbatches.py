"""How the rows of a batch are divided over forward passes: by a budget of tokens, alike together.

Rows of similar length stand together, so little is padding; on a CPU rows of one prompt do, which
then counts once (`packing.py`). Longest first: if memory is short, that shows in the first pass.
Not here: what a pass computes.

Shapes: B rows, L tokens, R rows of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlfe.engines.packing import prompt_keys
from rlfe.types import Batch

TOKEN_BUDGET = {"cpu": 2048, "cuda": 16384}  # tokens of a micro-batch
OTHER_BUDGET = 8192  # on any other device


def token_budget(device: str) -> int:
    """Tokens of a micro-batch where the recipe names none."""
    return TOKEN_BUDGET.get(device, OTHER_BUDGET)


@dataclass(slots=True)
class Budget:
    """What a pass may hold: `rows`, or where they are None `tokens`, padding included."""

    rows: int | None
    tokens: int
    halved: bool = False

    def halve(self) -> None:
        """Half of it from here on; at least one row is always taken."""
        self.halved = True
        if self.rows is not None:
            self.rows = max(1, self.rows // 2)
        self.tokens = max(1, self.tokens // 2)

    def words(self) -> str:
        if self.rows is not None:
            return f"train.micro_batch_rollouts = {self.rows}"
        return f"compute.token_budget = {self.tokens}"


def micro_batches(
    batch: Batch, graded_B: np.ndarray, budget: Budget, *, share: bool = False
) -> Iterator[np.ndarray]:
    """Row indices of each forward pass: rows that need a gradient apart, alike rows together.

    `share`: alike means of one prompt, which counts once; else of one length. A row that is longer
    than the budget is a pass of its own.
    """
    length_B = lengths(batch.mask_BL)
    keys = prompt_keys(batch) if share else [b""] * len(length_B)
    sign = 1 if share else -1
    for graded in (True, False):
        parts: list[list[int]] = []
        rows = np.flatnonzero(graded_B == graded).tolist()
        for row in sorted(rows, key=lambda row: (keys[row], sign * length_B[row])):
            longer = [*parts[-1], row] if parts else [row]
            tokens = pass_tokens(batch, longer, keys if share else None)
            if parts and _fits(len(longer), tokens, budget):
                parts[-1] = longer
            else:
                parts.append([row])
        if not share:
            _level_last(parts)
        yield from map(np.array, parts)


def with_the_few(batch: Batch, graded_B: np.ndarray, budget: Budget) -> np.ndarray:
    """Rows to be passed as if with a gradient, [B]: all, if one pass would hold those without one.

    Compiled layers need another graph for a pass without a gradient. That of these rows is 0.
    """
    length_R = lengths(batch.mask_BL)[~graded_B]
    few = 0 < len(length_R) < len(graded_B)
    if few and _fits(len(length_R), len(length_R) * int(length_R.max()), budget):
        return np.ones_like(graded_B)
    return graded_B


def _level_last(parts: list[list[int]]) -> None:
    """Divide the rows of the last two passes evenly: what is left over alone is no better.

    Compiled layers need another graph for a pass of one row, and for one of few tokens.
    """
    if len(parts) > 1 and len(parts[-1]) < len(parts[-2]):
        rows = parts[-2] + parts[-1]  # longest first: no half of them is larger than the former
        middle = -(-len(rows) // 2)
        parts[-2:] = [rows[:middle], rows[middle:]]


def _fits(rows: int, tokens: int, budget: Budget) -> bool:
    return tokens <= budget.tokens if budget.rows is None else rows <= budget.rows


def pass_tokens(batch: Batch, rows: Sequence[int], keys: Sequence[bytes] | None) -> int:
    """Tokens that a pass over these rows computes.

    `keys` None: rows padded to the longest. Else the rows' masked tokens and the tokens of their
    different prompts, told apart by `keys` of the batch.
    """
    if keys is None:
        return len(rows) * int(lengths(batch.mask_BL[rows]).max())
    prompts = {keys[row]: int(np.argmax(batch.mask_BL[row])) for row in rows}
    return int(batch.mask_BL[rows].sum()) + sum(prompts.values())


def rows_of(batch: Batch, rows: np.ndarray) -> Batch:
    """Some rows, cut to their own width (at least 1)."""
    width = max(1, int(lengths(batch.mask_BL[rows]).max()))

    def cut(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[rows, :width]

    return Batch(
        ids_BL=batch.ids_BL[rows, :width],
        mask_BL=batch.mask_BL[rows, :width],
        behavior_logp_BL=batch.behavior_logp_BL[rows, :width],
        advantage_B=batch.advantage_B[rows],
        weight_B=batch.weight_B[rows],
        successes_B=batch.successes_B[rows],
        group_B=batch.group_B[rows],
        source_B=batch.source_B[rows],
        old_logp_BL=cut(batch.old_logp_BL),
        reference_logp_BL=cut(batch.reference_logp_BL),
    )


def lengths(mask_BL: np.ndarray) -> np.ndarray:
    """Tokens up to the last masked one, [B]; 0 where nothing is masked."""
    width = mask_BL.shape[1]
    last_B: np.ndarray = width - np.argmax(mask_BL[:, ::-1], axis=1)
    return np.where(mask_BL.any(axis=1), last_B, 0)
