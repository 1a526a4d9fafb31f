"""What is already known about a run's files: hashes, clean of secrets, complete checkpoints.

Kept in `<run>/.rlfe/hashes.json` by (path, size, mtime_ns, inode), so that planning a second push
of 60 GB reads no file. A damaged cache is started anew: it is never the truth, only a memory.
Try: `Cache(Path("runs/x")).hashes(entry).sha256`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlfe import rundir
from rlfe.errors import RlfeError
from rlfe.hub.contents import Entry

CHUNK_BYTES = 8 * 2**20
GIT_LIMIT_BYTES = 64 * 2**20  # the Hub stores larger files by sha256 whatever their name
SCHEMA = 2


class Hashes(NamedTuple):
    """`sha256` names a large file on the Hub, `git_sha1` a regular one ("" for huge files)."""

    sha256: str
    git_sha1: str


class Cache:
    """The memory of one run folder; `save()` writes it, beside and renamed."""

    def __init__(self, run: Path) -> None:
        self.path = run / ".rlfe" / "hashes.json"
        self.known: dict[str, dict[str, Any]] = _read(self.path)
        self.is_changed = False

    def hashes(self, entry: Entry, advance: Callable[[int], None] | None = None) -> Hashes:
        """Both hashes of a file, read only when the cache does not have them."""
        found = self.cached_hashes(entry)
        if found is None:
            found = hash_file(entry.path, entry.size, advance)
            self._put("files", entry.name, [*_key(entry), *found])
        return found

    def cached_hashes(self, entry: Entry) -> Hashes | None:
        """The hashes if they are known for exactly this file, else None."""
        line = self.known["files"].get(entry.name)
        return Hashes(*line[3:]) if line and line[:3] == _key(entry) else None

    def is_clean(self, entry: Entry) -> bool:
        """Whether this very file was looked through for secrets before."""
        return bool(self.known["clean"].get(entry.name) == _key(entry))

    def put_clean(self, entry: Entry) -> None:
        self._put("clean", entry.name, _key(entry))

    def is_complete(self, step_folder: str, entries: Iterable[Entry]) -> bool:
        """Whether the checkpoint was found complete with exactly these files."""
        return bool(self.known["complete"].get(step_folder) == signature(entries))

    def put_complete(self, step_folder: str, entries: Iterable[Entry]) -> None:
        self._put("complete", step_folder, signature(entries))

    def is_loadable(self, small_files: str) -> bool:
        """Whether a checkpoint with these configuration and tokenizer files loaded before."""
        return small_files in self.known["loadable"]

    def put_loadable(self, small_files: str) -> None:
        if not self.is_loadable(small_files):
            self._put("loadable", small_files, True)

    def packed(self, name: str, sources: Iterable[Entry]) -> tuple[int, Hashes] | None:
        """Size and hashes of a packed file made before from exactly these sources."""
        line = self.known["packed"].get(name)
        if line and line[0] == signature(sources):
            return line[1], Hashes(*line[2:])
        return None

    def put_packed(self, name: str, sources: Iterable[Entry], size: int, hashes: Hashes) -> None:
        self._put("packed", name, [signature(sources), size, *hashes])

    def _put(self, kind: str, name: str, value: Any) -> None:
        self.known[kind][name] = value
        self.is_changed = True

    def save(self) -> None:
        """Write the cache if anything was learnt; a run that cannot be written to has none."""
        if self.is_changed:
            text = json.dumps({"schema": SCHEMA, **self.known}, sort_keys=True)
            with suppress(OSError, RlfeError):  # only a memory: the push goes on without it
                rundir.write_text(self.path, text + "\n")
            self.is_changed = False


def hash_file(path: Path, size: int, advance: Callable[[int], None] | None = None) -> Hashes:
    """sha256 and git blob sha1 of a file in one pass; `advance(bytes)` reports progress."""
    with path.open("rb") as file:
        return hash_chunks(iter(lambda: file.read(CHUNK_BYTES), b""), size, advance)


def hash_chunks(
    chunks: Iterable[bytes], size: int, advance: Callable[[int], None] | None = None
) -> Hashes:
    """Both hashes of `size` bytes that come in chunks."""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % size) if size <= GIT_LIMIT_BYTES else None
    for chunk in chunks:
        sha256.update(chunk)
        if git is not None:
            git.update(chunk)
        if advance is not None:
            advance(len(chunk))
    return Hashes(sha256.hexdigest(), git.hexdigest() if git is not None else "")


def signature(entries: Iterable[Entry]) -> str:
    """One text for the state of many files, by their stat only."""
    lines = (json.dumps([e.name, *_key(e)]) for e in sorted(entries, key=lambda e: e.parts))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _key(entry: Entry) -> list[int]:
    return [entry.size, entry.mtime_ns, entry.inode]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    kinds = ("files", "clean", "complete", "loadable", "packed")
    empty: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return empty
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return empty
    return {kind: dict(found.get(kind) or {}) for kind in empty}
