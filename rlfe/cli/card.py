"""`rlfe card`: the model card of runs, computed and never typed; `--check` for continuous checks.

The text is what `rlfe push` would write. Hand-written parts between keep markers stay.
Try: `rlfe card runs/* --repo my-org/series`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import click

from rlfe import rundir
from rlfe.cli import help as pages
from rlfe.cli import output
from rlfe.cli.publication import (
    Publication,
    Stated,
    card_options,
    hub_base_card,
    no_base_card,
    open_runs,
    publication,
)
from rlfe.cli.pushing import PLACEHOLDER_REPO
from rlfe.errors import NotFoundError, PartialError, RequestError
from rlfe.hub.card_metadata import check_license
from rlfe.hub.client import Client
from rlfe.hub.paths import check_repo_id
from rlfe.hub.target import Look, look_in_folder, look_on_hub
from rlfe.hub_calls import Patience
from rlfe.remote import no_revision

ON_HUB = "@hub"
DIFF_LINES = 40


@click.command(
    "card",
    cls=pages.Command,
    examples=[
        "rlfe card runs/*_lr6e6 --repo my-org/lr-ladder",
        "rlfe card runs/* --repo my-org/lr-ladder --write published/README.md",
        "rlfe card runs/* --repo my-org/lr-ladder --check",
        "rlfe card runs/* --repo my-org/lr-ladder --check published/README.md",
    ],
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@pages.option("Where", "--repo", metavar="ORG/NAME", help="Repository that the card is for.")
@pages.option("Where", "--revision", default="main", metavar="BRANCH", help="Branch of --check.")
@pages.option(
    "What", "--check", "check", is_flag=False, flag_value=ON_HUB, metavar="[FILE]",
    help="Compare with FILE, or with the repository's README; exit 3 when it is stale.",
)  # fmt: skip
@pages.option(
    "What", "--write", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write it there, keeping hand-written parts, instead of printing.",
)  # fmt: skip
@card_options
def command(
    runs: tuple[str, ...], repo: str | None, revision: str, check: str | None,
    write: Path | None, stated: Stated,
) -> None:  # fmt: skip
    """Print, write or check the model card of runs."""
    if check and write:
        raise RequestError("--check and --write exclude each other", hint="Give one of them.")
    if check == ON_HUB and repo is None:
        raise RequestError("--check without a file needs --repo ORG/NAME")
    if repo is not None:
        check_repo_id(repo)
    found, _ = open_runs(runs, steps=None, exclude=())
    look = _look(repo, revision, check, write, {run.cell.task for run in found})
    names = {run.name for run in found}
    made = publication(
        found, repo or PLACEHOLDER_REPO, stated, base_card=hub_base_card if repo else no_base_card,
        other_cells=[name for name in look.cells if name not in names],
    )  # fmt: skip
    if check or write:
        check_license(made.material)
    if check:
        _compare(made, look, repo if check == ON_HUB else check)
    elif write:
        rundir.write_text(write, made.card_text(look.card))
        output.note(f"wrote {write}")
    else:
        output.result(made.card_text())


def _look(
    repo: str | None, revision: str, check: str | None, write: Path | None, tasks: Collection[str]
) -> Look:
    """What is there to compare with or to keep parts of."""
    if check == ON_HUB:
        assert repo is not None
        client = Client(repo, revision=revision, patience=Patience(say=output.note))
        look = look_on_hub(client, (), tasks=tasks, anonymous=True)
        if look.facts is None:
            raise NotFoundError(f"{repo} was not found", hint="Push first, or check a FILE.")
        if revision not in (names := client.revisions()):
            raise no_revision(repo, revision, names)
        return look
    path = Path(check) if check else write
    if path is None:
        return Look()
    if check and not path.is_file():
        raise NotFoundError(f"there is no card {path}", hint="Write it with --write.")
    look = look_in_folder(path.parent)
    return replace(look, card=path.read_text(encoding="utf-8") if path.is_file() else None)


def _compare(made: Publication, look: Look, place: str | None) -> None:
    old = look.card or ""
    new = made.card_text(look.card)
    if old == new:
        output.result(f"the card of {place} is up to date")
        return
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "there", "computed", lineterm="", n=0
    )
    for line in itertools.islice(lines, DIFF_LINES):
        output.note(line)
    raise PartialError(
        f"the card of {place} is stale", hint="Write it again: rlfe push (or rlfe card --write)."
    )
