"""`rlfe pull`: checkpoints or runs of a repository as local folders, one path a line.

For engines that know no subfolder (vLLM): `vllm serve "$(rlfe pull org/series/x/global_step_30)"`.
Not here: resolving references (`rlfe.remote`).
"""

from __future__ import annotations

from pathlib import Path

import click

from rlfe import remote
from rlfe.cli import help as pages
from rlfe.cli import output
from rlfe.errors import PartialError, RequestError
from rlfe.hub_calls import Patience
from rlfe.types import CheckpointRef


@click.command(
    "pull",
    cls=pages.Command,
    examples=[
        "rlfe pull my-org/series/x_mbpp_nobuf_lr6e6/global_step_500",
        "rlfe pull 'my-org/series/*/global_step_500' --local-dir models",
        "rlfe pull my-org/series/x_mbpp_nobuf_lr6e6 --revision v1 --run",
    ],
)
@click.argument("references", nargs=-1, required=True, metavar="ORG/NAME[/PATH][@REVISION]...")
@pages.option("What", "--revision", metavar="REV", help="Branch, tag or commit for all of them.")
@pages.option(
    "What", "--run", "with_records", is_flag=True,
    help="Also the cells' configuration, logs, rollouts and evaluations.",
)  # fmt: skip
@pages.option(
    "Where", "--local-dir", type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write to; default: rlfe's cache. Short on Windows.",
)  # fmt: skip
@pages.json_option
@click.pass_context
def command(
    ctx: click.Context, references: tuple[str, ...], revision: str | None, with_records: bool,
    local_dir: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Fetch checkpoints from a repository and print their local paths."""
    _quiet()
    patience = Patience(say=output.note)
    cache = cache_root(pages.environment(ctx))
    paths: list[dict[str, str | Path]] = []
    skipped: dict[str, str] = {}
    for text in references:
        found = remote.find(with_revision(text, revision), patience)
        skipped |= found.skipped
        for reference in found.found:
            folder = local_dir or remote.cache_folder(cache, reference)
            output.note(f"{reference.root}/{reference.subfolder} -> {folder}")
            path = remote.fetch(reference, folder, patience=patience)
            paths.append({"subfolder": reference.subfolder, "path": path.resolve()})
        if with_records:
            _fetch_records(found.found, local_dir, cache, patience)
    for name, why in skipped.items():
        output.warn(f"{name} is not complete: {why}")
    if as_json:
        output.document({"schema": "rlfe.pull/1", "rows": paths, "run": {"skipped": skipped}})
    else:
        output.result("\n".join(str(row["path"]) for row in paths))
    return PartialError.exit_code if skipped else 0


def _fetch_records(
    found: tuple[CheckpointRef, ...], local_dir: Path | None, cache: Path, patience: Patience
) -> None:
    """What lies beside the checkpoints of these cells."""
    for reference in {ref.cell: ref for ref in found}.values():
        folder = local_dir or remote.cache_folder(cache, reference)
        remote.fetch_records(reference, folder, patience)


def with_revision(text: str, revision: str | None) -> str:
    """The reference with the revision of the option. Raises `RequestError` if it has another."""
    if revision is None:
        return text
    if "@" in text:
        raise RequestError(f"{text!r} names a revision already", hint="Leave out --revision.")
    return f"{text}@{revision}"


def cache_root(environment: object) -> Path:
    """rlfe's own cache: `$XDG_CACHE_HOME/rlfe`, by default `~/.cache/rlfe`."""
    home = environment.get("XDG_CACHE_HOME") if isinstance(environment, dict) else None
    return Path(home) / "rlfe" if home else Path.home() / ".cache" / "rlfe"


def _quiet() -> None:
    from rlfe.cli.push_view import quiet_client

    quiet_client()
