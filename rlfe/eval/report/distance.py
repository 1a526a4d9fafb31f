"""How far checkpoints are from their base and what they forgot: points, and the fit over them.

From the `kl.csv` that `rlfe eval --kl` leaves in every run. Rows of different settings never share
a fit, and rows on other samples than the base's own (`mean log ratio`) get none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfe.eval import kl_table
from rlfe.eval.kl import KL
from rlfe.eval.report.gather import Run

NUMBERS = ("per_sequence", "low", "high", "per_token", "token_low", "token_high")


def distance_payload(
    runs: Sequence[Run], paths: Sequence[Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Points with the mean forgetting of their step, where it is known, and one fit a model."""
    forgotten = {
        (path["cell"], step): loss
        for path in paths
        for step, loss in zip(path["steps"], path["forgetting"], strict=True)
    }
    points = [
        _point(run, row, forgotten)
        for run in runs
        for row in kl_table.read(run.dir.path / "evals" / "kl.csv")
    ]
    families: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for point in points:
        if point["measure"] == KL:
            key = (point["model"], point["task"], point["settings"])
            families.setdefault(key, []).append(point)
    fits = [
        {"model": model, "task": task, "settings": settings, **found._asdict()}
        for (model, task, settings), here in sorted(families.items())
        if (found := _fit(here)) is not None
    ]
    return {"points": points, "fits": fits}


def _point(
    run: Run, row: Mapping[str, str], forgotten: Mapping[tuple[str, int], float]
) -> dict[str, Any]:
    step = int(row["step"])
    numbers = {name: float(row[name]) if row[name] else None for name in NUMBERS}
    return {
        "cell": run.name,
        "model": run.cell.model,
        "step": step,
        **{name: row[name] for name in ("task", "measure", "settings")},
        **numbers,
        "prompts": int(row["prompts"]),
        "forgetting": forgotten.get((run.name, step)),
    }


def _fit(points: Sequence[Mapping[str, Any]]) -> kl_table.Fit | None:
    usable = {f"{p['cell']} {p['step']}": p for p in points if p["forgetting"] is not None}
    return kl_table.fit(
        {name: p["forgetting"] for name, p in usable.items()},
        {name: p["per_sequence"] for name, p in usable.items()},
    )
