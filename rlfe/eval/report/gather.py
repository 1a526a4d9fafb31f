"""Reading run folders for a report: settings, training curves, per-problem counts.

Counts come from the `evals/scores_counts.parquet` that `rlfe eval` leaves in every run and in
`_base/<model>/`. Counts of different settings are different groups and never meet. Nothing is
computed here (`analysis.py`), nothing is loaded that needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlfe.config import read_run_config
from rlfe.errors import NotFoundError, RequestError
from rlfe.eval import merge
from rlfe.eval.tables import RATES
from rlfe.naming import cell_of_run, lr_tag
from rlfe.records import read_jsonl
from rlfe.rundir import RunDir
from rlfe.schema import Recipe
from rlfe.types import CellName


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder as a report needs it. `metrics` is one mapping a finished step."""

    dir: RunDir
    cell: CellName
    recipe: Recipe
    metrics: Sequence[Mapping[str, Any]]
    provenance: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.dir.name

    @property
    def arm(self) -> str:
        return self.cell.arm

    @property
    def lr_text(self) -> str:
        return lr_tag(self.cell.lr)

    @property
    def finished(self) -> bool:
        """Whether every step of the recipe was logged."""
        steps = {line["step"] for line in self.metrics}
        return steps >= set(range(1, self.recipe.train.steps + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Counts of one checkpoint on one task: right samples per problem, out of n each."""

    cell: str
    step: int
    correct_P: np.ndarray
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Points of one task under one settings text: they may be compared."""

    task: str
    settings: str
    n: int
    problems: tuple[str, ...]
    points: tuple[Point, ...]
    facts: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    def at(self, cell: str, step: int) -> Point | None:
        return next((p for p in self.points if (p.cell, p.step) == (cell, step)), None)

    def series(self, cell: str) -> list[Point]:
        """Points of a cell by step."""
        return sorted((p for p in self.points if p.cell == cell), key=lambda p: p.step)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Run folders by name.

    Raises:
        NotFoundError: A folder or its config.toml does not exist.
        RequestError: A folder's name is no run name.
    """
    runs = []
    for folder in folders:
        if not folder.is_dir():
            raise NotFoundError(
                f"{folder} does not exist", hint="See `rlfe runs` for what there is."
            )
        run = RunDir(folder)
        recipe = read_run_config(run.config)
        facts = json.loads(run.provenance.read_bytes()) if run.provenance.is_file() else {}
        runs.append(
            Run(
                dir=run,
                cell=cell_of_run(run.name, recipe),
                recipe=recipe,
                metrics=read_jsonl(run.metrics),
                provenance=facts,
            )
        )
    names = [run.name for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise RequestError(f"two run folders are called {', '.join(sorted(twice))}")
    return sorted(runs, key=lambda run: run.name)


def read_groups(runs: Sequence[Run], runs_dir: Path | None = None) -> list[Group]:
    """Everything that was evaluated for these runs and their base models, by task and settings."""
    folders = [run.dir.path / "evals" for run in runs]
    for run in runs:
        root = runs_dir or run.dir.path.parent
        folders.append(root / "_base" / run.cell.model / "evals")
    rows: list[merge.Row] = []
    rates: dict[tuple[str, ...], dict[str, float]] = {}
    facts: dict[str, Any] = {}
    for folder in dict.fromkeys(folders):
        rows += _counts(folder / "scores_counts.parquet")
        rates |= _rates(folder / "scores_rates.csv")
        facts |= _settings(folder / "scores_settings.json")
    keys = sorted({(row["task"], row["settings"]) for row in rows})
    return [_group(task, settings, rows, rates, facts) for task, settings in keys]


def _group(
    task: str,
    settings: str,
    rows: Sequence[merge.Row],
    rates: Mapping[tuple[str, ...], Mapping[str, float]],
    facts: Mapping[str, Any],
) -> Group:
    here = [row for row in rows if (row["task"], row["settings"]) == (task, settings)]
    points: dict[tuple[str, int], dict[str, int]] = {}
    order: dict[str, None] = {}
    for row in here:
        points.setdefault((row["cell"], int(row["step"])), {})[row["problem"]] = int(row["correct"])
        order.setdefault(row["problem"])
    problems = tuple(order)
    whole, left_out = [], []
    for (cell, step), found in sorted(points.items()):
        if len(found) < len(problems):  # incomplete: never compared, never left out of a mean
            left_out.append(f"{cell} step {step}: {len(problems) - len(found)} problems missing")
            continue
        correct_P = np.array([found[problem] for problem in problems])
        side = rates.get((cell, str(step), _headline(task), settings), {})
        whole.append(Point(cell=cell, step=step, correct_P=correct_P, rates=side))
    return Group(
        task=task,
        settings=settings,
        n=int(here[0]["n"]),
        problems=problems,
        points=tuple(whole),
        facts=facts.get(settings, {}),
        left_out=tuple(left_out),
    )


def _headline(task: str) -> str:
    """Side measures stand under the name of the headline task."""
    return task.removesuffix("_base") + "_plus" if task.endswith("_base") else task


def _counts(path: Path) -> list[merge.Row]:
    if not path.is_file():
        return []
    import pyarrow.parquet

    columns = pyarrow.parquet.read_table(path).to_pydict()
    names = list(columns)
    return [
        {name: str(value) for name, value in zip(names, values, strict=True)}
        for values in zip(*columns.values(), strict=True)
    ]


def _rates(path: Path) -> dict[tuple[str, ...], dict[str, float]]:
    if not path.is_file():
        return {}
    layout = merge.Layout(k="samples", score="mean_tokens")
    rows = merge.read_rows(path.read_text(encoding="utf-8"), layout)
    return {
        (row["cell"], row["step"], row["task"], row["settings"]): {
            name: float(row[name]) for name in RATES
        }
        for row in rows
    }


def _settings(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return found
