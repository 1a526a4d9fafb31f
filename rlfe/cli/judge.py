"""`rlfe judge`: judge the samples of a file against a task's tests.

What: counts by status, pass@k, and with --json a verdict for every sample. What not: sampling
(`rlfe eval`). `--scorer evalplus` asks evalplus itself, for comparison.
Try: `rlfe judge --task mbpp_plus --samples samples.jsonl`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlfe.cli import help as pages
from rlfe.cli import output, values
from rlfe.cli.judges import make_judge
from rlfe.errors import PartialError, RequestError
from rlfe.types import Status, Verdict

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge
    from rlfe.tasks.base import Task
    from rlfe.tasks.samples import Sample

SHOWN_K = (1, 10, 100)
MANY = 16_384  # samples handed to the judge at a time


@click.command(
    "judge",
    cls=pages.Command,
    examples=[
        "rlfe judge --task mbpp_plus --samples samples.jsonl",
        "rlfe judge --task gsm8k --samples replies.jsonl --mode strict --json",
        "rlfe judge --task humaneval_plus --samples samples.jsonl --scorer evalplus",
    ],
)
@pages.option("What", "--task", "task_name", required=True, help="Whose tests decide.",
              shell_complete=values.tasks)  # fmt: skip
@pages.option("What", "--samples", required=True, type=click.Path(path_type=Path, dir_okay=False),
              help="JSON lines: task_id or problem_id, and solution, completion or response.",
              metavar="FILE")  # fmt: skip
@pages.option("What", "--module", metavar="FILE", help="Python file of an own task.")
@pages.option("What", "--mode", type=click.Choice(["strict", "flexible"]), default="flexible",
              help="gsm8k rule that decides.")  # fmt: skip
@pages.option("What", "--k", "asked_k", metavar="LIST", help="k of pass@k, such as 1,10.")
@pages.option(
    "How", "--workers", type=click.IntRange(min=1), help="Workers; all cores if not said."
)
@pages.option("How", "--scorer", type=click.Choice(["rlfe", "evalplus"]), default="rlfe",
              help="Who judges; evalplus has no jail and needs its extra.")  # fmt: skip
@pages.option("How", "--require-isolation", is_flag=True,
              help="Refuse to judge where programs can reach files or the network.")  # fmt: skip
@pages.option("How", "--fresh", is_flag=True, help="Judge again what is known from earlier runs.")
@pages.json_option
@click.pass_context
def command(
    ctx: click.Context,
    task_name: str,
    samples: Path,
    module: str | None,
    mode: str,
    asked_k: str | None,
    workers: int | None,
    scorer: str,
    require_isolation: bool,
    fresh: bool,
    as_json: bool,
) -> None:
    """Judge samples of a file against a task's tests."""
    from rlfe.tasks import get
    from rlfe.tasks.samples import read

    task = get(task_name, module, mode=mode if task_name == "gsm8k" else None)
    found = read(samples, task)
    counts_k = _asked_k(asked_k, found)
    if scorer == "evalplus":
        verdicts = _by_evalplus(task, found, workers or 1)
        tier: Mapping[str, Any] = {"tier": "none", "by": "evalplus"}
    else:
        judge = make_judge(
            pages.environment(ctx),
            workers=workers,
            require_isolation=require_isolation,
            fresh=fresh,
        )
        verdicts, tier = _by_rlfe(task, found, judge)
    table = pass_rows(task, found, verdicts, counts_k)
    if as_json:
        output.document(
            {
                "schema": "rlfe.judge/1",
                "rows": [_row(s, v) for s, v in zip(found, verdicts, strict=True)],
                "pass_at_k": table,
                "run": _facts(task, samples, scorer, tier, found, verdicts),
            }
        )
    else:
        _show(task, found, verdicts, table)
    broken = sum(v.status is Status.INFRASTRUCTURE for v in verdicts)
    if broken:
        raise PartialError(
            f"{broken} of {len(verdicts)} samples could not be judged",
            hint="They are no wrong answers; see their details with --json, and judge again.",
        )


def _by_rlfe(
    task: Task, samples: Sequence[Sample], maker: Judge
) -> tuple[list[Verdict], Mapping[str, Any]]:
    if not task.runs_programs:
        return _judged(task, samples, None), {}
    with maker as judge:
        return _judged(task, samples, judge), judge.tier


def _judged(task: Task, samples: Sequence[Sample], judge: Any) -> list[Verdict]:
    """One verdict per sample, in order."""
    from rlfe.tasks.samples import verdicts

    found: dict[int, Verdict] = {}
    with output.progress(f"judging {task.name}", len(samples)) as bar:
        for start in range(0, len(samples), MANY):
            part = samples[start : start + MANY]
            for place, verdict in verdicts(task, part, judge):
                found[start + place] = verdict
                bar.advance(1)
    return [found[place] for place in range(len(samples))]


def _by_evalplus(task: Task, samples: Sequence[Sample], workers: int) -> list[Verdict]:
    from rlfe.tasks.evalplus_scorer import score

    programs = [(s.problem, s.program()) for s in samples]
    return score(task, programs, workers=workers)


def _asked_k(text: str | None, samples: Sequence[Sample]) -> tuple[int, ...]:
    """The k to show; those not asked for are left out where n is too small, asked ones refused."""
    per_problem = Counter(sample.problem.id for sample in samples)
    least = min(per_problem.values())
    if text is None:
        return tuple(k for k in SHOWN_K if k <= least)
    try:
        wanted = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"--k {text}: not a list of numbers", hint="Such as --k 1,10.") from None
    if max(wanted) > least:
        name = min(per_problem, key=lambda problem: per_problem[problem])
        raise RequestError(
            f"k={max(wanted)} needs at least {max(wanted)} samples, {name} has {least}"
        )
    return wanted


def pass_rows(
    task: Task, samples: Sequence[Sample], verdicts: Sequence[Verdict], counts_k: Sequence[int]
) -> list[dict[str, Any]]:
    """pass@k over the problems in the file, labelled with how many of the task's they are."""
    from rlfe.eval.passk import pass_at_k

    names = {task.name: [v.correct for v in verdicts]}
    if task.name.endswith("_plus"):
        base = task.name.replace("_plus", "_base")
        names = {base: [v.facts.get("base") == Status.PASSED for v in verdicts], **names}
    total = Counter(sample.problem.id for sample in samples)
    if len(set(total.values())) != 1:
        return []
    rows = []
    for name, passed in names.items():
        right = Counter(s.problem.id for s, ok in zip(samples, passed, strict=True) if ok)
        for k in counts_k:
            scores = [pass_at_k(n, right[problem], k) for problem, n in total.items()]
            rows.append(
                {
                    "task": name,
                    "k": k,
                    "score": sum(scores) / len(scores),
                    "problems": len(scores),
                    "of": _size(task),
                }
            )
    return rows


def _size(task: Task) -> int | None:
    """The pinned number of problems; None for problems that stand in the file only."""
    return len(task.problems("test")) if task.name != "mbpp" else None


def _row(sample: Sample, verdict: Verdict) -> dict[str, Any]:
    return {
        "line": sample.line,
        "problem_id": sample.problem.id,
        "status": str(verdict.status),
        "correct": verdict.correct,
        "detail": verdict.detail,
        "seconds": round(verdict.seconds, 6),
        **dict(verdict.facts),
    }


def _facts(
    task: Task,
    path: Path,
    scorer: str,
    tier: Mapping[str, Any],
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    return {
        "task": task.name,
        "rule": task.version,
        "data_sha256": task.data_sha256(),
        "samples": str(path),
        "scorer": scorer,
        "isolation": dict(tier),
        "statuses": dict(Counter(str(v.status) for v in verdicts)),
        "distinct": len({(s.problem.id, s.text) for s in samples}),
    }


def _show(
    task: Task,
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    table: Sequence[Mapping[str, Any]],
) -> None:
    statuses = Counter(str(v.status) for v in verdicts)
    rows = [[status, count, count / len(verdicts)] for status, count in statuses.most_common()]
    output.table(("status", "samples", "share"), rows)
    if table:
        output.result("")
        output.table(tuple(table[0]), table)
    else:
        output.note("the problems have different numbers of samples: no pass@k")
    if table and table[0]["of"] not in (None, table[0]["problems"]):
        output.note(
            f"{table[0]['problems']} of the {table[0]['of']} problems of {task.name} are in the "
            "file: not its score"
        )
