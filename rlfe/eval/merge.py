"""Reading a result table that an earlier, perhaps broken, run left, and merging new rows into it.

A point is (cell, step, task) under one settings text, with all its k. It is done only if every
wanted k has a finite score; anything else is done again and its old rows are not kept twice. Rows
of other settings stay. A last line without a line end counts as cut, because a value cut at a
digit cannot be told from a whole one. Two different values for one point are refused: taking the
first, the last or the mean in silence would be wrong.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlfe.errors import RequestError

Row = dict[str, str]
Point = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which column means what. The default is rlfe's own table."""

    cell: str = "cell"
    step: str = "step"
    task: str = "task"
    k: str = "k"
    score: str = "score"
    settings: tuple[str, ...] = ("settings",)

    @property
    def point(self) -> tuple[str, ...]:
        return (self.cell, self.step, self.task, *self.settings)


OWN = Layout()


def read_rows(text: str, layout: Layout = OWN) -> list[Row]:
    """Rows of a table, by column name; repeated headers and a cut last line are left out.

    Raises:
        RequestError: a column is missing, or one (point, k) has two different scores.
    """
    whole = text[: text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(whole.replace("\r\n", "\n"))))
    if not lines:
        return []
    header = lines[0]
    absent = [name for name in (*layout.point, layout.k, layout.score) if name not in header]
    if absent:
        raise RequestError(
            f"the table has no column {', '.join(absent)} (it has {', '.join(header)})",
            hint="Give another file with --csv, or move this one away.",
        )
    rows = [
        dict(zip(header, line, strict=True))
        for line in lines[1:]
        if line != header and len(line) == len(header)
    ]
    return _without_repeats(rows, layout)


def _without_repeats(rows: Iterable[Row], layout: Layout) -> list[Row]:
    unique: dict[Point, Row] = {}
    for row in rows:
        key = (*point_of(row, layout), normal(row[layout.k]))
        other = unique.setdefault(key, row)
        if normal(other[layout.score]) != normal(row[layout.score]):
            raise RequestError(
                f"{row[layout.cell]} step {row[layout.step]} {row[layout.task]} k={row[layout.k]} "
                f"stands twice: {other[layout.score]} and {row[layout.score]}",
                hint="Remove the wrong row, or move the file away and evaluate again.",
            )
    return list(unique.values())


def point_of(row: Mapping[str, str], layout: Layout = OWN) -> Point:
    """The point of a row; numbers compare as numbers (0.6000000000000001 is 0.6)."""
    return tuple(normal(row[name]) for name in layout.point)


def normal(value: object) -> str:
    """One text per number: twelve significant digits. Other texts stay as they are."""
    text = str(value).strip()
    try:
        number = float(text)
    except ValueError:
        return text
    return "nan" if math.isnan(number) else f"{number:.12g}"


def done_points(
    rows: Iterable[Row], layout: Layout = OWN, ks: Collection[int] | None = None
) -> set[Point]:
    """Points with a finite score for every k (`ks`; None: for every row they have)."""
    scored: dict[Point, set[str]] = {}
    broken: set[Point] = set()
    for row in rows:
        point = point_of(row, layout)
        scored.setdefault(point, set()).add(normal(row[layout.k]))
        if not is_finite(row[layout.score]):
            broken.add(point)
    wanted = {normal(k) for k in ks or ()}
    return {point for point, found in scored.items() if wanted <= found} - broken


def is_finite(text: str) -> bool:
    """Whether a cell holds a number; empty, nan and inf are no results."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def usable_rows(rows: Sequence[Row], redo: Collection[Point], layout: Layout = OWN) -> list[Row]:
    """Old rows that may stay: not of a point in `redo`, and not of a broken point."""
    kept = done_points(rows, layout) - set(redo)
    return [row for row in rows if point_of(row, layout) in kept]


def sort_rows(rows: Iterable[Row], layout: Layout = OWN) -> list[Row]:
    """Sorted by cell, step as a number, task, settings, k as a number."""

    def order(row: Row) -> tuple[str, float, str, list[str], float]:
        settings = [row[name] for name in layout.settings]
        return (
            row[layout.cell],
            float(row[layout.step]),
            row[layout.task],
            settings,
            float(row[layout.k]),
        )

    return sorted(rows, key=order)


def csv_text(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """The table as text: one header, one row a line, line ends of this format only."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
