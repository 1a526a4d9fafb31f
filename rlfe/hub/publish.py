"""The last commit: card, manifest, tables and plots.

Only the last commit pins its parent: when somebody else committed (412), the README is read again,
its kept parts are merged, and the commit is tried again. Checkpoint commits pin nothing, or two
pushers of different cells would fail for ever. Try: `publish_documents(client, documents)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlfe.errors import RlfeError
from rlfe.hub.cache import Cache, hash_chunks
from rlfe.hub.client import Client
from rlfe.hub.plan import Plan, RemoteFile
from rlfe.hub.upload import Sent, send_operations, with_hashes
from rlfe.hub_calls import ConflictError

CARD = "README.md"
MANIFEST = "manifest.json"
RECEIPT = "receipt.json"
CONFLICT_TRIES = 5
MANIFEST_SCHEMA = "rlfe.manifest/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Files at the root of the repository.

    `Documents(files={"plots/pass_at_1.png": b"..."}, card=lambda old: "...", entries={})`. `card`
    gets the README that is there (None: none) and returns the new one.
    """

    files: Mapping[str, bytes]
    card: Callable[[str | None], str]
    entries: Mapping[str, list[Any]]

    def contents(self, client_text: Callable[[str], str | None]) -> dict[str, bytes]:
        """All files as bytes, merged with what is there."""
        found = dict(self.files)
        found[CARD] = self.card(client_text(CARD)).encode()
        found[MANIFEST] = manifest(self.entries, client_text(MANIFEST)).encode()
        return found


def manifest_entries(plan: Plan, caches: Mapping[str, Cache]) -> dict[str, list[Any]]:
    """`[bytes, sha256]` of every file of the plan by its path."""
    items = (with_hashes(item, caches[unit.cell]) for unit in plan.units for item in unit.items)
    return {item.remote: [item.size, item.hashes.sha256] for item in items if item.hashes}


def manifest(entries: Mapping[str, list[Any]], old: str | None) -> str:
    """The manifest's text: these entries, and the old ones of cells that are not among them."""
    ours = {path.split("/")[0] for path in entries}
    kept = {p: e for p, e in _old_entries(old).items() if p.split("/")[0] not in ours}
    files = dict(sorted({**kept, **entries}.items()))
    return json.dumps({"schema": MANIFEST_SCHEMA, "files": files}, indent=0) + "\n"


def _old_entries(text: str | None) -> dict[str, list[Any]]:
    try:
        found = json.loads(text or "{}")
        return dict(found.get("files", {})) if isinstance(found, dict) else {}
    except (ValueError, TypeError):
        return {}


def publish_documents(
    client: Client, documents: Documents | None, *, delete: Sequence[str] = ()
) -> Sent | None:
    """One commit for card, manifest, tables and plots; None when all of it is there already.

    Without documents only deletions are committed. `delete` removes files that exist only in the
    repository (`--prune`). Raises `RlfeError` when others commit all the time.
    """
    if documents is None and not delete:
        return None
    for _ in range(CONFLICT_TRIES):
        parent = client.head()
        old = partial(client.text, revision=parent)
        contents = documents.contents(old) if documents else {}
        there = _root_files(client, contents)
        fresh = {p: data for p, data in contents.items() if not _is_there(data, there.get(p))}
        if not fresh and not delete:
            return None
        title = f"Update {', '.join(sorted({p.split('/')[0] for p in fresh} | set(delete[:1])))}"
        try:
            oid = send_operations(client, fresh, title, delete=delete, parent=parent)
        except ConflictError:
            client.patience.say("somebody else committed; reading the card again")
            continue
        size = sum(len(data) for data in fresh.values())
        return Sent(
            oid=oid, title=title, files=len(fresh), bytes=size, seconds=0.0, time="",
            repo=client.repo_id, cells=(),
        )  # fmt: skip
    raise RlfeError(
        f"{client.repo_id}: others committed {CONFLICT_TRIES} times in a row",
        hint="The checkpoints are up. Run the same command again for the card.",
    )


def _root_files(client: Client, contents: Iterable[str]) -> dict[str, RemoteFile]:
    folders = {path.rpartition("/")[0] or None for path in contents}
    found: dict[str, RemoteFile] = {}
    for folder in sorted(folders, key=str):
        found |= client.files(folder, recursive=False)
    return found


def _is_there(data: bytes, remote: RemoteFile | None) -> bool:
    if remote is None or remote.size != len(data):
        return False
    hashes = hash_chunks([data], len(data))
    if remote.sha256:
        return remote.sha256 == hashes.sha256
    return remote.git_sha1 == hashes.git_sha1
