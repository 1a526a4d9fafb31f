"""Evaluation tables as `rlfe eval` writes them, read for the card; numbers are never typed.

A table is a CSV (or Parquet) with one row per (cell, step, task, k), beside it
`<name>_rates.csv` and `<name>_settings.json`. Only rows of the pushed cells and of their base
models are taken. Not here: intervals and comparisons, which the tables bring along.
Try: `read_tables([Path("eval.csv")], {"x_mbpp_nobuf_lr1e6"})`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = frozenset({
    "cell", "step", "task", "k", "score", "low", "high", "interval", "problems", "n", "settings",
    "missing",
})  # fmt: skip


class Score(NamedTuple):
    """pass@k of one point. `Score(0.512, 0.471, 0.553)`; no interval: low and high are None."""

    score: float
    low: float | None
    high: float | None

    @property
    def text(self) -> str:
        """`51.2 [47.1, 55.3]`, in percent."""
        if self.low is None or self.high is None:
            return percent(self.score)
        return f"{percent(self.score)} [{percent(self.low)}, {percent(self.high)}]"


class Point(NamedTuple):
    """A place in the tables. `Point("x_mbpp_nobuf_lr1e6", 30, "mbpp_plus", "3fa9c1d2e0-n160")`"""

    cell: str
    step: int
    task: str
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything measured: scores by point and k, side measures, settings, what is missing."""

    scores: Mapping[Point, Mapping[int, Score]] = field(default_factory=dict)
    rates: Mapping[Point, Mapping[str, float]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (task, settings)
    samples: Mapping[tuple[str, str], int] = field(default_factory=dict)
    intervals: Mapping[tuple[str, str], str] = field(default_factory=dict)
    incomplete: tuple[str, ...] = ()

    def groups(self) -> list[tuple[str, str]]:
        """(task, settings) that share a table: rows of different settings never do."""
        return sorted({(point.task, point.settings) for point in self.scores})

    def steps(self, cell: str, task: str, settings: str) -> list[int]:
        """Steps of a cell that have scores, ascending."""
        return sorted(
            p.step for p in self.scores if (p.cell, p.task, p.settings) == (cell, task, settings)
        )


def percent(share: float) -> str:
    """One decimal, in percent: `percent(0.5119) == "51.2"`."""
    return f"{100 * share:.1f}"


def find_tables(folders: Iterable[Path]) -> list[Path]:
    """Score tables that lie directly in these folders (CSV; Parquet where there is no CSV)."""
    found: dict[Path, None] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.csv")) if folder.is_dir() else []:
            if set(_header(path)) >= COLUMNS:
                found[path.resolve()] = None
        for path in sorted(folder.glob("*.parquet")) if folder.is_dir() else []:
            if path.with_suffix(".csv").resolve() not in found and _fields(path) >= COLUMNS:
                found[path.resolve()] = None
    return list(found)


def _header(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def _fields(path: Path) -> set[str]:
    import pyarrow.parquet

    try:
        return set(pyarrow.parquet.read_schema(path).names)
    except (OSError, pyarrow.ArrowInvalid):
        return set()


def read_tables(paths: Sequence[Path], cells: Collection[str]) -> Results:
    """The rows of these cells (the base models' names among them); later tables win."""
    scores: dict[Point, dict[int, Score]] = {}
    rates: dict[Point, Mapping[str, float]] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    facts: dict[str, dict[tuple[str, str], Any]] = {"problems": {}, "n": {}, "interval": {}}
    incomplete: set[str] = set()
    for path in paths:
        for row in _rows(path):
            if row["cell"] not in cells:
                continue
            point = Point(row["cell"], int(row["step"]), row["task"], row["settings"])
            if row["missing"] or not row["score"]:
                incomplete.add(f"{point.cell} step {point.step} {point.task}")
                continue
            scores.setdefault(point, {})[int(row["k"])] = _score(row)
            for name, column in facts.items():
                column.setdefault((point.task, point.settings), row[name])
        rates |= _rates(path, cells)
        settings |= _settings(path)
    return Results(
        scores=scores, rates=rates, settings=settings, incomplete=tuple(sorted(incomplete)),
        problems={key: int(text) for key, text in facts["problems"].items()},
        samples={key: int(text) for key, text in facts["n"].items()},
        intervals=facts["interval"],
    )  # fmt: skip


def _score(row: Mapping[str, str]) -> Score:
    bounds = [float(row[side]) if row[side] else None for side in ("low", "high")]
    return Score(float(row["score"]), *bounds)


def _rows(path: Path) -> list[dict[str, str]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path).to_pylist()
        return [{k: "" if v is None else str(v) for k, v in row.items()} for row in table]
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def _rates(path: Path, cells: Collection[str]) -> dict[Point, Mapping[str, float]]:
    beside = path.with_name(f"{path.stem}_rates.csv")
    if not beside.is_file():
        return {}
    found: dict[Point, Mapping[str, float]] = {}
    with beside.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["cell"] in cells:
                point = Point(row["cell"], int(row["step"]), row["task"], row["settings"])
                found[point] = {k: float(v) for k, v in row.items() if k not in Point._fields and v}
    return found


def _settings(path: Path) -> dict[str, Mapping[str, Any]]:
    beside = path.with_name(f"{path.stem}_settings.json")
    return dict(json.loads(beside.read_text(encoding="utf-8"))) if beside.is_file() else {}
