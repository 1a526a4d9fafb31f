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
    help="TOML file with [[criterion]] tables, or a packaged one; prints their verdicts.",
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
    from rlfe.eval.report.gather import read_runs
    from rlfe.eval.report.write import build, read_clusters, write

    chosen = read_runs([path for path in runs if not path.name.startswith(("_", "."))])
    verdicts = _verdicts(criteria, chosen, runs_dir)
    analysis, payload = build(
        chosen, runs_dir, verdicts, read_clusters(clusters) if clusters else None
    )
    files = write(folder, title, analysis, payload)
    if as_json:
        facts = _facts(payload, files)
        output.document({"schema": SCHEMA, "rows": payload["answer"], "run": facts})
        return
    for sentence in payload["answer"]:
        output.result(sentence)
    for verdict in verdicts:
        output.result(f"{verdict['name']}: {verdict['verdict'].upper()} ({verdict['sentence']})")
    for note in payload["notes"]:
        output.note(note)
    output.hint(f"Next: open {files[0]}")


def _verdicts(criteria: Path | None, runs: Any, runs_dir: Path | None) -> list[dict[str, Any]]:
    if criteria is None:
        return []
    from rlfe.eval.criteria import read_criteria
    from rlfe.eval.evidence import verdict_entry

    return [verdict_entry(criterion, runs, runs_dir) for criterion in read_criteria(criteria)]


def _facts(payload: dict[str, Any], files: list[Path]) -> dict[str, Any]:
    return {
        "files": [str(file) for file in files],
        "notes": payload["notes"],
        "stability": payload["stability"],
        "paths": payload["paths"],
        "matched": payload["matched"],
        "limits": payload["limits"],
        "verdicts": payload["verdicts"],
    }
