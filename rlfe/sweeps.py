"""A recipe's matrix -> the cells of an experiment, and how far each cell is.

A matrix key is a configuration key with a list of values, or a free name with a list of tables
that change several keys together. What `--set` fixes is no longer varied. Not here: running the
cells (`rlfe.cli.sweep`). Try: `cells(["lr-ladder"])[0].name`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlfe import checkpoints, records
from rlfe.config import Resolved, check, flat, load
from rlfe.errors import RequestError
from rlfe.naming import cell_of, format_cell
from rlfe.rundir import RunDir
from rlfe.schema import Recipe
from rlfe.toml import parse_key, word

_ABSENT = object()  # equal to no value of a recipe, not even to none


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a sweep.

    `Cell(name="..._nobuf_lr6e6", overrides=("optim.lr=6e-06",), recipe=Recipe())`
    """

    name: str
    overrides: tuple[str, ...]
    recipe: Recipe


class State(StrEnum):
    """How far a cell is."""

    TODO = "to do"
    BEGUN = "begun"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`Progress(state=State.BEGUN, step=120, total=500)`"""

    state: State
    step: int
    total: int


def cells(
    recipes: Sequence[str],
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Cell]:
    """The cells of a recipe's matrix, the last key varying fastest; one cell without a matrix.

    Raises:
        RequestError: Two cells have one name, or a cell's settings are refused.
    """
    resolved = load(recipes, sets, environment)
    named = {".".join(parse_key(text.partition("=")[0].strip())) for text in sets}
    choices = _open_choices(resolved.recipe, named)
    found: dict[str, Cell] = {}
    for combination in itertools.product(*choices):
        changes = {key: item for choice in combination for key, item in choice.items()}
        overrides = tuple(f"{key}={word(item)}" for key, item in changes.items())
        recipe = load(recipes, (*sets, *overrides), environment).recipe
        check(recipe)
        name = format_cell(cell_of(recipe))
        if name in found:
            raise RequestError(
                f"two cells are named {name}: {' '.join(found[name].overrides)} and "
                f"{' '.join(overrides)}",
                hint="Give the table of one of them its own naming.arm.",
            )
        found[name] = Cell(name=name, overrides=overrides, recipe=recipe)
    return list(found.values())


def varied(resolved: Resolved) -> list[str]:
    """Keys of the matrix that are still open: neither --set nor an option says which value.

    A choice that is the only one left counts too while the settings are not what it says.
    """
    given = {key for key, origin in resolved.origins.items() if origin.startswith("--")}
    values = resolved.values()
    keys: list[str] = []
    for options in _open_choices(resolved.recipe, given):
        settled = len(options) == 1 and all(values.get(k) == v for k, v in options[0].items())
        keys += [] if settled else [key for one in options for key in one]
    return list(dict.fromkeys(keys))


def _open_choices(recipe: Recipe, named: Collection[str]) -> list[list[dict[str, Any]]]:
    """The choices of each matrix key that are left when the named keys are fixed."""
    fixed = {key: item for key, item in flat(recipe).items() if key in named}
    return [_without(_choices(key, entries), fixed) for key, entries in recipe.matrix.items()]


def _choices(key: str, entries: Sequence[Any]) -> list[dict[str, Any]]:
    """Each entry as its changes: `("optim.lr", [1e-6])` -> `[{"optim.lr": 1e-6}]`."""
    return [dict(entry) if isinstance(entry, Mapping) else {key: entry} for entry in entries]


def _without(choices: Sequence[dict[str, Any]], fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices less what is fixed elsewhere; those that became equal count once.

    Where one of them already says the fixed value, those that say another are no choice any more:
    `--set replay.strategy=none` leaves the arm without a buffer, `--set replay.lambda=0.3` both.
    """
    left: list[dict[str, Any]] = []
    for key, item in fixed.items():
        if any(choice.get(key, _ABSENT) == item for choice in choices):
            choices = [choice for choice in choices if choice.get(key, item) == item]
    for choice in choices:
        rest = {key: item for key, item in choice.items() if key not in fixed}
        if rest not in left:
            left.append(rest)
    return left


def train_command(
    recipes: Sequence[str], sets: Sequence[str], cell: Cell, options: Sequence[str] = ()
) -> list[str]:
    """The `rlfe train` command of a cell, as words."""
    named = [word for name in recipes for word in ("--recipe", name)]
    changed = [word for text in (*sets, *cell.overrides) for word in ("--set", text)]
    return ["rlfe", "train", *named, *changed, *options]


def progress(cell: Cell, runs_dir: Path) -> Progress:
    """How far a cell is: done when its last checkpoint is complete."""
    run, total = RunDir(runs_dir / cell.name), cell.recipe.train.steps
    if not run.config.exists():
        return Progress(state=State.TODO, step=0, total=total)
    last = run.checkpoint(total)
    if last.is_dir() and not checkpoints.problems(last):
        return Progress(state=State.DONE, step=total, total=total)
    return Progress(state=State.BEGUN, step=last_step(run), total=total)


def last_step(run: RunDir) -> int:
    """The newest step of a run's metrics; 0 before the first."""
    rows = records.read_jsonl(run.metrics)
    return max((int(row["step"]) for row in rows), default=0)
