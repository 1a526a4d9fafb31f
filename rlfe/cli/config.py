"""`rlfe config`: what a run would be configured with, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from rlfe import config
from rlfe.cli import help as pages
from rlfe.cli import output
from rlfe.toml import value

EXAMPLES = [
    "rlfe config show --recipe lr-ladder --set optim.lr=3e-6",
    "rlfe config show --recipe tiny --json",
]


@click.group("config", context_settings=pages.CONTEXT)
def command() -> None:
    """Show the configuration."""


@command.command("show", cls=pages.Command, examples=EXAMPLES)
@pages.recipe_options
@pages.option("Output", "--about", is_flag=True, help="A sentence about each key too.")
@pages.json_option
@click.pass_context
def show(
    ctx: click.Context, recipe: Sequence[str], sets: Sequence[str], about: bool, as_json: bool
) -> None:
    """Every value with its origin; recipes, RLFE_* variables and --set applied."""
    resolved = config.load(recipe, sets, pages.environment(ctx))
    for text in config.check(resolved.recipe):
        output.warn(text)
    known = config.keys()
    rows: list[dict[str, Any]] = [
        {
            "key": key,
            "value": item,
            "origin": resolved.origins[key],
            "about": known[key].about if key in known else None,
        }
        for key, item in resolved.values().items()
    ]
    if as_json:
        run = {"recipe": list(recipe), "set": list(sets)}
        output.document({"schema": "rlfe.config/1", "rows": rows, "run": run})
        return
    shown = [{**row, "value": _text(row["value"])} for row in rows]
    output.table(("key", "value", "origin", *(("about",) if about else ())), shown)


def _text(item: Any) -> str:
    return "none" if item is None else value(item)
