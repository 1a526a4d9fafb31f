"""What `rlfe eval` was asked and what it says: options, table, JSON, dry run, reasons to fail."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from rlfe.checkpoints import Listing
from rlfe.cli import output
from rlfe.cli.eval import ANY_CLUSTER, RUNS_OWN
from rlfe.errors import PartialError
from rlfe.eval import conditions as conditions_of
from rlfe.eval import merge, plan, tables
from rlfe.eval.jobs import Job
from rlfe.eval.judging import Report
from rlfe.eval.passk import shown_ks
from rlfe.eval.store import Store
from rlfe.naming import checkpoint_name

SCHEMA = "rlfe.eval/1"
OWN_FLAGS = ("n", "temperature", "top_p", "max_tokens", "seed", "ks", "limit", "prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `rlfe eval`, as click gives them."""

    globs: tuple[str, ...]
    bases: tuple[str, ...]
    steps: str | None
    tasks: tuple[str, ...]
    limit: int | None
    recipe: tuple[str, ...]
    sets: tuple[str, ...]
    prompt: str | None
    n: int | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    seed: int | None
    ks: tuple[int, ...] | None
    engine: str | None
    workers: int | None
    require_isolation: bool
    resume: bool
    shard: str | None
    keep: bool
    engine_per_checkpoint: bool
    verify_reload: bool
    gpus: int | None
    ray: str | None
    slurm: int | None
    kl: bool
    runs_dir: Path
    dry_run: bool
    table: Path | None
    plot: Path | None
    conditions: tuple[str, ...]
    as_json: bool

    @property
    def table_base(self) -> Path:
        """The tables' common name, without a suffix."""
        path = self.table or self.runs_dir / "_tables" / "scores.csv"
        return path.with_suffix("") if path.suffix in (".csv", ".parquet") else path

    @property
    def plot_path(self) -> Path:
        return self.plot or tables.beside(self.table_base, "_pass_at_k.png")

    def asked(self) -> plan.Asked:
        return plan.Asked(
            tasks=self.tasks,
            flags={name: getattr(self, name) for name in OWN_FLAGS},
            shard=plan.parse_shard(self.shard) if self.shard else None,
        )


@dataclass(slots=True)
class Results:
    """What is scored so far."""

    scored: list[tables.Scored] = field(default_factory=list)
    rows: list[merge.Row] = field(default_factory=list)
    kl: list[merge.Row] = field(default_factory=list)

    @property
    def missing(self) -> list[tables.Scored]:
        return [item for item in self.scored if item.tally.missing]


def show(options: Options, results: Results, report: Report, tier: Mapping[str, Any]) -> None:
    if options.as_json:
        output.document(_document(options, results, report, tier))
        return
    if options.shard is not None:
        output.result(
            f"shard {options.shard}: {sum(map(_samples, results.scored))} samples are there"
        )
        return
    columns, lines = table_lines(results.scored, results.rows, options.ks or ())
    output.table(columns, lines)
    output.note("pass@k in percent [95 % over problems, B = 10000]; cut, distinct: % of samples")
    if results.kl:
        show_kl(results.kl)
    output.note(f"Tables: {options.table_base}.csv, .parquet; plot: {options.plot_path}")


def show_kl(rows: Sequence[merge.Row]) -> None:
    """Distances to the base in nats, with 95 % over prompts."""
    lines = [
        [
            *(row[name] for name in ("cell", "step", "task", "measure")),
            _between(row, "per_sequence", "low", "high"),
            _between(row, "per_token", "token_low", "token_high"),
            *(int(row[name]) for name in ("prompts", "tokens")),
        ]
        for row in rows
    ]
    output.table([*("cell", "step", "task", "measure", "per sequence", "per token"),
                  *("prompts", "tokens")], lines)  # fmt: skip
    output.note("nats [95 % over prompts, B = 10000], on 8 samples of the base for each prompt")


def _between(row: merge.Row, name: str, low: str, high: str) -> str:
    text = f"{float(row[name]):.4g}"
    return text + (f" [{float(row[low]):.4g}, {float(row[high]):.4g}]" if row[low] else "")


def _samples(item: tables.Scored) -> int:
    return item.tally.rates.samples


def table_lines(
    scored: Sequence[tables.Scored], rows: Sequence[merge.Row], asked: Sequence[int]
) -> tuple[list[str], list[list[Any]]]:
    """The table of stdout: one line per checkpoint and task, a column per shown k."""
    by_point: dict[tuple[str, str, str, str], dict[int, merge.Row]] = {}
    for row in rows:
        by_point.setdefault(merge_key(row), {})[int(row["k"])] = row
    ks = sorted({k for found in by_point.values() for k in shown_ks(len(found), asked)})
    rates = {
        (i.job.target.text, name, i.job.settings_text): i.tally.rates
        for i in scored
        for name in i.tally.correct
    }
    columns = ["cell", "step", "task", "problems", "n", *(f"pass@{k}" for k in ks)]
    lines = []
    for (cell, step, task, settings), found in by_point.items():
        first = next(iter(found.values()))
        cells = [score_cell(found.get(k)) for k in ks]
        rate = rates[f"{cell}/{checkpoint_name(int(step))}", task, settings]
        side = [f"{100 * rate.cut:.1f}", f"{100 * rate.distinct:.1f}"]
        lines.append(
            [cell, int(step), task, int(first["problems"]), int(first["n"]), *cells, *side]
        )
    return [*columns, "cut", "distinct"], lines


def merge_key(row: merge.Row) -> tuple[str, str, str, str]:
    """Cell, step, task and settings of a row."""
    return row["cell"], row["step"], row["task"], row["settings"]


def score_cell(row: merge.Row | None) -> str | None:
    """`51.2 [47.1, 55.3]`; "incomplete" where problems are missing."""
    if row is None:
        return None
    if not row["score"]:
        return "incomplete"
    text = f"{100 * float(row['score']):.1f}"
    if row["low"]:
        text += f" [{100 * float(row['low']):.1f}, {100 * float(row['high']):.1f}]"
    return text


def _document(
    options: Options, results: Results, report: Report, tier: Mapping[str, Any]
) -> dict[str, Any]:
    asked = options.ks or ()
    rows = [row for row in results.rows if int(row["k"]) in shown_ks(int(row["n"]), asked)]
    return {
        "schema": SCHEMA,
        "rows": [tables.typed_row(row) for row in rows],
        "run": {
            "table": f"{options.table_base}.csv",
            "plot": str(options.plot_path),
            "settings": {i.job.settings_text: tables.settings_facts(i.job) for i in results.scored},
            "sampled": report.sampled,
            "judged": report.judged,
            "kl": results.kl,
            "unscored": report.unscored,
            "shortened": report.shortened,
            "no_room": report.no_room,
            "lost_units": report.lost_units,
            "tokens": report.tokens,
            "sample_seconds": round(report.sample_seconds, 3),
            "wait_seconds": round(report.wait_seconds, 3),
            "work_seconds": round(report.work_seconds, 3),
            "load_seconds": [round(seconds, 3) for seconds in report.load_seconds],
            "isolation": dict(tier),
        },
    }


def settle(
    options: Options,
    listing: Listing,
    results: Results,
    report: Report,
    wanted: Sequence[conditions_of.Condition],
) -> None:
    """Raise PartialError for what was left out or does not hold; else say what comes next."""
    reasons = []
    for item in results.missing:
        names = " ".join(item.tally.missing[:5])
        reasons.append(
            f"{item.job.target.text} {item.job.task.name}: {len(item.tally.missing)} problems are "
            f"not scored ({names}{' ...' if len(item.tally.missing) > 5 else ''})"
        )
    if report.faults:
        reasons.append(f"{len(report.faults)} failures of ours, the first: {report.faults[0]}")
    if listing.left_out:
        reasons.append(f"{len(listing.left_out)} incomplete checkpoints were left out")
    reasons += conditions_of.unmet(wanted, results.rows)
    if reasons:
        raise PartialError("\n".join(reasons), hint="Finished samples are kept; run it again.")
    if options.shard is not None:
        output.hint(
            "When all shards are done, run the same command without --shard for the tables."
        )
        return
    runs = dict.fromkeys(i.job.target.path.parent for i in results.scored if i.job.target.step)
    if runs:
        names = " ".join(shlex.quote(str(run)) for run in runs)
        output.hint(f"Next: rlfe push {names} --to-folder published")


def dry_run(options: Options, jobs: Sequence[Job]) -> None:
    lines = []
    for job in jobs:
        store = job.read()
        todo = sum(count for _, _, count in job.missing(store)) if options.resume else 0
        total = len(job.problems) * job.settings.n
        todo = todo if options.resume else total
        mean = _mean_tokens(job, store)
        lines.append(
            {
                "checkpoint": job.target.text,
                "task": job.task.name,
                "problems": len(job.problems),
                "n": job.settings.n,
                "done": total - todo,
                "to do": todo,
                "tokens at most": todo * job.settings.max_tokens,
                "tokens likely": None if mean is None else round(todo * mean),
                "settings": job.settings_text,
            }
        )
    if options.as_json:
        output.document({"schema": "rlfe.eval-plan/1", "rows": lines, "run": {}})
    else:
        output.table(list(lines[0]), lines)
    output.hint(f"To do it: {shlex.join(typed_words({'dry_run'}))}")


def _mean_tokens(job: Job, store: Store) -> float | None:
    """Mean reply length of what is there, here or at another step of the same samples."""
    stores = [store] if store.blocks else []
    if not stores and job.store_path.parent.is_dir():
        beside = sorted(job.store_path.parent.glob("step_*.jsonl.zst"))[-1:]
        stores = [Store.read(path, job.rule) for path in beside]
    lengths = [sample.tokens for s in stores for row in s.blocks.values() for sample in row]
    return sum(lengths) / len(lengths) if lengths else None


def typed_words(without: Collection[str]) -> list[str]:
    """The command as it was typed, without some parameters."""
    context = click.get_current_context()
    words = ["rlfe", "eval"]
    for param in context.command.params:
        name = param.name or ""
        typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if typed and name in context.params and name not in without:
            words += _option_words(param, context.params[name])
    return words


def _option_words(param: click.Parameter, value: Any) -> list[str]:
    """An option as it would be typed."""
    if isinstance(value, bool):
        return [param.opts[0] if value else param.secondary_opts[0]]
    if param.name == "ks":
        return [param.opts[0], ",".join(map(str, value))]
    words = []
    for item in value if isinstance(value, tuple) else (value,):
        words += [param.opts[0]] if item in (RUNS_OWN, ANY_CLUSTER) else [param.opts[0], str(item)]
    return words
