"""The upload: one commit per checkpoint, oldest first, killed and repeated without harm.

Each checkpoint is one `upload_folder` (several with `--checkpoints-per-commit`, or with the
records of a cell, are one `create_commit`). What has landed is read from the repository's tree and
never from the journal, which is for people. Not here: the card's commit (`rlfe.hub.publish`).
Try: `Uploader(client, caches).send(plan)`.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlfe import records
from rlfe.errors import RlfeError
from rlfe.hub.cache import Cache
from rlfe.hub.client import Client
from rlfe.hub.plan import Item, Plan, RemoteFile, Unit, batches, hashed, title_of

JOURNAL = "push.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A commit that landed, as the journal has it.

    `Sent(oid="9f..", title="x: global_step_30 (sha256:12ab34cd)", files=5, bytes=3_400_000_000,
    seconds=61.5, time="2026-01-31T12:00:00Z", repo="org/series", cells=("x",))`
    """

    oid: str
    title: str
    files: int
    bytes: int
    seconds: float
    time: str
    repo: str
    cells: tuple[str, ...]


class Uploader:
    """Sends the units of a plan.

    Args:
        client: The repository.
        caches: Hash memory per run name; saved after every commit.
        advance: Gets the bytes of every commit that landed, with its title.
    """

    def __init__(
        self,
        client: Client,
        caches: Mapping[str, Cache],
        advance: Callable[[int, str], None] = lambda size, title: None,
    ) -> None:
        self.client, self.caches, self.advance = client, caches, advance

    def send(self, plan: Plan, *, checkpoints_per_commit: int = 1) -> list[Sent]:
        """Send everything that is new or changed; returns the commits in order."""
        folders = {run.name: run.folder for run in plan.runs}
        done = []
        for units in batches(plan.to_send, checkpoints_per_commit):
            sent = self._send_batch([self._hashed(unit) for unit in units])
            done.append(sent)
            for cell in sent.cells:
                self.caches[cell].save()
                self._write_down(folders[cell], sent)
            self.advance(sent.bytes, sent.title)
        return done

    def _write_down(self, run: Path, sent: Sent) -> None:
        """The journal is for people: a run on a full or read-only disk is pushed without one."""
        try:
            journal(run, sent)
        except (OSError, RlfeError) as error:
            self.client.patience.say(f"{run.name}: no journal is kept: {error}")

    def _hashed(self, unit: Unit) -> Unit:
        """The unit with every hash known: for the title, and to see whether a commit landed."""
        items = tuple(with_hashes(item, self.caches[unit.cell]) for item in unit.items)
        self.caches[unit.cell].save()
        return replace(unit, items=items)

    def _send_batch(self, units: Sequence[Unit]) -> Sent:
        items = [item for unit in units for item in unit.to_send]
        title = f"{title_of(units)} (sha256:{manifest_hash(units)[:8]})"
        folder = _one_folder(units)
        started = time.monotonic()
        if folder is not None:
            oid = self._send_folder(units[0], folder, items, title)
        else:
            oid = self._send_operations(items, title)
        return Sent(
            oid=oid, title=title, files=len(items), bytes=sum(item.size for item in items),
            seconds=round(time.monotonic() - started, 3), repo=self.client.repo_id,
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            cells=tuple(dict.fromkeys(unit.cell for unit in units)),
        )  # fmt: skip

    def _send_folder(self, unit: Unit, folder: Path, items: Sequence[Item], title: str) -> str:
        assert unit.checkpoint is not None
        inside = unit.checkpoint.subfolder
        # exact names: a pattern of the client would cross folders
        names = [glob.escape(item.remote.removeprefix(f"{inside}/")) for item in items]

        def send() -> str:
            return _oid(self.client.api.upload_folder(
                repo_id=self.client.repo_id, folder_path=folder, path_in_repo=inside,
                allow_patterns=list(names), commit_message=title, revision=self.client.revision,
            ))  # fmt: skip

        return self.client.call(send, landed=lambda: self._landed(items))

    def _send_operations(self, items: Sequence[Item], title: str) -> str:
        with _files_on_disk(items) as paths:
            return send_operations(
                self.client, {item.remote: paths[item.remote] for item in items}, title,
                landed=lambda: self._landed(items),
            )  # fmt: skip

    def _landed(self, items: Sequence[Item]) -> str | None:
        """Commit id when every file is there as it should be: a failed commit landed after all."""
        cells = {item.remote.split("/")[0] for item in items}
        there = {path: file for cell in cells for path, file in self.client.files(cell).items()}
        return self.client.head() if not differing(items, there) else None


def send_operations(
    client: Client,
    content: Mapping[str, Path | bytes],
    title: str,
    *,
    delete: Sequence[str] = (),
    parent: str | None = None,
    landed: Callable[[], str | None] = lambda: None,
) -> str:
    """One commit of files (by path or bytes) and deletions; the commit's id.

    Large files go up first, so that a commit that fails is repeated without sending them again.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    def operations() -> list[Any]:
        adds: list[Any] = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=data)
            for path, data in content.items()
        ]
        return adds + [CommitOperationDelete(path_in_repo=path) for path in delete]

    def send() -> str:
        made = operations()
        adds = [operation for operation in made if isinstance(operation, CommitOperationAdd)]
        client.api.preupload_lfs_files(client.repo_id, adds, revision=client.revision)
        return _oid(client.api.create_commit(
            client.repo_id, made, commit_message=title, revision=client.revision,
            parent_commit=parent,
        ))  # fmt: skip

    return client.call(send, landed=landed)


def with_hashes(item: Item, cache: Cache) -> Item:
    """The item with size and hashes known."""
    size, hashes = hashed(item.packed, cache)
    return replace(item, size=size, hashes=hashes)


def differing(items: Sequence[Item], there: Mapping[str, RemoteFile]) -> list[str]:
    """Paths whose file in the repository is absent or not the local one (hashes known)."""
    return [item.remote for item in items if not _is_same(item, there.get(item.remote))]


def _is_same(item: Item, remote: RemoteFile | None) -> bool:
    assert item.hashes is not None, item.remote
    if remote is None or remote.size != item.size:
        return False
    if remote.sha256:
        return remote.sha256 == item.hashes.sha256
    return remote.git_sha1 == item.hashes.git_sha1


def manifest_hash(units: Sequence[Unit]) -> str:
    """sha256 over "<sha256>  <path>" lines of all files of the units, sent now or before."""
    lines = [
        f"{item.hashes.sha256}  {item.remote}\n"
        for unit in units
        for item in unit.items
        if item.hashes is not None
    ]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def journal(run: Path, sent: Sent) -> None:
    """Append a landed commit to the run's journal, on the disk before going on."""
    path = run / ".rlfe" / JOURNAL
    records.append_jsonl(path, asdict(sent))
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _one_folder(units: Sequence[Unit]) -> Path | None:
    """The checkpoint's folder when nothing else goes up in this commit."""
    first = units[0]
    if len(units) > 1 or first.checkpoint is None:
        return None
    inside = f"{first.checkpoint.subfolder}/"
    only_checkpoint = all(item.remote.startswith(inside) for item in first.to_send)
    return first.checkpoint.folder if only_checkpoint else None


@contextmanager
def _files_on_disk(items: Sequence[Item]) -> Iterator[dict[str, Path]]:
    """A path per item; packed ones are written to a temporary folder."""
    with TemporaryDirectory(prefix="rlfe-push-") as folder:
        paths = {}
        for number, item in enumerate(items):
            paths[item.remote] = item.packed.sources[0].path
            if not item.packed.is_plain:
                paths[item.remote] = Path(folder) / str(number)
                _write_packed(item, paths[item.remote])
        yield paths


def _write_packed(item: Item, path: Path) -> None:
    try:
        with path.open("wb") as file:
            file.writelines(item.packed.chunks())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RlfeError(
            f"disk full: {error.strerror} while packing {item.remote} in {path.parent.parent}",
            hint="Free some space there (or set TMPDIR) and run the same command again.",
        ) from error


def _oid(commit: Any) -> str:
    return str(commit.oid)
