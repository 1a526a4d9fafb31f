"""`rlfe report`: tables, figures and one page of statistics from evaluated runs. Needs no torch.

Try: `rlfe report runs/* -o report`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlfe.cli import help as pages
from rlfe.cli import output

SCHEMA = "rlfe.report/1"


@click.command(
    "report",
    cls=pages.Command,
    examples=[
        "rlfe report runs/qwen3_1p7b_base_mbpp_* -o report",
        "rlfe report runs/* -o report --criteria lag-staleness",
        "rlfe report runs/tiny_mbpp_nobuf_lr1e3 --json",
    ],
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@pages.option(
    "Output", "-o", "--output", "folder", type=click.Path(path_type=Path), default=Path("report"),
    help="Folder of the report.",
)  # fmt: skip
@pages.option("What", "--title", default="What was learned, what was forgotten", help="Heading.")
@pages.option(
    "What", "--criteria", type=click.Path(path_type=Path), metavar="NAME|FILE",
    help="TOML file with [[criterion]] or [[comparison]] tables, or a recipe that declares some; "
    "default: what the runs themselves declare.",
)  # fmt: skip
@pages.option(
    "What", "--runs-dir", type=click.Path(path_type=Path), metavar="DIRECTORY",
    help="Where results of base models lie; default: beside each run.",
)  # fmt: skip
@pages.option(
    "What",
    "--clusters",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="CSV with columns problem, cluster: adds standard errors for problems that belong "
    "together.",
)
@pages.json_option
def command(
    runs: tuple[Path, ...],
    folder: Path,
    title: str,
    criteria: Path | None,
    runs_dir: Path | None,
    clusters: Path | None,
    as_json: bool,
) -> None:
    """Tables, plots and statistics of evaluated runs, as one self-contained page."""
    from rlfe.eval.report.declared import of_runs
    from rlfe.eval.report.gather import read_runs
    from rlfe.eval.report.write import build, read_clusters, write

    chosen = read_runs([path for path in runs if not path.name.startswith(("_", "."))])
    declared = of_runs(chosen, criteria)
    analysis, payload = build(
        chosen, runs_dir, declared, read_clusters(clusters) if clusters else None
    )
    files = write(folder, title, analysis, payload)
    if as_json:
        facts = _facts(payload, files)
        output.document({"schema": SCHEMA, "rows": payload["answer"], "run": facts})
        return
    for sentence in payload["answer"]:
        output.result(sentence)
    for line in _declared_lines(payload):
        output.result(line)
    for note in payload["notes"]:
        output.note(note)
    output.hint(f"Next: open {files[0]}")


def _declared_lines(payload: dict[str, Any]) -> list[str]:
    """Verdicts, then every row of the declared comparisons, each with where it was declared."""
    lines = []
    for verdict in payload["verdicts"]:
        text = f"{verdict['name']}: {verdict['verdict'].upper()} ({verdict['sentence']})"
        lines.append(f"{text} [{verdict['recorded']}]")
    for entry in payload["comparisons"]:
        lines.append(f"{entry['name']} [{entry['recorded']}]: {'; '.join(entry['notes']) or 'ok'}")
        for row in entry["scores"]:
            at = f" at {entry['each']} = {row['each']}" if entry["each"] else ""
            lines.append(
                f"  {row['readout']}{at}, step {row['step']}: {_points(row)}, Holm p "
                f"{row['holm']:.3g} of {row['family']}, {100 * row['detectable']:.1f} detectable"
            )
        for row in entry["steps"]:
            lines.append(
                f"  {row['readout']}, {row['a']} - {row['b']}: {row['mean']:+.4f} on the mean of "
                f"{row['steps']} steps; updates {row['updates_a']} and {row['updates_b']}, tokens "
                f"{row['tokens_a']} and {row['tokens_b']}"
            )
    for fit in payload["kl"]["fits"]:
        r2 = "-" if fit["r2"] is None else f"{fit['r2']:.3f}"
        lines.append(
            f"{fit['model']}: forgetting ~ {fit['a']:.4g} KL + {fit['b']:.4g} KL^2 over "
            f"{fit['points']} checkpoints, R^2 {r2}"
        )
    return lines


def _points(row: dict[str, Any]) -> str:
    effect, low, high = (100 * row[name] for name in ("effect", "low", "high"))
    return f"{effect:+.1f} points [{low:.1f}, {high:.1f}]"


def _facts(payload: dict[str, Any], files: list[Path]) -> dict[str, Any]:
    return {
        "files": [str(file) for file in files],
        "notes": payload["notes"],
        "stability": payload["stability"],
        "paths": payload["paths"],
        "matched": payload["matched"],
        "limits": payload["limits"],
        "verdicts": payload["verdicts"],
        "comparisons": payload["comparisons"],
        "kl": payload["kl"],
    }
