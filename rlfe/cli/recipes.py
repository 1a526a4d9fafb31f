"""`rlfe recipes`: list, show, compare, expand and document recipes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click

from rlfe import config, sweeps
from rlfe.cli import help as pages
from rlfe.cli import output, values
from rlfe.cli.experiment import document

NAME: dict[str, Any] = {"metavar": "RECIPE", "shell_complete": values.recipes}


@click.group("recipes", context_settings=pages.CONTEXT)
def command() -> None:
    """List, show, compare and expand recipes."""


@command.command(
    "list", cls=pages.Command, examples=["rlfe recipes list", "rlfe recipes list --json"]
)
@pages.json_option
def show_list(as_json: bool) -> None:
    """The shipped recipes and what they vary."""
    rows = [_row(name) for name in config.shipped()]
    if as_json:
        output.document({"schema": "rlfe.recipes/1", "rows": rows})
    else:
        output.table(("name", "task", "steps", "varies", "about"), rows)


def _row(name: str) -> dict[str, Any]:
    recipe = config.load([name]).recipe
    varies = " x ".join(f"{key} ({len(entries)})" for key, entries in recipe.matrix.items())
    return {
        "name": name,
        "task": recipe.task.name,
        "steps": recipe.train.steps,
        "varies": varies or None,
        "about": recipe.about,
    }


@command.command("show", cls=pages.Command, examples=["rlfe recipes show lr-ladder"])
@click.argument("recipe", **NAME)
@pages.json_option
def show(recipe: str, as_json: bool) -> None:
    """A recipe's text; with --json every resolved value."""
    resolved = config.load([recipe])
    if as_json:
        run = {"recipe": recipe}
        output.document({"schema": "rlfe.recipe/1", "rows": resolved.values(), "run": run})
    else:
        output.result(config.recipe_text(recipe)[1].rstrip())


@command.command(
    "diff",
    cls=pages.Command,
    examples=["rlfe recipes diff deepcoder-top-p-1.0 deepcoder-top-p-0.9"],
)
@click.argument("first", **NAME)
@click.argument("second", **NAME)
@pages.json_option
def diff(first: str, second: str, as_json: bool) -> None:
    """Only what differs between two recipes, after resolving both."""
    rows = differing(config.load([first]).values(), config.load([second]).values())
    if as_json:
        named = [{"key": key, "first": old, "second": new} for key, old, new in rows]
        run = {"first": first, "second": second}
        output.document({"schema": "rlfe.recipes_diff/1", "rows": named, "run": run})
    elif rows:
        output.table(("key", first, second), rows)
    else:
        output.note(f"{first} and {second} resolve to the same settings.")


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, first, second) of every key whose values differ."""
    keys = list(dict.fromkeys((*first, *second)))
    pairs = [(key, first.get(key), second.get(key)) for key in keys]
    return [(key, old, new) for key, old, new in pairs if old != new]


@command.command("expand", cls=pages.Command, examples=["rlfe recipes expand lr-ladder"])
@click.argument("recipe", **NAME)
@pages.option("Settings", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@pages.json_option
@click.pass_context
def expand(ctx: click.Context, recipe: str, sets: Sequence[str], as_json: bool) -> None:
    """One command per cell, for a scheduler of your own."""
    found = sweeps.cells([recipe], sets, pages.environment(ctx))
    commands = [sweeps.train_command([recipe], sets, cell) for cell in found]
    if as_json:
        rows = [
            {"cell": cell.name, "overrides": cell.overrides, "command": line}
            for cell, line in zip(found, commands, strict=True)
        ]
        run = {"recipe": recipe}
        output.document({"schema": "rlfe.cells/1", "rows": rows, "run": run})
        return
    output.result("\n".join(shlex.join(line) for line in commands))


@command.command(
    "doc", cls=pages.Command, examples=["rlfe recipes doc deepcoder-top-p-1.0 deepcoder-top-p-0.9"]
)
@click.argument("recipes", nargs=-1, required=True, **NAME)
@click.pass_context
def doc(ctx: click.Context, recipes: Sequence[str]) -> None:
    """Write the experiment document (Markdown)."""
    output.result(document(recipes, pages.environment(ctx)))
