"""Help pages with sections and examples, for commands and for the command list.

`Command` is the class of every command (`cls=help.Command`), `option(section, ...)` an option
that is listed under a heading. Not here: what a command does. Try: `rlfe train -h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

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


class Command(click.Command):
    """A command whose help has option sections and an Examples block.

    Args:
        examples: Command lines, shown as they are.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        attributes.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)

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


def environment(ctx: click.Context) -> Mapping[str, str]:
    """The process environment as `cli/main.py` passed it; empty when a test gives none."""
    found = ctx.find_root().obj
    return found if isinstance(found, Mapping) else {}
