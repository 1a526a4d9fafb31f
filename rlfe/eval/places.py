"""Where the files of a checkpoint are while it is scored: a folder here, or fetched and dropped.

A checkpoint on the Hub (`rlfe.remote`) is downloaded one at a time into rlfe's own cache when its
weights are needed, and its weights are removed after its last task unless they are to be kept.
The commit is pinned, so the weights' hash is remembered and a finished evaluation downloads
nothing again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlfe import remote
from rlfe.eval.jobs import Target
from rlfe.hub_calls import Patience
from rlfe.naming import step_of
from rlfe.rundir import RunDir, write_bytes, write_text
from rlfe.types import CheckpointRef

HASH_FILE = ".weights_hash"
NOTE_FILE = ".weights.json"  # dot files are never pushed
WEIGHTS = "*.safetensors"


Stamp = list[list[str | int]]


def stamp(folder: Path) -> Stamp:
    """What tells that weight files are the same on two machines, without reading them."""
    return [row[:3] for row in _stamp(folder)]


def _stamp(folder: Path) -> Stamp:
    """What tells that weight files are the same as before, without reading them."""
    files = [(file.name, file.stat()) for file in sorted(folder.glob(WEIGHTS))]
    return [[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in files]


class Places:
    """Checkpoints in folders of this machine: nothing to fetch, nothing to drop.

    Args:
        weights: Hash of a model folder's weights.
    """

    def __init__(self, weights: Callable[[Path], str]) -> None:
        self._weights = weights
        self._known: dict[Path, str] = {}

    def weights(self, target: Target) -> str:
        """Hash of the target's weights; remembered beside its results while the files stay."""
        if target.path not in self._known:
            stamp = _stamp(target.path)
            note = target.evals / NOTE_FILE
            known: dict[str, Any] = json.loads(note.read_bytes()) if note.is_file() else {}
            entry = known.get(str(target.step))
            if not stamp or entry is None or entry["stamp"] != stamp:
                entry = {"stamp": stamp, "hash": self._weights(target.path)}
                write_text(note, json.dumps({**known, str(target.step): entry}, sort_keys=True))
            self._known[target.path] = entry["hash"]
        return self._known[target.path]

    def noted(self, target: Target) -> str | None:
        """The hash as it is remembered, without reading weights; None: it is not."""
        if target.path in self._known:
            return self._known[target.path]
        note = target.evals / NOTE_FILE
        known: dict[str, Any] = json.loads(note.read_bytes()) if note.is_file() else {}
        entry = known.get(str(target.step), {"stamp": None})
        return entry["hash"] if entry["stamp"] == _stamp(target.path) else None

    def note(self, target: Target, weights: str) -> None:
        """Remember a hash that another process computed of what is here."""
        if self._known.get(target.path) != weights:
            note = target.evals / NOTE_FILE
            known: dict[str, Any] = json.loads(note.read_bytes()) if note.is_file() else {}
            entry = {"stamp": _stamp(target.path), "hash": weights}
            write_text(note, json.dumps({**known, str(target.step): entry}, sort_keys=True))
            self._known[target.path] = weights

    def ready(self, target: Target) -> None:
        """Before a model is loaded: the folder is complete."""

    def done(self, target: Target) -> None:
        """After the target's last job."""


@dataclass(slots=True)
class RemoteCheckpoint:
    """A checkpoint on the Hub with its place below rlfe's cache, config.toml beside it if any."""

    reference: CheckpointRef
    folder: Path
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.folder / self.reference.subfolder

    @property
    def step(self) -> int:
        return step_of(self.path.name) or 0


class HubPlaces(Places):
    """Places of which some lie on the Hub.

    Args:
        weights: Hash of a model folder's weights.
        keep: Leave downloaded weights in the cache.
        patience: How long calls are tried.
    """

    def __init__(self, weights: Callable[[Path], str], *, keep: bool, patience: Patience) -> None:
        super().__init__(weights)
        self._keep, self._patience = keep, patience
        self._remote: dict[Path, RemoteCheckpoint] = {}

    def find(self, glob: str, cache: Path) -> tuple[list[RemoteCheckpoint], dict[str, str]]:
        """Checkpoints of a `hf://` glob with their configs fetched, and what was passed over."""
        found = remote.find(glob, self._patience)
        made = []
        for reference in found.found:
            one = RemoteCheckpoint(reference, remote.cache_folder(cache, reference))
            names = [f"{reference.cell}/config.toml", f"{reference.subfolder}/config.json"]
            remote.fetch_files(reference, names, one.folder, self._patience)
            made.append(self.adopt(reference, one.folder))
        return made, {f"{remote.PREFIX}{name}": why for name, why in found.skipped.items()}

    def adopt(self, reference: CheckpointRef, folder: Path) -> RemoteCheckpoint:
        """Count a checkpoint on the Hub as one of these, with its place below `folder`."""
        one = RemoteCheckpoint(reference, folder)
        self._remote[one.path] = one
        return one

    def reference(self, target: Target) -> CheckpointRef | None:
        """Where on the Hub a target is; None: it is a folder here."""
        one = self._remote.get(target.path)
        return None if one is None else one.reference

    def fetch(self, target: Target, names: Iterable[str]) -> None:
        """Files of a checkpoint on the Hub, without its weights; nothing for a folder here."""
        one = self._remote.get(target.path)
        if one is not None:
            paths = [f"{one.reference.subfolder}/{name}" for name in names]
            remote.fetch_files(one.reference, paths, one.folder, self._patience)

    def noted(self, target: Target) -> str | None:
        if target.path not in self._remote:
            return super().noted(target)
        kept = target.path / HASH_FILE
        return kept.read_text(encoding="utf-8") if kept.is_file() else None

    def note(self, target: Target, weights: str) -> None:
        if target.path in self._remote:
            write_text(target.path / HASH_FILE, weights)
        else:
            super().note(target, weights)

    def weights(self, target: Target) -> str:
        kept = target.path / HASH_FILE
        if target.path in self._remote and kept.is_file():
            return kept.read_text(encoding="utf-8")
        self.ready(target)
        found = super().weights(target)
        if target.path in self._remote:
            write_text(kept, found)
        return found

    def ready(self, target: Target) -> None:
        one = self._remote.get(target.path)
        if one is not None and not any(target.path.glob(WEIGHTS)):
            remote.fetch(one.reference, one.folder, self._patience)

    def done(self, target: Target) -> None:
        if target.path in self._remote and not self._keep:
            for file in target.path.glob(WEIGHTS):
                file.unlink(missing_ok=True)


def remote_target(one: RemoteCheckpoint, runs_dir: Path) -> Target:
    """Where the results of a checkpoint on the Hub go: the run folder of that name here.

    The run's config.toml is copied there, so that `rlfe report` knows the run.
    """
    run = RunDir(runs_dir / one.reference.cell)
    config = one.path.parent / "config.toml"
    if config.is_file() and not run.config.exists():
        write_bytes(run.config, config.read_bytes())
    return Target(path=one.path, cell=run.name, step=one.step, evals=run.evals("x").parent)
