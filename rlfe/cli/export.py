"""`rlfe export`: the programs of an evaluation, in the form of another scorer.

What: `--format evalplus` writes JSON lines that `evalplus.evaluate` accepts. What not: scoring.
Try: `rlfe export runs/CELL --task mbpp_plus --step 30 --out samples.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlfe.cli import help as pages
from rlfe.cli import output, values
from rlfe.errors import NotFoundError, PartialError, RequestError
from rlfe.rundir import RunDir, write_text

if TYPE_CHECKING:
    from rlfe.tasks.plus import PlusTask

TASKS = ("mbpp_plus", "humaneval_plus")


@click.command(
    "export",
    cls=pages.Command,
    examples=["rlfe export runs/CELL --task mbpp_plus --step 30 --out samples.jsonl"],
)
@click.argument("run", type=click.Path(path_type=Path, file_okay=False), shell_complete=values.runs)
@pages.option("What", "--format", "form", type=click.Choice(["evalplus"]), default="evalplus",
              help="Whose form.")  # fmt: skip
@pages.option("What", "--task", "task_name", type=click.Choice(TASKS), default="mbpp_plus",
              help="Which evaluation.")  # fmt: skip
@pages.option(
    "What", "--step", type=click.IntRange(min=0), help="Checkpoint; the last if not said."
)
@pages.option(
    "What", "--settings", "key", metavar="KEY", help="Folder of the settings, if several."
)
@pages.option("Where", "--out", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="File to write.", metavar="FILE")  # fmt: skip
def command(
    run: Path, form: str, task_name: str, step: int | None, key: str | None, out: Path
) -> None:
    """Write samples in the form of other scorers."""
    from rlfe.tasks import get
    from rlfe.tasks.plus import PlusTask
    from rlfe.tasks.samples import evalplus_rows

    task = get(task_name)
    assert isinstance(task, PlusTask)
    files = _files(RunDir(run).evals(task_name), step, key)
    programs = list(_programs(task, files))
    write_text(out, evalplus_rows(programs))
    output.result(str(out))
    there = len({name for name, _ in programs})
    output.hint(f"evalplus.evaluate --dataset {task_name.split('_')[0]} --samples {out}")
    if there < task.count:
        raise PartialError(
            f"{out} covers {there} of {task.count} problems; {form} refuses such a file",
            hint="Evaluate all problems (rlfe eval without --limit), then export again.",
        )


def _files(evals: Path, step: int | None, key: str | None) -> list[Path]:
    """The sample files of one checkpoint under one settings folder."""
    found = sorted(evals.glob(f"{key or '*'}/step_*.jsonl.zst"))
    if step is not None:
        found = [path for path in found if path.name.startswith(f"step_{step:06d}.")]
    if not found:
        raise NotFoundError(
            f"no samples of {evals.name} {'' if step is None else f'at step {step} '}in {evals}",
            hint="Run rlfe eval first; rlfe runs lists what is evaluated.",
        )
    folders = sorted({path.parent.name for path in found})
    if len(folders) > 1:
        raise RequestError(
            f"{evals} has samples of {len(folders)} settings: {', '.join(folders)}",
            hint="Choose one with --settings.",
        )
    last = found[-1].name.split(".")[0]
    return [path for path in found if path.name.split(".")[0] == last]


def _programs(task: PlusTask, files: list[Path]) -> Iterator[tuple[str, str]]:
    """(evalplus task id, program) of every sample, problem by problem."""
    from rlfe.eval.store import Store
    from rlfe.tasks.base import Reply
    from rlfe.types import Finish

    store = Store.read(files[0], "", texts=True, beside=files[1:])
    header: Mapping[str, Any] = store.header or {}
    style = header.get("facts", {}).get("prompt", {}).get("style", "base")
    for problem in task.problems("test"):
        prompt = task.prompt(problem, style)
        for name, block in sorted(store.blocks):
            for sample in store.blocks[name, block] if name == problem.id else ():
                finish = Finish(sample.finish)
                reply = Reply(
                    key="", problem=problem, prompt=prompt, text=sample.text, finish=finish
                )
                yield task.task_id(problem.id), task.answer(reply) or "pass"
