"""`rlfe doctor`: what this machine can do, a line a check, the fix beside what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rlfe import config
from rlfe.cli import checks, output
from rlfe.cli import help as pages
from rlfe.errors import PartialError

EXAMPLES = [
    "rlfe doctor",
    "rlfe doctor --recipe lr-ladder --runs-dir /scratch/runs",
    "rlfe doctor --repo my-org/code-rl --json",
]


@click.command("doctor", cls=pages.Command, examples=EXAMPLES)
@pages.recipe_options
@pages.runs_dir_option
@pages.option("Where", "--repo", metavar="ORG/NAME", help="Try the token's right to write there.")
@pages.json_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: Sequence[str],
    sets: Sequence[str],
    runs_dir: Path,
    repo: str | None,
    as_json: bool,
) -> None:
    """Check this machine: versions, devices, engines, isolation, data, token, disk.

    Exit 3 if a check that everything needs fails. Works without torch.
    """
    asked = config.load(recipe, sets, pages.environment(ctx)).recipe if recipe or sets else None
    findings = [
        *checks.versions(),
        *checks.engines(),
        *checks.gpus(),
        checks.data(),
        *checks.isolation(),
        checks.token(repo),
        checks.disk(runs_dir, asked),
    ]
    _show(findings, as_json)
    failed = [finding.name for finding in findings if finding.mark == checks.FAIL]
    if failed:
        raise PartialError(f"doctor: {', '.join(failed)} failed", hint="See the fix on its line.")


def _show(findings: Sequence[checks.Finding], as_json: bool) -> None:
    rows: list[dict[str, Any]] = [finding._asdict() for finding in findings]
    if as_json:
        output.document({"schema": "rlfe.doctor/1", "rows": rows})
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        fix = f"  -> {finding.fix}" if finding.fix else ""
        output.result(f"{finding.mark:<4}  {finding.name:<{width}}  {finding.value}{fix}")
