"""A report folder: index.html, figures, and the tables as CSV, Parquet and Markdown."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfe.criteria import Criterion, Declared
from rlfe.errors import NotFoundError, RequestError
from rlfe.eval import leaks, merge
from rlfe.eval.evidence import verdict_entry
from rlfe.eval.plots import plotted_ks, write_plot
from rlfe.eval.report import page
from rlfe.eval.report.analysis import Analysis
from rlfe.eval.report.declared import entries, recorded
from rlfe.eval.report.distance import distance_payload
from rlfe.eval.report.figures import write_figures
from rlfe.eval.report.gather import Run, read_groups
from rlfe.eval.report.samples import shown_samples
from rlfe.eval.report.series import TRAINED
from rlfe.eval.statistics import OVER_PROBLEMS
from rlfe.eval.tables import COLUMNS, number, parquet_bytes
from rlfe.rundir import write_bytes, write_text


def build(
    runs: Sequence[Run],
    runs_dir: Path | None = None,
    declared: Sequence[Declared] = (),
    clusters: Mapping[str, str] | None = None,
) -> tuple[Analysis, dict[str, Any]]:
    """Analysis and page payload of these runs. `declared`: what gets a verdict or is compared.

    Raises:
        RequestError: Nothing of them was evaluated and none has a training record.
    """
    groups = read_groups(runs, runs_dir)
    if not groups and not any(run.metrics for run in runs):
        raise RequestError(
            "these runs have neither evaluations nor a training record",
            hint="Evaluate first: rlfe eval --ckpt-glob 'runs/*/global_step_*' --base",
        )
    analysis = Analysis(runs, groups, clusters=clusters)
    payload = analysis.payload()
    payload |= {
        "answer": page.answers(analysis, payload),
        "samples": shown_samples(runs, groups, runs_dir),
        "training": page.training_curves(runs),
        "settings": page.settings_texts(runs, payload["groups"]),
        "leaks": leak_check(runs, payload["groups"]),
        "verdicts": [
            {**verdict_entry(entry, runs, runs_dir), "recorded": recorded(entry, runs)}
            for entry in declared
            if isinstance(entry, Criterion)
        ],
        "comparisons": entries(declared, runs, analysis),
        "kl": distance_payload(runs, payload["paths"]),
    }
    return analysis, payload


def write(folder: Path, title: str, analysis: Analysis, payload: Mapping[str, Any]) -> list[Path]:
    """Write the whole report; returns its files.

    Raises:
        RlfeError: The disk is full.
    """
    text = page.page(payload, title)
    rows = table_rows(payload)
    files = [folder / "index.html", folder / "scores.csv", folder / "scores.parquet"]
    write_text(files[0], text)
    write_text(files[1], merge.csv_text(rows, COLUMNS))
    write_bytes(files[2], parquet_bytes(rows, COLUMNS))
    write_text(folder / "scores.md", markdown(payload))
    files.append(folder / "scores.md")
    if write_plot(folder / "pass_at_k.png", rows, plotted_ks(rows)):
        files.append(folder / "pass_at_k.png")
    return files + write_figures(folder, payload)


def read_clusters(path: Path) -> dict[str, str]:
    """Problem id -> cluster, from a CSV with the columns problem and cluster.

    Raises:
        NotFoundError: There is no such file.
        RequestError: A column is missing.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if not {"problem", "cluster"} <= set(reader.fieldnames or ()):
                raise RequestError(f"{path} has no columns problem and cluster")
            return {row["problem"]: row["cluster"] for row in reader}
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist") from None


def table_rows(payload: Mapping[str, Any]) -> list[merge.Row]:
    """The score table of `rlfe eval`, for everything in the report."""
    rows = []
    for group in payload["groups"]:
        for point in group["points"]:
            for k in range(1, group["n"] + 1):
                ends = [point[side][k - 1] if side in point else None for side in ("low", "high")]
                rows.append(
                    {
                        "cell": point["cell"],
                        "step": str(point["step"]),
                        "task": group["task"],
                        "k": str(k),
                        "score": number(point["score"][k - 1]),
                        "low": "" if ends[0] is None else number(ends[0]),
                        "high": "" if ends[1] is None else number(ends[1]),
                        "interval": "" if ends[0] is None else OVER_PROBLEMS,
                        "problems": str(len(group["problems"])),
                        "n": str(group["n"]),
                        "settings": group["settings"],
                        "missing": "",
                    }
                )
    return merge.sort_rows(rows)


def markdown(payload: Mapping[str, Any]) -> str:
    """The shown scores as Markdown tables, one per task and settings."""
    parts = []
    for group in payload["groups"]:
        head = ["cell", "step", *(f"pass@{k}" for k in group["shown"])]
        lines = [f"## {group['task']} ({group['settings']})", ""]
        lines.append("| " + " | ".join(head) + " |")
        lines.append("| --- |" + " --: |" * (len(head) - 1))
        for point in group["points"]:
            cells = [point["cell"], str(point["step"])]
            cells += [_cell(point, k) for k in group["shown"]]
            lines.append("| " + " | ".join(cells) + " |")
        caption = f"{len(group['problems'])} problems, n = {group['n']}; {OVER_PROBLEMS}."
        parts.append("\n".join([*lines, "", caption, ""]))
    return "\n".join(parts)


def _cell(point: Mapping[str, Any], k: int) -> str:
    text = f"{100 * point['score'][k - 1]:.1f}"
    if "low" in point:
        text += f" [{100 * point['low'][k - 1]:.1f}, {100 * point['high'][k - 1]:.1f}]"
    return text


def leak_check(runs: Sequence[Run], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Training against evaluation problems of the packaged tasks, each pair once."""
    from rlfe.tasks import BY_NAME, get

    trained = sorted({run.recipe.task.name for run in runs if run.recipe.data.source is None})
    scored = sorted({group["task"] for group in groups if not group["task"].endswith("_base")})
    found: list[dict[str, Any]] = []
    for train in trained:
        if train not in BY_NAME or train not in TRAINED:
            continue
        for task in scored:
            if task not in BY_NAME:
                continue
            if (train == "gsm8k") != (task == "gsm8k"):
                text = f"{train} against {task}: different kinds of problems, no id in common."
                found.append({"text": text, "rows": []})
                continue
            same = train.startswith("mbpp") and task.startswith("mbpp")
            training, scored_ones = get(train).problems("train"), get(task).problems("test")
            result = leaks.overlap(training, scored_ones, same, leaks.source_wordings(task))
            rows = [list(twin) for twin in result.twins]
            found.append({"text": f"{train} against {task}: {result.text}.", "rows": rows})
    return found
