"""Counts what a learner's passes compute, for the speed report. Shapes: R rows of a pass."""

from __future__ import annotations

from typing import Any, Literal

from rlfe.engines.base import Work
from rlfe.engines.flops import Flops, known_peak, measured_peak
from rlfe.engines.microbatches import lengths, pass_tokens
from rlfe.engines.packing import prompt_keys
from rlfe.types import Batch


class Counter:
    """Sums over passes until somebody takes them. `Counter(flops_of(model))`"""

    def __init__(self, flops: Flops) -> None:
        self._flops = flops
        self._notes: list[str] = []
        self._start()

    def _start(self) -> None:
        self._passes = self._tokens = self._padding = 0
        self._done = 0.0

    def add(self, rows: Batch, *, graded: bool, share: bool) -> None:
        """One pass over `rows`; `share`: a prompt of several rows was computed once."""
        length_R = lengths(rows.mask_BL)
        keys = prompt_keys(rows) if share else None
        tokens = pass_tokens(rows, range(len(length_R)), keys)
        real = tokens if share else int(length_R.sum())
        scored = int(rows.mask_BL.sum())
        self._passes += 1
        self._tokens += tokens
        self._padding += tokens - real
        self._done += self._flops.of(length_R, tokens=real, scored=scored, graded=graded)

    def note(self, text: str) -> None:
        """Something to tell the user with the next account."""
        self._notes.append(text)

    def taken(self) -> Work:
        """The account so far; the next one starts anew."""
        made = Work(
            passes=self._passes,
            tokens=self._tokens,
            padding=self._padding,
            flops=self._done,
            notes=tuple(self._notes),
        )
        self._notes.clear()
        self._start()
        return made


def peak_of(device: Any, asked: float | Literal["measured"] | None) -> float | None:
    """FLOP/s to compare with: as asked, as measured, or of a GPU that the table knows."""
    if asked == "measured":
        return measured_peak(device)
    if asked is not None:
        return asked
    if device.type != "cuda":
        return None
    import torch

    return known_peak(torch.cuda.get_device_name(device))
