"""What the series of a run say: learned against forgotten, stable or not, arms at equal gain.

All on pass@1. A run's trained task is compared with the other tasks that were scored for it and
for its base model; a step that lacks one of them is left out of the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlfe.eval import forgetting as lost
from rlfe.eval.report.gather import Group, Run
from rlfe.eval.statistics import wilson

TRAINED = {"mbpp": "mbpp_plus", "gsm8k": "gsm8k", "deepcoder": "deepcoder"}


def trained_task(run: Run) -> str:
    """The evaluation of the task that a run trained on."""
    name = run.recipe.task.name
    return TRAINED.get(name, name)


def series_payload(runs: Sequence[Run], groups: Sequence[Group]) -> dict[str, Any]:
    """Paths, arms at matched gain, the front, stability of each run, and stability limits."""
    paths = [path for run in runs if (path := path_of(run, groups)) is not None]
    states = [(run, state) for run in runs if (state := state_of(run, groups)) is not None]
    return {
        "paths": paths,
        "matched": matched(paths, runs),
        "front": front(paths),
        "stability": [{"cell": run.name, **asdict(state)} for run, state in states],
        "limits": limits(states),
    }


def best_group(run: Run, task: str, groups: Sequence[Group]) -> Group | None:
    """Of the settings that a task was scored under, those with the base and most of the run."""
    usable = [
        group
        for group in groups
        if group.task == task and group.at(run.cell.model, 0) is not None and group.series(run.name)
    ]
    return max(usable, key=lambda group: len(group.series(run.name)), default=None)


def pass_at_1(group: Group, cell: str, step: int) -> float | None:
    """Mean share of right samples of a point; None where it was not scored."""
    point = group.at(cell, step)
    return None if point is None else float(point.correct_P.mean()) / group.n


def path_of(run: Run, groups: Sequence[Group]) -> dict[str, Any] | None:
    """Gain and mean forgetting of a run by step, from the base model on; None without both."""
    trained = best_group(run, trained_task(run), groups)
    names = {group.task for group in groups if not group.task.endswith("_base")}
    found = [best_group(run, task, groups) for task in sorted(names - {trained_task(run)})]
    others = [group for group in found if group is not None]
    if trained is None or not others:
        return None
    base = pass_at_1(trained, run.cell.model, 0)
    start = _scores(others, run.cell.model, 0)
    assert base is not None
    steps, gains, losses = [0], [0.0], [0.0]
    for point in trained.series(run.name):
        now = _scores(others, run.name, point.step)
        loss = lost.mean_forgetting(start, now) if len(now) == len(others) else None
        if loss is not None:
            steps.append(point.step)
            gains.append(lost.gain(float(point.correct_P.mean()) / trained.n, base))
            losses.append(loss)
    if len(steps) < 2:
        return None
    return {
        "cell": run.name,
        "trained": trained.task,
        "others": [group.task for group in others],
        "steps": steps,
        "gain": [round(value, 5) for value in gains],
        "forgetting": [round(value, 5) for value in losses],
        "area": lost.area(steps, losses),
        "max_forgetting": round(lost.max_forgetting([-value for value in losses])[-1], 5),
    }


def _scores(groups: Sequence[Group], cell: str, step: int) -> dict[str, float]:
    values = {group.task: pass_at_1(group, cell, step) for group in groups}
    return {task: value for task, value in values.items() if value is not None}


def matched(paths: Sequence[dict[str, Any]], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Forgetting of each arm where it first reaches the largest gain that all arms reach.

    Arms are compared within a model and learning rate, by run (seeds stay apart).
    """
    by_name = {run.name: run for run in runs}
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in paths:
        run = by_name[path["cell"]]
        places.setdefault((run.cell.model, run.lr_text), []).append(path)
    found = []
    for (model, lr_text), here in sorted(places.items()):
        wanted = lost.matched_gain({path["cell"]: path["gain"] for path in here})
        if len(here) < 2 or wanted is None:
            continue
        for path in here:
            value = lost.forgetting_at_gain(path["gain"], path["forgetting"], wanted)
            where = {"model": model, "lr_text": lr_text, "gain": wanted}
            found.append({**where, "cell": path["cell"], "forgetting": value})
    return found


def front(paths: Sequence[dict[str, Any]]) -> list[str]:
    """Checkpoints (`<cell> step N`) with nobody of more gain and less forgetting."""
    points = {
        f"{path['cell']} step {step}": (gain, loss)
        for path in paths
        for step, gain, loss in zip(path["steps"], path["gain"], path["forgetting"], strict=True)
        if step > 0
    }
    return lost.pareto(points)


def state_of(run: Run, groups: Sequence[Group]) -> lost.Stability | None:
    """Stable, dip, unstable or collapsed on the trained task; None without an evaluated base."""
    group = best_group(run, trained_task(run), groups)
    base = group.at(run.cell.model, 0) if group is not None else None
    if group is None or base is None:
        return None
    points = [base, *(point for point in group.series(run.name) if point.step > 0)]
    diverged = run.provenance.get("ended_by") == "diverged"
    last = max((line["step"] for line in run.metrics), default=0)
    return lost.stability(
        [point.step for point in points],
        [point.correct_P / group.n for point in points],
        diverged_at=last if diverged else None,
    )


def limits(states: Sequence[tuple[Run, lost.Stability]]) -> list[dict[str, Any]]:
    """Stability limit of each (model, arm) over its learning rates, and the share that fell.

    The share of runs that ended unstable or collapsed has a Wilson interval, which for two runs
    is nearly everything; it is shown all the same.
    """
    ladders: dict[tuple[str, str], dict[float, list[lost.Stability]]] = {}
    for run, state in states:
        ladder = ladders.setdefault((run.cell.model, run.arm), {})
        ladder.setdefault(run.cell.lr, []).append(state)
    found = []
    for (model, arm), ladder in sorted(ladders.items()):
        runs = [state for group in ladder.values() for state in group]
        fell = sum(state.at_end for state in runs)
        low, high = wilson(fell, len(runs))
        found.append(
            {
                "model": model,
                "arm": arm,
                "rates": sorted(ladder),
                "limit": lost.stability_limit(ladder),
                "fell": fell,
                "runs": len(runs),
                "low": round(low, 3),
                "high": round(high, 3),
            }
        )
    return found
