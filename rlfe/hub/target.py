"""What lies in the target of a push before anything is sent: one look, on the Hub or in a folder.

Try: `look_in_folder(Path("published"))`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlfe import naming
from rlfe.errors import RequestError
from rlfe.hub.client import Client, RepoFacts
from rlfe.hub.discover import run_cell
from rlfe.hub.plan import RemoteFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a target.

    `facts` is None for a folder and for a repository that is not there yet; `files` are those at
    the root and below the pushed cells, None when nobody could be asked; `cells` are all run
    folders there; `card` is its README.
    """

    facts: RepoFacts | None = None
    files: Mapping[str, RemoteFile] | None = field(default_factory=dict)
    cells: tuple[str, ...] = ()
    card: str | None = None


UNKNOWN = Look(files=None)


def look_on_hub(
    client: Client,
    cells: Iterable[str],
    *,
    tasks: Collection[str] = (),
    anonymous: bool = False,
) -> Look:
    """Account (unless `anonymous`), repository, one tree listing per cell, and the card.

    `tasks`: names of own tasks, whose runs are cells too.
    """
    if not anonymous:
        client.account()
    facts = client.facts()
    if facts is None:
        return Look()
    if client.revision != "main" and client.revision not in client.revisions():
        return Look(facts=facts)  # the branch is made at the upload
    root = client.entries()
    files = {path: file for path, file in root.items() if file is not None}
    folders = [path for path, file in root.items() if file is None]
    for cell in cells:
        files |= client.files(cell) if cell in folders else {}
    card = client.text("README.md") if "README.md" in files else None
    return Look(facts=facts, files=files, cells=_cells(folders, tasks), card=card)


def look_in_folder(folder: Path) -> Look:
    """The same for a local folder; its files are compared by `rlfe.hub.folder`."""
    if not folder.is_dir():
        return Look()
    card = folder / "README.md"
    return Look(
        cells=tuple(sorted(path.name for path in folder.iterdir() if _is_run(path))),
        card=card.read_text(encoding="utf-8") if card.is_file() else None,
    )


def _cells(names: Iterable[str], tasks: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if _is_cell(name, tasks)))


def _is_cell(name: str, tasks: Collection[str]) -> bool:
    try:
        naming.parse_cell(name, {*naming.TASKS, *tasks})
    except RequestError:
        return False
    return True


def _is_run(folder: Path) -> bool:
    """A run folder by its name; one of an own task by its config, too."""
    if not folder.is_dir():
        return False
    try:
        run_cell(folder)
    except RequestError:
        return False
    return True
