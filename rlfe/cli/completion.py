"""`rlfe completion`: the script that makes a shell complete commands, options and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from rlfe.cli import help as pages
from rlfe.cli import output

VARIABLE = "_RLFE_COMPLETE"
SHELLS = ("bash", "zsh", "fish", "powershell")
POWERSHELL = """\
Register-ArgumentCompleter -Native -CommandName %(prog_name)s -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $env:COMP_WORDS = $commandAst.ToString()
    $env:COMP_INCOMPLETE = $wordToComplete
    $env:%(complete_var)s = "powershell_complete"
    %(prog_name)s | ForEach-Object {
        [System.Management.Automation.CompletionResult]::new($_, $_, "ParameterValue", $_)
    }
    Remove-Item Env:COMP_WORDS, Env:COMP_INCOMPLETE, Env:%(complete_var)s
}
"""


class PowerShell(ShellComplete):
    """Completion for PowerShell, which click does not have."""

    name = "powershell"
    source_template = POWERSHELL

    environment: ClassVar[Mapping[str, str]] = {}  # the protocol hands the words over in it

    def get_completion_args(self) -> tuple[list[str], str]:
        words = split_arg_string(self.environment.get("COMP_WORDS", ""))[1:]
        incomplete = self.environment.get("COMP_INCOMPLETE", "")
        if incomplete and words and words[-1] == incomplete:
            words.pop()
        return words, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return str(item.value)


def add_powershell(environment: Mapping[str, str]) -> None:
    """Make click know PowerShell, which completes from this environment."""
    PowerShell.environment = environment
    add_completion_class(PowerShell)


@click.command(
    "completion",
    cls=pages.Command,
    examples=[
        'eval "$(rlfe completion bash)"     # in ~/.bashrc',
        "rlfe completion fish > ~/.config/fish/completions/rlfe.fish",
    ],
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of a shell."""
    from rlfe.cli.main import cli

    add_powershell({})
    kind = get_completion_class(shell)
    assert kind is not None, shell
    if shell == "bash":
        output.result(_bash(kind).rstrip())
    else:
        output.result(kind(cli, {}, "rlfe", VARIABLE).source().rstrip())


def _bash(kind: type[ShellComplete]) -> str:
    """The bash script without click's call of bash to learn its version."""
    from rlfe.cli.main import cli

    made = kind(cli, {}, "rlfe", VARIABLE)
    return made.source_template % made.source_vars()
