"""`rlfe runs`: the run folders, how far each is, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rlfe import checkpoints, config, sweeps
from rlfe.cli import help as pages
from rlfe.cli import output
from rlfe.errors import NotFoundError, RlfeError
from rlfe.naming import checkpoint_name
from rlfe.rundir import RunDir

COLUMNS = ("cell", "step", "total", "checkpoints", "last", "evaluated", "note")


@click.command(
    "runs", cls=pages.Command, examples=["rlfe runs", "rlfe runs --runs-dir /scratch/runs --json"]
)
@pages.runs_dir_option
@pages.json_option
def command(runs_dir: Path, as_json: bool) -> None:
    """List runs: steps done of total, complete checkpoints, evaluated tasks."""
    if not runs_dir.is_dir():
        raise NotFoundError(
            f"{runs_dir} does not exist", hint="Give --runs-dir, or train: rlfe train --recipe tiny"
        )
    rows = list(_rows(runs_dir))
    if as_json:
        output.document({"schema": "rlfe.runs/1", "rows": rows, "run": {"runs_dir": runs_dir}})
    elif rows:
        output.table(COLUMNS, [{**row, "evaluated": " ".join(row["evaluated"])} for row in rows])
    else:
        output.note(f"no run in {runs_dir}")


def _rows(runs_dir: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted(runs_dir.iterdir()):
        if folder.is_dir() and not folder.name.startswith((".", "_")):
            yield _row(RunDir(folder))
    base = runs_dir / "_base"
    for folder in sorted(base.iterdir()) if base.is_dir() else []:
        row = dict.fromkeys(COLUMNS) | {"cell": f"_base/{folder.name}", "step": 0}
        yield {**row, "evaluated": evaluated(folder / "evals")}


def _row(run: RunDir) -> dict[str, Any]:
    complete = [step for step in run.steps() if not _lacks(run, step)]
    told = [f"step {step} is incomplete" for step in run.steps() if step not in complete]
    total: int | None = None
    try:
        total = config.read_run_config(run.config).train.steps
        step = sweeps.last_step(run)
    except RlfeError as error:
        told.append(error.what)
        step = max(complete, default=0)
    return {
        "cell": run.name,
        "step": step,
        "total": total,
        "checkpoints": len(complete),
        "last": max(complete, default=None),
        "evaluated": evaluated(run.path / "evals"),
        "note": "; ".join(told) or None,
    }


def _lacks(run: RunDir, step: int) -> list[str]:
    folder = run.path / checkpoint_name(step)
    return checkpoints.problems(folder) if folder.is_dir() else ["not there under its own name"]


def evaluated(evals: Path) -> list[str]:
    """Tasks with results in a run's evals folder."""
    if not evals.is_dir():
        return []
    folders = (path for path in evals.iterdir() if path.is_dir() and any(path.iterdir()))
    return sorted(path.name for path in folders)
