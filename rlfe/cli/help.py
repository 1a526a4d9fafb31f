"""Help pages with sections and examples, for commands and for the command list.

`Command` is the class of every command (`cls=help.Command`), `option(section, ...)` an option
that is listed under a heading. Not here: what a command does. Try: `rlfe train -h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from rlfe.cli import output, values

F = TypeVar("F", bound=Callable[..., Any])
CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}
OTHER = "Other"


class Option(click.Option):
    """An option that is listed under a heading."""

    def __init__(self, *args: Any, section: str = OTHER, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section


def option(section: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """`click.option` under a heading: `@help.option("Output", "--json", is_flag=True)`."""
    return click.option(*names, cls=Option, section=section, **attributes)


def _speak(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        output.configure(**{str(param.name): True})


VERBOSITY = (
    (("-v", "--verbose"), "More words; a traceback for unexpected errors."),
    (("-q", "--quiet"), "Only the result and warnings."),
)
SPOKEN: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": _speak}


class Command(click.Command):
    """A command whose help has option sections and an Examples block, with -q and -v.

    Args:
        examples: Command lines, shown as they are.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        attributes.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)
        there = {name for param in self.params for name in param.opts}
        for names, about in reversed(VERBOSITY):
            if there.isdisjoint(names):
                self.params.append(Option(names, section="Output", help=about, **SPOKEN))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = param.section if isinstance(param, Option) else OTHER
                sections.setdefault(heading, []).append(record)
        other = sections.pop(OTHER, [])
        for heading, records in {**sections, OTHER: other}.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def json_option(function: F) -> F:
    """Adds --json, passed to the command as `as_json`."""
    about = "One JSON document on stdout."
    return option("Output", "--json", "as_json", is_flag=True, help=about)(function)


def recipe_options(function: F) -> F:
    """Adds --recipe and --set, passed as `recipe` and `sets`."""
    about = "KEY=VALUE; the value is TOML, a bare word is text. Repeatable."
    sets = option(
        "Settings", "--set", "sets", multiple=True, metavar="KEY=VALUE", help=about,
        shell_complete=values.setting_keys,
    )  # fmt: skip
    about = "A shipped recipe or a TOML file; of several the later wins."
    recipe = option(
        "Settings", "--recipe", "recipe", multiple=True, metavar="NAME|FILE", help=about,
        shell_complete=values.recipes,
    )  # fmt: skip
    return recipe(sets(function))


def runs_dir_option(function: F) -> F:
    """Adds --runs-dir, passed as `runs_dir` (a Path)."""
    folder = click.Path(file_okay=False, path_type=Path)
    about = "Folder that holds the run folders."
    return option("Where", "--runs-dir", type=folder, default=Path("runs"), help=about)(function)


def environment(ctx: click.Context) -> Mapping[str, str]:
    """The process environment as `cli/main.py` passed it; empty when a test gives none."""
    found = ctx.find_root().obj
    return found if isinstance(found, Mapping) else {}
