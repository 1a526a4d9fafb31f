"""From counts to the tables that people, the card and the report read.

One row per (cell, step, task, k) for every k from 1 to n, in `<name>.csv` and `<name>.parquet`;
right samples per problem in `<name>_counts.parquet`, from which every number can be made again;
side measures in `<name>_rates.csv`; what a settings text stands for in `<name>_settings.json`.
Files are merged with what an earlier call left, sorted, written beside and renamed; the same
samples give the same bytes. An incomplete row has no score and names its missing problems.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlfe.errors import RlfeError
from rlfe.eval import merge
from rlfe.eval.jobs import Job
from rlfe.eval.passk import pass_at_all_k
from rlfe.eval.statistics import DRAWS, OVER_PROBLEMS, WILSON, draw_weights, over_problems, wilson
from rlfe.eval.tally import Tally
from rlfe.randomness import generator
from rlfe.rundir import write_bytes, write_text

if TYPE_CHECKING:
    import pyarrow

COLUMNS = (
    "cell", "step", "task", "k", "score", "low", "high", "interval", "problems", "n", "settings",
    "missing",
)  # fmt: skip
KEY = ("cell", "step", "task", "settings")
RATES = (
    "samples", "cut", "syntax_error", "no_answer", "timeout", "crashed", "distinct", "mean_tokens",
)  # fmt: skip
WHOLE_NUMBERS = {"step", "k", "problems", "n", "correct", "samples"}
TEXTS = {"cell", "task", "interval", "settings", "missing", "problem"}
REPORT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One finished job and its counts."""

    job: Job
    tally: Tally


class Draws:
    """Bootstrap draws, one matrix per (task, number of problems), shared by all checkpoints."""

    def __init__(self, seed: int = REPORT_SEED, table: str = "scores") -> None:
        self._seed, self._table = seed, table
        self._made: dict[tuple[str, int], np.ndarray] = {}

    def of(self, task: str, problems: int) -> np.ndarray:
        """Weights [B, P]; the same (report seed, table, task, P) always gives the same draws."""
        key = (task, problems)
        if key not in self._made:
            stream = generator(self._seed, "bootstrap", self._table, task)
            self._made = {key: draw_weights(problems, DRAWS, stream)}  # one at a time: 100 MB
        return self._made[key]


def score_rows(scored: Scored, draws: Draws) -> list[merge.Row]:
    """Rows of all measures and all k of one job, as texts."""
    job, tally = scored.job, scored.tally
    rows = []
    for task, correct in tally.correct.items():
        columns = _columns(tally, task, np.array(correct), job.settings.temperature, draws)
        for k in range(1, tally.n + 1):
            score, low, high, interval = (column[k - 1] for column in columns)
            rows.append(
                {
                    **_key(job, task),
                    "k": str(k),
                    "score": score,
                    "low": low,
                    "high": high,
                    "interval": interval,
                    "problems": str(len(tally.problems)),
                    "n": str(tally.n),
                    "missing": " ".join(tally.missing),
                }
            )
    return rows


def _columns(
    tally: Tally, task: str, correct_P: np.ndarray, temperature: float, draws: Draws
) -> list[list[str]]:
    """Texts of score, low, high and interval for k = 1..n; empty where there is no value."""
    empty = [""] * tally.n
    if tally.missing or not tally.problems:
        return [empty] * 4
    p_PK = pass_at_all_k(tally.n, correct_P)
    score = [number(x) for x in p_PK.mean(axis=0)]
    if len(tally.problems) == 1:
        return [score, empty, empty, empty]
    if temperature == 0:
        low, high = wilson(int(correct_P.sum()), len(tally.problems))
        return [score, [number(low)], [number(high)], [WILSON]]
    interval = over_problems(p_PK, draws.of(task, len(tally.problems)))
    low_high = [[number(x) for x in side] for side in interval]
    return [score, *low_high, [OVER_PROBLEMS] * tally.n]


def _key(job: Job, task: str) -> merge.Row:
    target = job.target
    return {
        "cell": target.cell,
        "step": str(target.step),
        "task": task,
        "settings": job.settings_text,
    }


def number(value: float) -> str:
    """Nine decimals at most, no noise behind: `number(0.30000000000000004) == "0.3"`."""
    return repr(round(float(value), 9))


def count_rows(scored: Scored) -> list[merge.Row]:
    """Right samples of every problem that has all its samples."""
    tally, missing = scored.tally, set(scored.tally.missing)
    return [
        {**_key(scored.job, task), "problem": problem, "n": str(tally.n), "correct": str(right)}
        for task, correct in tally.correct.items()
        for problem, right in zip(tally.problems, correct, strict=True)
        if problem not in missing
    ]


def rate_rows(scored: Scored) -> list[merge.Row]:
    """Side measures of the job, under the name of its headline measure."""
    facts = asdict(scored.tally.rates)
    texts = {
        name: number(value) if name != "samples" else str(value) for name, value in facts.items()
    }
    return [{**_key(scored.job, scored.job.task.name), **texts}]


def write_tables(
    base: Path, scored: Sequence[Scored], rows: Sequence[merge.Row]
) -> list[merge.Row]:
    """Merge into the files named `base` (without suffix); returns all rows of the score table.

    Raises:
        RequestError: the old table contradicts itself or has other columns; it is left as it is.
        RlfeError: the disk is full; the old files are kept.
    """
    redo = {merge.point_of(row) for row in rows}
    old = _read_csv(base.with_suffix(".csv"))
    merged = merge.sort_rows([*merge.usable_rows(old, redo), *rows])
    counts = [row for item in scored for row in count_rows(item)]
    rates = [row for item in scored for row in rate_rows(item)]
    _write_counts(beside(base, "_counts.parquet"), counts, redo)
    _write_rates(beside(base, "_rates.csv"), rates, redo)
    _write_settings(beside(base, "_settings.json"), scored)
    write_bytes(base.with_suffix(".parquet"), parquet_bytes(merged, COLUMNS))
    write_text(base.with_suffix(".csv"), merge.csv_text(merged, COLUMNS))
    return merged


def beside(base: Path, ending: str) -> Path:
    """`beside(Path("t/scores"), "_rates.csv") == Path("t/scores_rates.csv")`."""
    return base.with_name(base.name + ending)


def _read_csv(path: Path) -> list[merge.Row]:
    try:
        return merge.read_rows(path.read_text(encoding="utf-8")) if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise RlfeError(
            f"{path} cannot be read: {error}", hint="Move it away, or give another --csv."
        ) from error


def _write_rates(path: Path, rows: Sequence[merge.Row], redo: set[merge.Point]) -> None:
    layout = merge.Layout(k="samples", score="mean_tokens")
    old = merge.read_rows(path.read_text(encoding="utf-8"), layout) if path.exists() else []
    kept = [row for row in old if merge.point_of(row) not in redo]
    text = merge.csv_text(merge.sort_rows([*kept, *rows], layout), (*KEY, *RATES))
    write_text(path, text)


def _write_counts(path: Path, rows: Sequence[merge.Row], redo: set[merge.Point]) -> None:
    columns = (*KEY, "problem", "n", "correct")
    old = read_parquet(path) if path.exists() else []
    kept = [row for row in old if merge.point_of(row) not in redo]
    ordered = sorted(
        [*kept, *rows],
        key=lambda row: (row["cell"], int(row["step"]), row["task"], row["settings"]),
    )
    write_bytes(path, parquet_bytes(ordered, columns))


def _write_settings(path: Path, scored: Iterable[Scored]) -> None:
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for item in scored:
        known[item.job.settings_text] = settings_facts(item.job)
    write_text(path, json.dumps(known, indent=1, sort_keys=True) + "\n")


def settings_facts(job: Job) -> dict[str, Any]:
    """Everything behind a settings text, readable."""
    settings = job.settings
    return {
        **job.facts,
        "n": settings.n,
        "limit": settings.limit,
        "mode": settings.mode,
        "judge": job.rule,
    }


def parquet_bytes(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> bytes:
    """The rows as a Parquet file: texts, whole numbers and floats; empty cells are null."""
    import pyarrow
    import pyarrow.parquet

    arrays = [
        pyarrow.array([_typed(name, row[name]) for row in rows], _arrow_type(name))
        for name in columns
    ]
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays, names=list(columns)), out)
    return out.getvalue()


def read_parquet(path: Path) -> list[merge.Row]:
    """The rows of such a file as texts again."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return [
        {name: "" if value is None else str(value) for name, value in row.items()}
        for row in table.to_pylist()
    ]


def typed_row(row: merge.Row) -> dict[str, str | int | float | None]:
    """A row with numbers as numbers and empty cells as None."""
    return {name: _typed(name, text) for name, text in row.items()}


def _typed(name: str, text: str) -> str | int | float | None:
    if name in TEXTS:
        return text
    if text == "":
        return None
    return int(text) if name in WHOLE_NUMBERS else float(text)


def _arrow_type(name: str) -> pyarrow.DataType:
    import pyarrow

    if name in TEXTS:
        return pyarrow.string()
    return pyarrow.int64() if name in WHOLE_NUMBERS else pyarrow.float64()
