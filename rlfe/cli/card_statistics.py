"""Paired comparisons and the gain plot of a card: numbers of `rlfe.eval` for `rlfe.hub`.

Per-problem counts lie beside every score table (`<name>_counts.parquet`); from them come gain and
forgetting of each cell's last evaluated step against its base model, and arms against each other
at equal model, task, rate and seed. pass@1 only; all of it exploratory, Holm over all rows.
Formulas: docs/statistics.md 4 and 6. Not here: wording and tables (`rlfe.hub.card_results`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlfe.hub.card_results import TRAINED_AS
from rlfe.hub.evaluations import Point
from rlfe.hub.material import Comparison
from rlfe.hub.series import Cell

if TYPE_CHECKING:
    import numpy as np

REPORT_SEED = 0


class Counts(NamedTuple):
    """Right samples of n per problem id."""

    n: int
    right: Mapping[str, int]


def read_counts(tables: Sequence[Path], names: set[str]) -> dict[Point, Counts]:
    """Per-problem counts of these cells and base models, from beside the tables."""
    from rlfe.eval import tables as eval_tables

    found: dict[Point, dict[str, int]] = {}
    samples: dict[Point, int] = {}
    for table in tables:
        path = table.with_name(f"{table.stem}_counts.parquet")
        for row in eval_tables.read_parquet(path) if path.is_file() else []:
            if row["cell"] in names:
                point = Point(row["cell"], int(row["step"]), row["task"], row["settings"])
                found.setdefault(point, {})[row["problem"]] = int(row["correct"])
                samples[point] = int(row["n"])
    return {point: Counts(samples[point], right) for point, right in found.items()}


def comparisons(counts: Mapping[Point, Counts], cells: Sequence[Cell]) -> list[Comparison]:
    """Every cell against its base, then arms against each other; p values corrected by Holm."""
    from rlfe.eval.paired import holm

    draws = _Draws()
    rows = [row for cell in cells for row in _against_base(cell, counts, draws)]
    for one, two in itertools.combinations(cells, 2):
        if _are_arms(one, two):
            rows += _arms(one, two, counts, draws)
    adjusted = holm([row.p for row in rows])
    return [replace(row, p=p) for row, p in zip(rows, adjusted, strict=True)]


class _Draws:
    """Bootstrap weights and signs per task and number of problems, shared by all comparisons."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}

    def of(self, task: str, problems: int) -> tuple[np.ndarray, np.ndarray]:
        from rlfe.eval.paired import draw_signs
        from rlfe.eval.statistics import DRAWS, draw_weights
        from rlfe.randomness import generator

        if (task, problems) not in self.made:
            weights = draw_weights(
                problems, DRAWS, generator(REPORT_SEED, "bootstrap", "card", task)
            )
            signs = draw_signs(problems, generator(REPORT_SEED, "signs", "card", task))
            self.made[task, problems] = weights, signs
        return self.made[task, problems]


def _against_base(cell: Cell, counts: Mapping[Point, Counts], draws: _Draws) -> list[Comparison]:
    rows = []
    trained = TRAINED_AS.get(cell.parts.task, (cell.parts.task,))
    for last in _last_points(cell, counts):
        base = Point(cell.parts.model, 0, last.task, last.settings)
        kind = "gain" if last.task == trained[0] else "forgetting"
        if base in counts and (kind == "gain" or last.task not in trained):
            name = f"{cell.name} step {last.step} minus base"
            rows += _compared(name, kind, counts[last], counts[base], last.task, draws)
    return rows


def _last_points(cell: Cell, counts: Mapping[Point, Counts]) -> list[Point]:
    """The last evaluated step of a cell per task and settings, in order."""
    last: dict[tuple[str, str], Point] = {}
    for point in sorted(point for point in counts if point.cell == cell.name):
        last[point.task, point.settings] = point
    return [last[key] for key in sorted(last)]


def _are_arms(one: Cell, two: Cell) -> bool:
    def key(cell: Cell) -> tuple[Any, ...]:
        return cell.parts.model, cell.parts.task, cell.parts.lr, cell.parts.seed

    return key(one) == key(two) and one.parts.arm != two.parts.arm


def _arms(one: Cell, two: Cell, counts: Mapping[Point, Counts], draws: _Draws) -> list[Comparison]:
    """Two arms at their last common step."""
    rows = []
    there = {(p.task, p.settings, p.step) for p in counts if p.cell == one.name}
    both = there & {(p.task, p.settings, p.step) for p in counts if p.cell == two.name}
    for task, settings in sorted({(task, settings) for task, settings, _ in both}):
        step = max(s for t, c, s in both if (t, c) == (task, settings))
        first = counts[Point(one.name, step, task, settings)]
        second = counts[Point(two.name, step, task, settings)]
        name = f"{one.parts.arm} minus {two.parts.arm}, {one.parts.model} step {step}"
        rows += _compared(name, "arms", first, second, task, draws)
    return rows


def _compared(
    name: str, kind: str, first: Counts, second: Counts, task: str, draws: _Draws
) -> list[Comparison]:
    """One comparison at pass@1; nothing when the two cannot be paired."""
    import numpy as np

    from rlfe.eval.forgetting import transitions
    from rlfe.eval.paired import compare

    problems = sorted(first.right)
    if problems != sorted(second.right) or first.n != second.n or len(problems) < 2:
        return []
    a_P = np.array([first.right[problem] for problem in problems], dtype=np.float64)
    b_P = np.array([second.right[problem] for problem in problems], dtype=np.float64)
    weights_BP, signs_BP = draws.of(task, len(problems))
    found = compare(a_P[:, None] / first.n, b_P[:, None] / second.n, weights_BP, signs_BP)
    moved = transitions(b_P, a_P, first.n, tested=False) if kind != "arms" else None
    return [
        Comparison(
            name=name, task=task, kind=kind, difference=100 * float(found.effect_K[0]),
            low=100 * float(found.low_K[0]), high=100 * float(found.high_K[0]),
            p=float(found.p_K[0]), detectable=100 * float(found.detectable_K[0]),
            lost=moved.lost if moved else None, found=moved.found if moved else None,
        )
    ]  # fmt: skip


def gain_plot(folders: Sequence[Path]) -> bytes | None:
    """Gain against forgetting over the steps (PNG), from the counts inside the run folders.

    None when nothing is to be drawn: it needs the trained task and another one, base included.
    """
    from tempfile import TemporaryDirectory

    from rlfe.eval.report.figures import write_figures
    from rlfe.eval.report.gather import read_groups, read_runs
    from rlfe.eval.report.series import path_of

    runs = read_runs([folder for folder in folders if (folder / "config.toml").is_file()])
    groups = read_groups(runs)
    paths = [path for run in runs if (path := path_of(run, groups)) is not None]
    if not paths:
        return None
    named = [{"name": run.name, "arm": run.arm} for run in runs]
    with TemporaryDirectory() as scratch:
        files = write_figures(Path(scratch), {"paths": paths, "groups": [], "runs": named})
        return next(path.read_bytes() for path in files if path.suffix == ".png")
