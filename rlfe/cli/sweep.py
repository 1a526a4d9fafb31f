"""`rlfe sweep`: the cells of a recipe's matrix, and running them here, with Ray or with Slurm.

Each cell is an ordinary `rlfe train` in a process of its own. A finished cell is skipped and an
unfinished one resumed, so the same command goes on after any stop. How each cell ended is kept in
`<runs-dir>/_sweep/`. Try: `rlfe sweep lag-staleness`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rlfe import config, sweeps
from rlfe.budget import used_gpus
from rlfe.cli import help as pages
from rlfe.cli import output, values
from rlfe.cli.workers import Ended, Task, endings, gpu_list, run_all
from rlfe.errors import PartialError, RequestError, RlfeError
from rlfe.ray_cluster import chosen_address, cluster
from rlfe.slurm import sweep_script

ENDED_BY_RULE = 3
EXAMPLES = [
    "rlfe sweep lr-ladder",
    "rlfe sweep lag-staleness --run --jobs 4 --engine vllm",
    "rlfe sweep lr-ladder --ray auto",
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
@pages.option(
    "How", "--ray", is_flag=False, flag_value="", metavar="[ADDRESS]",
    help="Train them on a Ray cluster: HOST:PORT or auto; alone: RAY_ADDRESS, else this machine.",
)  # fmt: skip
@pages.option(
    "How", "--gpus", type=click.IntRange(min=0), metavar="N",
    help="With --ray or --slurm: GPUs of a cell; default: what its engine computes on.",
)  # fmt: skip
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
    ray: str | None,
    gpus: int | None,
    slurm: bool,
    as_json: bool,
) -> None:
    """Show the cells of a recipe's matrix and how far each is; --run and --ray train them."""
    _check_ways(run=run, jobs=jobs, ray=ray, gpus=gpus, slurm=slurm)
    environment = pages.environment(ctx)
    cells = sweeps.cells([recipe], sets, environment)
    for text in _notes(cells):
        output.warn(text)
    options = ["--runs-dir", str(runs_dir), *(("--engine", engine) if engine else ())]
    options += ["--require-isolation"] if require_isolation else []
    commands = {cell.name: sweeps.train_command([recipe], sets, cell, options) for cell in cells}
    if slurm:
        each = max(used_gpus(cell.recipe.engine) for cell in cells) if gpus is None else gpus
        lines = [[*line, "--resume"] for line in commands.values()]
        output.result(sweep_script(Path(recipe).stem, lines, each))
        return
    ended: dict[str, Ended] = {}
    if ray is not None:
        ended = _on_ray(ray, gpus, cells, _todo(cells, commands, runs_dir), runs_dir, environment)
    elif run:
        ended = _here(_todo(cells, commands, runs_dir), jobs, runs_dir, environment)
    _show(cells, commands, runs_dir, as_json)
    _finish(ended)
    if not run and ray is None:
        output.hint(f"Next: {shlex.join(['rlfe', 'sweep', recipe, *_words(sets), '--run'])}")


def _check_ways(*, run: bool, jobs: int, ray: str | None, gpus: int | None, slurm: bool) -> None:
    """One way of running, with its own options."""
    ways = {"--run": run, "--ray": ray is not None, "--slurm": slurm}
    given = [name for name, asked in ways.items() if asked]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other", hint="Give one of them.")
    if ray is not None and jobs > 1:
        raise RequestError(
            f"--jobs {jobs} with --ray: as many cells run as fit into the cluster",
            hint="Leave --jobs out.",
        )
    if gpus is not None and given in ([], ["--run"]):
        raise RequestError(
            f"--gpus {gpus} is for --ray and --slurm", hint="--jobs N runs N cells, a GPU each."
        )


def _here(
    todo: Sequence[Task], jobs: int, runs_dir: Path, environment: Mapping[str, str]
) -> dict[str, Ended]:
    gpus = gpu_list(environment)
    if gpus and jobs > len(gpus):
        raise RequestError(
            f"--jobs {jobs}, but {len(gpus)} GPUs are visible", hint=f"Give --jobs {len(gpus)}."
        )
    return run_all(todo, jobs=jobs, gpus=gpus, folder=runs_dir / "_sweep", environment=environment)


def _on_ray(
    asked: str,
    gpus: int | None,
    cells: Sequence[sweeps.Cell],
    todo: Sequence[Task],
    runs_dir: Path,
    environment: Mapping[str, str],
) -> dict[str, Ended]:
    from rlfe.cli.sweep_ray import cell_needs, run_on_ray

    if not todo:
        return {}
    with cluster(chosen_address(asked, environment)) as found:
        needs = cell_needs([cell.recipe for cell in cells], gpus, found)
        return run_on_ray(
            found, todo, needs=needs, folder=runs_dir / "_sweep", environment=environment
        )


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
