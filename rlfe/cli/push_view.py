"""How a push looks: one row per commit, sizes in words, a line when a commit has landed.

Not here: what is planned (`rlfe.hub.plan`) and printing itself (`rlfe.cli.output`).
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

from rlfe.cli import output
from rlfe.hub.plan import Plan, State, Unit

COLUMNS = ("cell", "step", "new", "changed", "same", "remote only", "to send")


class Report:
    """A line per commit that landed: bytes, rate, and the time left at that rate."""

    def __init__(self, plan: Plan) -> None:
        self.total, self.count = plan.bytes_to_send, len(plan.to_send)
        self.done, self.number = 0, 0
        self.start = time.monotonic()

    def summary(self) -> str:
        """What is there and what is left, for a push that stops."""
        left = size_text(max(self.total - self.done, 0))
        return f"{size_text(self.done)} of {size_text(self.total)} are there, {left} are left"

    def landed(self, size: int, title: str) -> None:
        """Say that a commit landed."""
        self.done, self.number = self.done + size, self.number + 1
        seconds = max(time.monotonic() - self.start, 1e-3)
        left = max(self.total - self.done, 0) / (self.done / seconds) if self.done else 0.0
        output.note(
            f"[{self.number}/{self.count}] {title}: {size_text(size)}, "
            f"{size_text(self.done / seconds)}/s, {left:.0f} s left"
        )


def quiet_client() -> None:
    """The client's own bars move on a terminal only; tables beside the models are intended."""
    warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()


def rows_of(plan: Plan, *, exact: bool = False) -> list[list[Any]]:
    """One row per commit's unit: counts by state, and bytes to send."""
    rows = [_row(unit, plan, exact) for unit in plan.units]
    known = {(unit.cell, unit.checkpoint.name if unit.checkpoint else "") for unit in plan.units}
    for (cell, folder), files in _remote_only(plan).items():
        if (cell, folder) not in known:
            rows.append([cell, folder or "records", 0, 0, 0, files, 0 if exact else "-"])
    return rows


def _row(unit: Unit, plan: Plan, exact: bool) -> list[Any]:
    counts = {state: sum(item.state is state for item in unit.items) for state in State}
    folder = unit.checkpoint.name if unit.checkpoint else ""
    extra = _remote_only(plan).get((unit.cell, folder), 0)
    return [
        unit.cell, unit.checkpoint.step if unit.checkpoint else "records", counts[State.NEW],
        counts[State.CHANGED], counts[State.SAME], extra,
        unit.bytes_to_send if exact else size_text(unit.bytes_to_send),
    ]  # fmt: skip


def _remote_only(plan: Plan) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for file in plan.remote_only:
        cell, _, inside = file.remote.partition("/")
        folder = inside.split("/")[0] if inside.startswith("global_step_") else ""
        counts[cell, folder] = counts.get((cell, folder), 0) + 1
    return counts


def size_text(size: float) -> str:
    """`size_text(3_440_000_000) == "3.44 GB"`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
