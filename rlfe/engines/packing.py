"""Rows of one prompt in one sequence: the prompt is computed once for all its completions.

What: `[prompt][completion 1][completion 2]...` with positions that restart behind the prompt and a
mask under which a completion sees the prompt and itself. On a CPU this saves most of the work of
a group of eight (prompts are often longer than replies). On a GPU dense masks cost more than they
save, and architectures with sliding windows need masks of their own: rows stay apart there.

Shapes: B rows, T tokens of a packed sequence, M masked tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfe.types import Batch

LIMIT = 2048  # tokens of one sequence: the mask grows with the square


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One packed sequence. `at_M` predict the masked tokens, which stand at (row_M, column_M)."""

    ids_T: np.ndarray
    position_T: np.ndarray
    segment_T: np.ndarray  # 0: prompt, k: k-th completion
    at_M: np.ndarray
    row_M: np.ndarray
    column_M: np.ndarray

    def allowed_TT(self) -> np.ndarray:
        """Which token (row) may look at which (column)."""
        place_T = np.arange(self.ids_T.size)
        own_TT = self.segment_T[:, None] == self.segment_T[None]
        seen_TT: np.ndarray = own_TT | (self.segment_T == 0)[None]
        return seen_TT & (place_T[:, None] >= place_T[None])


def full_attention(model: Any) -> bool:
    """Whether every layer attends to everything before: no window, no recurrent state."""
    facts = model.config.get_text_config().to_dict()
    kinds = set(facts.get("layer_types") or ())
    if kinds:
        return kinds == {"full_attention"}
    return not facts.get("sliding_window") or facts.get("use_sliding_window") is False


def can_share(model: Any, device: str) -> bool:
    """Whether the model takes such a mask and sharing pays: full attention, on a CPU."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return device == "cpu" and takes and full_attention(model)


def prompt_keys(batch: Batch) -> list[bytes]:
    """What tells prompts apart: the tokens before the first masked one, as bytes."""
    starts = np.argmax(batch.mask_BL, axis=1)
    pairs = zip(batch.ids_BL, starts, strict=True)
    return [ids_L[:start].tobytes() for ids_L, start in pairs]


def sequences(batch: Batch, limit: int = LIMIT) -> Iterator[Packed]:
    """The rows of a batch as packed sequences, at most `limit` tokens each where possible."""
    groups: dict[bytes, list[int]] = {}
    for row, key in enumerate(prompt_keys(batch)):
        if batch.mask_BL[row].any():
            groups.setdefault(key, []).append(row)
    for rows in groups.values():
        part: list[int] = []
        size = start = int(np.argmax(batch.mask_BL[rows[0]]))
        for row in rows:
            length = _end(batch.mask_BL[row]) - start
            if part and size + length > limit:
                yield _sequence(batch, part, start)
                part, size = [], start
            part.append(row)
            size += length
        yield _sequence(batch, part, start)


def _sequence(batch: Batch, rows: Sequence[int], start: int) -> Packed:
    ids = [batch.ids_BL[rows[0], :start]]
    positions, segments = [np.arange(start)], [np.zeros(start, np.int64)]
    at, row_M, column_M = [], [], []
    offset = start
    for segment, row in enumerate(rows, start=1):
        end = _end(batch.mask_BL[row])
        length = end - start
        ids.append(batch.ids_BL[row, start:end])
        positions.append(np.arange(start, end))
        segments.append(np.full(length, segment))
        before = np.concatenate([[start - 1], np.arange(offset, offset + length - 1)])
        masked = np.flatnonzero(batch.mask_BL[row, start:end])
        at.append(before[masked])
        row_M.append(np.full(masked.size, row))
        column_M.append(start + masked)
        offset += length
    return Packed(
        ids_T=np.concatenate(ids),
        position_T=np.concatenate(positions),
        segment_T=np.concatenate(segments),
        at_M=np.concatenate(at),
        row_M=np.concatenate(row_M),
        column_M=np.concatenate(column_M),
    )


def _end(mask_L: np.ndarray) -> int:
    return int(mask_L.size - np.argmax(mask_L[::-1]))
