"""`rlfe sweep`: the cells of a recipe's matrix, and running them one after the other or one a GPU.

Each cell is an ordinary `rlfe train` in a process of its own. A finished cell is skipped and an
unfinished one resumed, so the same command goes on after any stop. How each cell ended is kept in
`<runs-dir>/_sweep/`. Try: `rlfe sweep lag-staleness`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rlfe import config, sweeps
from rlfe.cli import help as pages
from rlfe.cli import output, values
from rlfe.cli.workers import Ended, Task, endings, gpu_list, run_all
from rlfe.errors import PartialError, RequestError, RlfeError

ENDED_BY_RULE = 3
EXAMPLES = [
    "rlfe sweep lr-ladder",
    "rlfe sweep lag-staleness --run --jobs 4 --engine vllm",
    "rlfe sweep lr-ladder --slurm > ladder.sh && sbatch ladder.sh",
]


@click.command("sweep", cls=pages.Command, examples=EXAMPLES)
@click.argument("recipe", metavar="RECIPE", shell_complete=values.recipes)
@pages.option(
    "Settings", "--set", "sets", multiple=True, metavar="KEY=VALUE",
    help="For every cell; what it fixes is no longer varied. Repeatable.",
)  # fmt: skip
@pages.option(
    "Settings", "--engine", type=click.Choice(values.ENGINES),
    help="Passed to every rlfe train.",
)  # fmt: skip
@pages.option("Settings", "--require-isolation", is_flag=True, help="Passed to every rlfe train.")
@pages.runs_dir_option
@pages.option("How", "--run", is_flag=True, help="Train the cells that are not done.")
@pages.option(
    "How", "--jobs", type=click.IntRange(min=1), default=1, help="Cells at a time, a GPU each."
)
@pages.option("How", "--slurm", is_flag=True, help="Print an array script instead of running.")
@pages.json_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    sets: Sequence[str],
    engine: str | None,
    require_isolation: bool,
    runs_dir: Path,
    run: bool,
    jobs: int,
    slurm: bool,
    as_json: bool,
) -> None:
    """Show the cells of a recipe's matrix and how far each is; --run trains them."""
    if run and slurm:
        raise RequestError("--run and --slurm exclude each other", hint="Give one of the two.")
    environment = pages.environment(ctx)
    cells = sweeps.cells([recipe], sets, environment)
    for text in _notes(cells):
        output.warn(text)
    options = ["--runs-dir", str(runs_dir), *(("--engine", engine) if engine else ())]
    options += ["--require-isolation"] if require_isolation else []
    commands = {cell.name: sweeps.train_command([recipe], sets, cell, options) for cell in cells}
    if slurm:
        script = sweeps.slurm_script(
            Path(recipe).stem, [[*line, "--resume"] for line in commands.values()]
        )
        output.result(script)
        return
    ended: dict[str, Ended] = {}
    if run:
        todo = _todo(cells, commands, runs_dir)
        gpus = gpu_list(environment)
        if gpus and jobs > len(gpus):
            raise RequestError(
                f"--jobs {jobs}, but {len(gpus)} GPUs are visible", hint=f"Give --jobs {len(gpus)}."
            )
        ended = run_all(
            todo, jobs=jobs, gpus=gpus, folder=runs_dir / "_sweep", environment=environment
        )
    _show(cells, commands, runs_dir, as_json)
    _finish(ended)
    if not run:
        output.hint(f"Next: {shlex.join(['rlfe', 'sweep', recipe, *_words(sets), '--run'])}")


def _notes(cells: Sequence[sweeps.Cell]) -> list[str]:
    """What the cells' settings may not mean, each once; a cell that cannot train is refused."""
    return list(
        dict.fromkeys(text for cell in cells for text in config.check(cell.recipe, training=True))
    )


def _words(sets: Sequence[str]) -> list[str]:
    return [word for text in sets for word in ("--set", text)]


def _todo(
    cells: Sequence[sweeps.Cell], commands: dict[str, list[str]], runs_dir: Path
) -> list[Task]:
    """What still has to run: begun cells with --resume; those that a rule ended are over."""
    over = endings(runs_dir / "_sweep")
    tasks = []
    for cell in cells:
        state = sweeps.progress(cell, runs_dir).state
        if state is sweeps.State.DONE:
            output.note(f"{cell.name}: done, skipped")
        elif state is sweeps.State.BEGUN and over.get(cell.name) == ENDED_BY_RULE:
            output.note(f"{cell.name}: ended by a rule earlier, skipped")
        else:
            more = ["--resume"] if state is sweeps.State.BEGUN else []
            tasks.append(Task(cell.name, [*commands[cell.name], *more]))
    return tasks


def _show(
    cells: Sequence[sweeps.Cell], commands: dict[str, list[str]], runs_dir: Path, as_json: bool
) -> None:
    over = endings(runs_dir / "_sweep")
    rows: list[dict[str, Any]] = []
    for cell in cells:
        at = sweeps.progress(cell, runs_dir)
        state = "ended by a rule" if over.get(cell.name) == ENDED_BY_RULE else str(at.state)
        row = {"cell": cell.name, "state": state, "step": at.step, "total": at.total}
        rows.append({**row, "overrides": list(cell.overrides), "command": commands[cell.name]})
    if as_json:
        output.document({"schema": "rlfe.sweep/1", "rows": rows, "run": {"runs_dir": runs_dir}})
    else:
        output.table(("cell", "state", "step", "total"), rows)


def _finish(ended: dict[str, Ended]) -> None:
    """Exit 1 if a cell failed, 3 if a rule ended one; both name the cells."""
    failed = {name: end for name, end in ended.items() if end.code not in (0, ENDED_BY_RULE)}
    if failed:
        lines = [
            f"{name}: exit {end.code}, see {end.log or 'its words above'}"
            for name, end in failed.items()
        ]
        raise RlfeError("\n".join(lines), hint="The same command resumes what is not done.")
    ruled = [name for name, end in ended.items() if end.code == ENDED_BY_RULE]
    if ruled:
        raise PartialError(f"a rule ended {', '.join(ruled)}", hint="Its log says which.")
