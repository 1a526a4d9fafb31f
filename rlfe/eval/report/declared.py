"""What was declared before the runs, and comparisons of arms that state no criterion.

A report takes what its runs declare (their config.toml), or a file. Each run's record keeps the
hashes of what was declared when it began (`rlfe.criteria.record`); what differs from them is
labelled. Comparisons on scores are paired over problems at the last step that both arms keep and
corrected together (Holm over all of one base model); curves of the step log stand over steps,
optimiser steps and tokens, because arms may do different numbers of updates, and their difference
is paired by step: one seed means the same problems in the same order. Rules: docs/statistics.md 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlfe import toml
from rlfe.config import flat
from rlfe.criteria import Comparison, Declared, arm_keys, declared_by, read_declared
from rlfe.eval.evidence import FREE
from rlfe.eval.paired import compare, holm
from rlfe.eval.report.analysis import Analysis
from rlfe.eval.report.gather import Group, Run
from rlfe.eval.report.page import CURVE_POINTS

BEFORE = "declared before the runs"
CHANGED = "changed after the fact"
UNRECORDED = "not recorded before the runs"
ONE_SEED = "1 seed: descriptive"
PER_STEP = {"updates": "optim/steps", "tokens": "tokens/sampled"}


class Pair(NamedTuple):
    """Two runs that differ in their arm; `each` is the value of the comparison's key, as text."""

    a: Run
    b: Run
    each: str


def of_runs(runs: Sequence[Run], file: Path | None = None) -> list[Declared]:
    """What a file declares, else what the runs themselves do, each once.

    Raises:
        NotFoundError: There is no such file.
        RequestError: It declares nothing, or something that cannot be decided.
    """
    if file is not None:
        return read_declared(file)
    found = [entry for run in runs for entry in declared_by(run.recipe, f"{run.name}/config.toml")]
    return list({(entry.name, entry.digest()): entry for entry in found}.values())


def recorded(declared: Declared, runs: Sequence[Run]) -> str:
    """Whether it stands in the records of the runs that take part, word for word."""
    part = [run for run in runs if side(declared, run)] or list(runs)
    hashes = {run.name: run.provenance.get("declared", {}).get(declared.name) for run in part}
    other = [name for name, digest in hashes.items() if digest not in (None, declared.digest())]
    if other:
        return (
            f"{CHANGED}: {', '.join(other[:3])}{' ...' if len(other) > 3 else ''} recorded another"
        )
    return UNRECORDED if None in hashes.values() else BEFORE


def side(declared: Declared, run: Run) -> str:
    """`treatment`, `control`, or nothing where the run is of neither arm."""
    values = flat(run.recipe)
    for name, keys in (("treatment", declared.treatment), ("control", declared.control)):
        if all(values.get(key) == value for key, value in arm_keys(keys).items()):
            return name
    return ""


def comparison_entry(
    comparison: Comparison, runs: Sequence[Run], analysis: Analysis
) -> dict[str, Any]:
    """Everything that the report prints of a comparison."""
    pairs = matched(comparison, runs)
    scores = [readout for readout in comparison.readouts if readout.startswith("eval/")]
    logged = [readout for readout in comparison.readouts if not readout.startswith("eval/")]
    seeds = {pair.a.recipe.run.seed for pair in pairs}
    notes = [] if len(seeds) > 1 else [ONE_SEED]
    differ = sorted({key for pair in pairs for key in differing(comparison, pair)})
    return {
        "name": comparison.name,
        "digest": comparison.digest(),
        "recorded": recorded(comparison, runs),
        "each": comparison.each or "",
        "scores": score_rows(comparison, pairs, scores, analysis),
        "steps": [row for pair in pairs for name in logged if (row := step_row(pair, name))],
        "curves": curves(comparison, pairs, logged),
        "notes": [
            *(["no pair of runs has both arms"] if not pairs else notes),
            *([f"arms also differ in {', '.join(differ)}"] if differ else []),
        ],
    }


def matched(comparison: Comparison, runs: Sequence[Run]) -> list[Pair]:
    """Runs of both arms with the same model, seed and value of `each`, in that order."""
    places: dict[tuple[str, Any, int], dict[str, Run]] = {}
    for run in runs:
        arm, value = side(comparison, run), flat(run.recipe).get(comparison.each or "")
        if arm:
            place = (run.cell.model, value, run.recipe.run.seed)
            places.setdefault(place, {}).setdefault(arm, run)
    return [
        Pair(found["treatment"], found["control"], "" if value is None else toml.value(value))
        for (_, value, _), found in sorted(places.items(), key=lambda item: str(item[0]))
        if len(found) == 2
    ]


def differing(comparison: Comparison, pair: Pair) -> list[str]:
    """Keys that differ although no arm names their section."""
    named = {*arm_keys(comparison.treatment), *arm_keys(comparison.control)}
    own = tuple(f"{key.partition('.')[0]}." for key in named)
    a, b = flat(pair.a.recipe), flat(pair.b.recipe)
    return [
        key
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.startswith((*FREE, *own))
    ]


# -- scores


def score_rows(
    comparison: Comparison, pairs: Sequence[Pair], readouts: Sequence[str], analysis: Analysis
) -> list[dict[str, Any]]:
    """One row per pair and readout that both evaluated; p values corrected within a base model."""
    rows = [
        row
        for pair in pairs
        for name in readouts
        if (row := _score(pair, name, analysis)) is not None
    ]
    for model in {row["model"] for row in rows}:
        here = [row for row in rows if row["model"] == model]
        for row, p in zip(here, holm([row["p"] for row in here]), strict=True):
            row["holm"], row["family"] = round(p, 4), len(here)
    return rows


def _score(pair: Pair, readout: str, analysis: Analysis) -> dict[str, Any] | None:
    _, task, name = readout.split("/")
    k = int(name.removeprefix("pass@"))
    found = _last_common(pair, task, k, analysis)
    if found is None:
        return None
    group, step = found
    a, b = (group.at(run.name, step) for run in (pair.a, pair.b))
    assert a is not None
    assert b is not None
    draws = analysis.draws(group)
    values = [analysis.values(group, point)[:, k - 1 : k] for point in (a, b)]
    result = compare(values[0], values[1], draws.weights_BP, draws.signs_BP)
    return {
        "model": pair.a.cell.model,
        "each": pair.each,
        "seed": pair.a.recipe.run.seed,
        "readout": f"{task} pass@{k}",
        "step": step,
        "a": pair.a.name,
        "b": pair.b.name,
        "effect": float(result.effect_K[0]),
        "low": float(result.low_K[0]),
        "high": float(result.high_K[0]),
        "p": float(result.p_K[0]),
        "detectable": float(result.detectable_K[0]),
    }


def _last_common(pair: Pair, task: str, k: int, analysis: Analysis) -> tuple[Group, int] | None:
    """Group and step of the last evaluation that both runs have under the same settings."""
    found = []
    for group in analysis.groups:
        if group.task == task and k <= group.n and len(group.problems) > 1:
            a, b = ({p.step for p in group.series(run.name)} for run in (pair.a, pair.b))
            found += [(group, max(a & b))] if a & b else []
    return max(found, key=lambda item: (item[1], item[0].n), default=None)


# -- the step log


def step_row(pair: Pair, readout: str) -> dict[str, Any] | None:
    """Difference a - b over the steps that both logged, and what each arm spent."""
    a, b = (_by_step(run, readout) for run in (pair.a, pair.b))
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return None
    d_T = np.array([a[step] - b[step] for step in steps])
    spent = {
        f"{axis}_{name}": _total(run, key)
        for axis, key in PER_STEP.items()
        for name, run in (("a", pair.a), ("b", pair.b))
    }
    return {
        "each": pair.each,
        "readout": readout,
        "a": pair.a.name,
        "b": pair.b.name,
        "steps": len(steps),
        "mean": float(d_T.mean()),
        "sd": float(d_T.std(ddof=1)) if len(steps) > 1 else None,
        "a_above": int((d_T > 0).sum()),
        "last": float(d_T[-1]),
        **spent,
    }


def _by_step(run: Run, readout: str) -> dict[int, float]:
    return {
        line["step"]: float(value)
        for line in run.metrics
        if (value := line.get(readout)) is not None and math.isfinite(value)
    }


def _total(run: Run, key: str) -> int:
    return int(sum(line.get(key) or 0 for line in run.metrics))


def curves(
    comparison: Comparison, pairs: Sequence[Pair], readouts: Sequence[str]
) -> list[dict[str, Any]]:
    """One chart per readout and axis: {"readout", "axis", "lines": [{"run", "points"}]}."""
    runs = {run.name: run for pair in pairs for run in (pair.a, pair.b)}
    return [
        {
            "readout": readout,
            "axis": axis,
            "lines": [
                {"run": run.name, "points": points}
                for run in runs.values()
                if (points := _points(run, readout, axis))
            ],
        }
        for readout in readouts
        for axis in comparison.axes
    ]


def _points(run: Run, readout: str, axis: str) -> list[list[float]]:
    """[x, y], x summed up to the step; thinned as training curves are."""
    x, found = 0.0, []
    for line in sorted(run.metrics, key=lambda line: line["step"]):
        x = line["step"] if axis == "step" else x + (line.get(PER_STEP[axis]) or 0)
        value = line.get(readout)
        if value is not None and math.isfinite(value):
            found.append([x, float(f"{value:.5g}")])
    stride = max(1, -(-len(found) // CURVE_POINTS))
    return found[::stride]


def entries(
    declared: Sequence[Declared], runs: Sequence[Run], analysis: Analysis
) -> list[Mapping[str, Any]]:
    """The comparisons among what was declared."""
    return [
        comparison_entry(entry, runs, analysis)
        for entry in declared
        if isinstance(entry, Comparison)
    ]
