"""The table of distances to the base, and what it says about forgetting.

`kl.csv` in each run's evals folder, one row per (step, task, settings); the same rows of a call
beside its score table. The fit F ~ a*KL + b*KL^2 is arXiv:2509.04259's: forgetting of all
checkpoints against how far they are from the base, whatever arm or learning rate made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlfe.eval import merge
from rlfe.eval.jobs import Job
from rlfe.eval.kl import Distance
from rlfe.eval.tables import number
from rlfe.rundir import write_text

COLUMNS = (
    "cell", "step", "task", "measure", "prompts", "n", "per_sequence", "low", "high", "per_token",
    "token_low", "token_high", "tokens", "settings",
)  # fmt: skip
LAYOUT = merge.Layout(k="n", score="per_sequence")
LEAST_POINTS = 3  # two unknowns leave a residual from here on


class Fit(NamedTuple):
    """F ~ a*KL + b*KL^2, least squares through the origin; None where R^2 has no value.

    `Fit(0.031, -0.0004, 0.93, 34)`
    """

    a: float
    b: float
    r2: float | None
    points: int


def row_of(distance: Distance) -> merge.Row:
    """One row, as texts."""
    job = distance.pair.point
    low, high = _ends(distance.sequence_interval)
    token_low, token_high = _ends(distance.token_interval)
    return {
        "cell": job.target.cell,
        "step": str(job.target.step),
        "task": job.task.name,
        "measure": distance.measure,
        "prompts": str(distance.prompts),
        "n": str(job.settings.n),
        "per_sequence": number(distance.per_sequence),
        "low": low,
        "high": high,
        "per_token": number(distance.per_token),
        "token_low": token_low,
        "token_high": token_high,
        "tokens": str(distance.tokens),
        "settings": settings_text(job),
    }


def settings_text(job: Job) -> str:
    """`kl-3fa9c1d2e0-n8`, with `-first20` where problems are left out."""
    first = "" if job.settings.limit is None else f"-first{job.settings.limit}"
    return f"kl-{job.store_path.parent.name}-n{job.settings.n}{first}"


def _ends(interval: tuple[float, float] | None) -> tuple[str, str]:
    return ("", "") if interval is None else (number(interval[0]), number(interval[1]))


def write(path: Path, rows: Sequence[merge.Row]) -> None:
    """Merge the rows into the table of that name; sorted, written beside and renamed."""
    redo = {merge.point_of(row, LAYOUT) for row in rows}
    kept = [row for row in read(path) if merge.point_of(row, LAYOUT) not in redo]
    write_text(path, merge.csv_text(merge.sort_rows([*kept, *rows], LAYOUT), COLUMNS))


def read(path: Path) -> list[merge.Row]:
    """The rows of such a table; none where there is no file."""
    if not path.is_file():
        return []
    return merge.read_rows(path.read_text(encoding="utf-8"), LAYOUT)


def fit(forgetting: Mapping[str, float], kl: Mapping[str, float]) -> Fit | None:
    """Fit over the checkpoints that have both; None with fewer than three, or all at one KL.

    R^2 = 1 - sum of squared residuals / sum of squared deviations from the mean; it has no value
    where forgetting does not vary.
    """
    names = sorted(forgetting.keys() & kl.keys())
    x_N = np.array([kl[name] for name in names])
    y_N = np.array([forgetting[name] for name in names])
    if len(names) < LEAST_POINTS or len(set(x_N.tolist())) < 2:
        return None
    terms_N2 = np.stack([x_N, x_N**2], axis=1)
    (a, b), *_ = np.linalg.lstsq(terms_N2, y_N)
    left = float(((y_N - terms_N2 @ [a, b]) ** 2).sum())
    whole = float(((y_N - y_N.mean()) ** 2).sum())
    return Fit(float(a), float(b), 1 - left / whole if whole > 0 else None, len(names))
