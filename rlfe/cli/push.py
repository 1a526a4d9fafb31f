"""`rlfe push`: publish runs. A dry run unless `--yes` is given (docs/hub.md).

Here are the options and their checks; what happens then is `rlfe.cli.pushing`.
Try: `rlfe push runs/x --repo my-org/series`.
"""

from __future__ import annotations

from pathlib import Path

import click

from rlfe.cli import help as pages
from rlfe.cli.publication import Stated, card_options
from rlfe.cli.pushing import Push, Request
from rlfe.errors import RequestError
from rlfe.hub.contents import RECORD_FOLDERS
from rlfe.hub.paths import check_repo_id


@click.command(
    "push",
    cls=pages.Command,
    examples=[
        "rlfe push runs/x_mbpp_nobuf_lr6e6 --repo my-org/lr-ladder",
        "rlfe push runs/*_lr6e6 --repo my-org/lr-ladder --yes",
        "rlfe push runs/* --to-folder published --yes",
        "rlfe push runs/* --repo my-org/lr-ladder --steps '30:500:30,last' --exclude rollouts",
    ],
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@pages.option("Where", "--repo", metavar="ORG/NAME", help="Repository on the Hub.")
@pages.option(
    "Where", "--to-folder", type=click.Path(path_type=Path), metavar="DIR",
    help="Write the same tree into a local folder instead.",
)  # fmt: skip
@pages.option(
    "Where", "--private/--public", default=None,
    help="Visibility of a new repository (private unless said); an existing one keeps its own.",
)  # fmt: skip
@pages.option("Where", "--revision", default="main", metavar="BRANCH", help="Branch to push to.")
@pages.option("Where", "--tag", metavar="NAME", help="Set a tag when all is verified.")
@pages.option(
    "What", "--steps", metavar="STEPS", help="Checkpoints to send, such as '30:500:30,last'."
)
@pages.option(
    "What", "--exclude", metavar="NAMES",
    help="Leave out rollouts, logs or evals (comma separated).",
)  # fmt: skip
@pages.option("What", "--card/--no-card", "with_card", default=True, help="Write the model card.")
@pages.option("What", "--card-only", is_flag=True, help="Send the card and tables only.")
@pages.option("What", "--prune", is_flag=True, help="Delete files that exist only there.")
@card_options
@pages.option(
    "How", "--checkpoints-per-commit", "per_commit", type=click.IntRange(min=1), default=1,
    help="Checkpoints in one commit (the Hub takes 128 commits an hour).",
)  # fmt: skip
@pages.option(
    "How", "--verify/--no-verify", default=True, help="Compare ids and load configs afterwards."
)
@pages.option("How", "--wait", is_flag=True, help="Wait for the hourly commit limit.")
@pages.option("How", "--dry-run", is_flag=True, help="Plan and card only (the default); wins.")
@pages.option("How", "--yes", is_flag=True, help="Really send.")
@pages.json_option
def command(
    runs: tuple[str, ...], repo: str | None, to_folder: Path | None, private: bool | None,
    revision: str, tag: str | None, steps: str | None, exclude: str | None, with_card: bool,
    card_only: bool,
    prune: bool, stated: Stated, per_commit: int, verify: bool, wait: bool, dry_run: bool,
    yes: bool, as_json: bool,
) -> int:  # fmt: skip
    """Publish runs: prints the plan and the card, and with --yes sends them."""
    request = Request(
        runs=runs, repo=repo, to_folder=to_folder, private=private, revision=revision, steps=steps,
        exclude=_excluded(exclude or ""), per_commit=per_commit, with_card=with_card,
        card_only=card_only, tag=tag, prune=prune, verify=verify, wait=wait,
        yes=yes and not dry_run, as_json=as_json, stated=stated,
    )  # fmt: skip
    _check(request)
    return Push(request).run()


def _excluded(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in RECORD_FOLDERS:
            raise RequestError(
                f"--exclude {name!r} is not one of {', '.join(RECORD_FOLDERS)}",
                hint="Other files are never sent; --steps picks checkpoints.",
            )
    return names


def _check(request: Request) -> None:
    if (request.repo is None) == (request.to_folder is None):
        raise RequestError(
            "give either --repo ORG/NAME or --to-folder DIR",
            hint="Example: rlfe push runs/x --repo my-org/series",
        )
    if request.repo is not None:
        check_repo_id(request.repo)
    if request.card_only and not request.with_card:
        raise RequestError("--card-only and --no-card leave nothing to send")
    if request.to_folder is not None and (request.prune or request.tag):
        raise RequestError("--prune and --tag work with --repo only")
    request.stated.license_or_none()
