"""The `rlfe` command: finds the asked command, runs it, and turns every end into an exit code.

The group is lazy: the list below holds each command's module and one line of help, so
`rlfe --help` imports no command. This is the one place that reads the environment; commands get
it from `rlfe.cli.help.environment(ctx)`. Try: `rlfe --help`.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from rlfe import __version__
from rlfe.cli import help as pages
from rlfe.cli import output
from rlfe.errors import RequestError, RlfeError
from rlfe.suggestions import nearest


class Entry(NamedTuple):
    """A command of the list. `COMMANDS["train"].module == "rlfe.cli.train"`"""

    section: str
    about: str

    def module(self, name: str) -> str:
        return f"rlfe.cli.{name}"


COMMANDS = {
    "train": Entry("Experiments", "Train a cell from a recipe: GRPO, with or without replay."),
    "eval": Entry("Experiments", "Measure pass@k of checkpoints and of the base model."),
    "judge": Entry("Experiments", "Judge samples of a file against a task's tests."),
    "report": Entry("Experiments", "Tables, plots and statistics of evaluated runs."),
    "sweep": Entry("Experiments", "Expand a recipe's matrix and run its cells."),
    "push": Entry("Publishing", "Publish runs: plan first, then one commit a checkpoint."),
    "pull": Entry("Publishing", "Fetch runs or checkpoints from a repository."),
    "card": Entry("Publishing", "Write the model card of runs."),
    "export": Entry("Publishing", "Write samples in the form of other scorers."),
    "recipes": Entry("Looking", "List, show, compare and expand recipes."),
    "config": Entry("Looking", "Show every setting with its origin."),
    "runs": Entry("Looking", "List runs with their progress and evaluations."),
    "doctor": Entry("Looking", "Check this machine: versions, devices, data, isolation, disk."),
    "completion": Entry("Shell", "Print the completion script of a shell."),
}
# What a path can refuse that the user chose: read-only, no right, a file where a folder has to be.
REFUSED_PATHS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
SECTIONS = ("Experiments", "Publishing", "Looking", "Shell")


class Group(click.Group):
    """The command list, with sections; a command's module is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, entry in COMMANDS.items() if _exists(entry.module(name))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None or not _exists(entry.module(cmd_name)):
            return None
        command: click.Command = importlib.import_module(entry.module(cmd_name)).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            guess = nearest(name, self.list_commands(ctx))
            suggestion = f'; did you mean "{guess}"?' if guess else ""
            raise click.UsageError(f'no command "{name}"{suggestion}', ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        for section in SECTIONS:
            rows = [(n, COMMANDS[n].about) for n in names if COMMANDS[n].section == section]
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@click.group(cls=Group, context_settings=pages.CONTEXT, no_args_is_help=True)
@click.version_option(__version__, prog_name="rlfe", message="%(prog)s %(version)s")
def cli() -> None:
    """Train language models with GRPO, see what they gain and forget, publish every checkpoint."""
    output.configure(quiet=False, verbose=False)  # each command's -q and -v come after this


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    # the Hub's store client waits minutes between two tries in silence; see rlfe.hub_calls
    os.environ.setdefault("HF_XET_CLIENT_RETRY_MAX_DURATION", "15s")
    environment = dict(os.environ)
    if environment.get("_RLFE_COMPLETE", "").startswith("powershell"):
        from rlfe.cli.completion import add_powershell  # click knows the other three itself

        add_powershell(environment)
    given = list(sys.argv[1:] if arguments is None else arguments)
    output.configure(color="NO_COLOR" not in environment)
    sys.exit(run(given, environment))


def run(arguments: list[str], environment: dict[str, str]) -> int:
    """Run one command line; returns its exit code (table in docs/cli.md)."""
    try:
        code: Any = cli.main(
            args=arguments, prog_name="rlfe", standalone_mode=False, obj=environment
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except output.ReaderGoneError:
        return _reader_gone()
    except RlfeError as problem:
        output.error(problem)
        return problem.exit_code
    except click.ClickException as problem:
        return _usage(problem)
    except (click.exceptions.Abort, KeyboardInterrupt):
        output.note("interrupted")
        return 130
    except OSError as problem:
        return _system(problem, arguments)
    except Exception as problem:
        return _unexpected(problem, arguments)


def _usage(problem: click.ClickException) -> int:
    hint = ""
    if isinstance(problem, click.UsageError) and problem.ctx is not None:
        hint = f"See {problem.ctx.command_path} --help."
    message = problem.format_message()
    output.error(RlfeError(message[:1].lower() + message[1:], hint=hint))
    return problem.exit_code


def _reader_gone() -> int:
    """Nobody reads any more: let Python's last flush go nowhere, and call it done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 0


def _system(problem: OSError, arguments: Sequence[str]) -> int:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" while writing {problem.filename}" if problem.filename else ""
        hint = "Free some space; everything saved before is kept."
        output.error(RlfeError(f"disk full{place}", hint=hint))
        return 1
    if problem.errno in REFUSED_PATHS and problem.filename:
        reason = (problem.strerror or "refused").lower()
        asked = RequestError(f"{problem.filename}: {reason}", hint="Choose another place.")
        output.error(asked)
        return asked.exit_code
    return _unexpected(problem, arguments)


def _unexpected(problem: Exception, arguments: Sequence[str]) -> int:
    """A mistake of ours: one line, and the traceback only when asked for."""
    if "-v" in arguments or "--verbose" in arguments:
        import traceback

        output.note(traceback.format_exc())
    text = " ".join(str(problem).split()) or "no message"
    hint = "Run again with -v for the traceback."
    output.error(RlfeError(f"{type(problem).__name__}: {text}", hint=hint))
    return 1


if __name__ == "__main__":
    main()
