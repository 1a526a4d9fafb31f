"""The plan of a push: per file new, changed, same or only remote, and the commits that follow.

Local state comes from `rlfe.hub.discover`, remote state is handed in (a mapping), so nothing here
needs the network. A file is hashed only when name and size are equal on both sides and its hash
is not remembered. One unit = one commit; a cell's configuration, logs and rollouts travel with its
last checkpoint, so that a cell costs no commit more than it has checkpoints.
Try: `make_plan("org/series", runs, remote=None, caches={})`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from rlfe.hub.cache import Cache, Hashes, hash_chunks
from rlfe.hub.discover import LocalCheckpoint, LocalRun
from rlfe.hub.packing import Packed
from rlfe.types import PlannedFile, PushPlan

COMMIT_WARNING = 100  # the Hub's documented limit is 128 commits an hour
FOLDER_LIMIT = 10_000  # entries of one folder, documented as hard
FILE_LIMIT_BYTES = 500e9  # one file, documented as hard
PRIVATE_QUOTA_BYTES = 100e9  # free private storage, documented; old versions count


class State(StrEnum):
    """How a file stands against the repository. `State("new")`"""

    NEW = "new"
    CHANGED = "changed"
    SAME = "same"
    REMOTE_ONLY = "remote_only"


class RemoteFile(NamedTuple):
    """A file in the repository: `RemoteFile(size=600, git_sha1="ab..", sha256="")`; large ones
    are known by sha256, regular ones by git blob sha1."""

    size: int
    git_sha1: str
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One file of a unit. `Item(remote="x/global_step_30/config.json", packed=..., state=State.NEW,
    size=600)`; `hashes` is None until somebody had to know them."""

    remote: str
    packed: Packed
    size: int
    state: State
    hashes: Hashes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one commit carries: a checkpoint, the records of a cell, or both.

    `Unit(cell="x_mbpp_nobuf_lr1e6", step=30, checkpoint=..., items=(...))`
    """

    cell: str
    items: tuple[Item, ...]
    checkpoint: LocalCheckpoint | None = None

    @property
    def to_send(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.state is not State.SAME)

    @property
    def title(self) -> str:
        what = self.checkpoint.name if self.checkpoint else "configuration, logs and rollouts"
        return f"{self.cell}: {what}"

    @property
    def bytes_to_send(self) -> int:
        return sum(item.size for item in self.to_send)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a push would do. `remote_known` is False when nobody could ask the Hub."""

    repo_id: str
    runs: tuple[LocalRun, ...]
    units: tuple[Unit, ...]
    remote_only: tuple[PlannedFile, ...] = ()
    remote_known: bool = True
    warnings: tuple[str, ...] = ()
    card: str = ""
    left_home: Mapping[str, str] = field(default_factory=dict)

    @property
    def to_send(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.to_send)

    @property
    def bytes_to_send(self) -> int:
        return sum(unit.bytes_to_send for unit in self.units)

    def commits(self, checkpoints_per_commit: int = 1) -> tuple[str, ...]:
        """Titles of the commits with files, in order, the card's not among them."""
        grouped = batches(self.to_send, checkpoints_per_commit)
        return tuple(title_of(units) for units in grouped)

    def summary(self, commits: tuple[str, ...]) -> PushPlan:
        """The plan in the form that is shown and written as JSON."""
        files = [planned(item) for unit in self.units for item in unit.items]
        return PushPlan(
            repo_id=self.repo_id, files=(*files, *self.remote_only), card=self.card,
            commits=commits, warnings=self.warnings, skipped=self.left_home,
        )  # fmt: skip


def planned(item: Item) -> PlannedFile:
    """The public form of an item."""
    sources = item.packed.sources
    more = f" + {len(sources) - 1} more" if len(sources) > 1 else ""
    return PlannedFile(
        local=f"{sources[0].path}{more}", remote=item.remote, size_bytes=item.size,
        sha256=item.hashes.sha256 if item.hashes else "", state=str(item.state),
    )  # fmt: skip


def batches(units: Sequence[Unit], size: int) -> list[tuple[Unit, ...]]:
    """Units grouped into commits of at most `size` checkpoints, in order."""
    return [tuple(units[at : at + size]) for at in range(0, len(units), size)]


def title_of(units: Sequence[Unit]) -> str:
    """Title of the commit for these units, the manifest's hash not yet in it."""
    if len(units) == 1:
        return units[0].title
    return f"{units[0].title} to {units[-1].title} ({len(units)} checkpoints)"


def make_plan(
    repo_id: str,
    runs: Sequence[LocalRun],
    *,
    remote: Mapping[str, RemoteFile] | None,
    caches: Mapping[str, Cache],
) -> Plan:
    """The plan for these runs against what lies in the repository.

    Args:
        repo_id: "org/name".
        runs: What the run folders offer, in the order given.
        remote: Files of the repository below the cells; None when the Hub could not be asked
            (then everything counts as new).
        caches: Per run name, for the hashes.
    """
    there = remote or {}
    units = [unit for run in runs for unit in _units(run, there, caches[run.name])]
    ours = {item.remote for unit in units for item in unit.items}
    unsent = {run.name: set(run.unsent) for run in runs}
    extra = [
        PlannedFile(
            local="", remote=path, size_bytes=file.size, sha256=file.sha256,
            state=str(State.REMOTE_ONLY),
        )
        for path, file in sorted(there.items())
        if path not in ours and _is_extra(path, unsent)
    ]  # fmt: skip
    return Plan(
        repo_id=repo_id, runs=tuple(runs), units=tuple(units), remote_only=tuple(extra),
        remote_known=remote is not None,
        left_home={name: why for run in runs for name, why in run.left_home.items()},
        warnings=tuple(warning for run in runs for warning in run.warnings),
    )  # fmt: skip


def _is_extra(path: str, unsent: Mapping[str, set[str]]) -> bool:
    """Whether a file of the repository lies in a pushed cell and outside what stays home here."""
    cell, _, inside = path.partition("/")
    return cell in unsent and inside.split("/")[0] not in unsent[cell]


def _units(run: LocalRun, remote: Mapping[str, RemoteFile], cache: Cache) -> list[Unit]:
    """A unit per checkpoint; the records join the last one, or go alone when that one is there."""
    records = _items(run.name, run.records, remote, cache)
    units = []
    for checkpoint in run.checkpoints:
        files = [Packed(name=entry.name, sources=(entry,)) for entry in checkpoint.entries]
        items = _items(run.name, files, remote, cache)
        units.append(Unit(cell=run.name, checkpoint=checkpoint, items=items))
    if units and units[-1].to_send:
        units[-1] = replace(units[-1], items=(*units[-1].items, *records))
    elif records:
        units.append(Unit(cell=run.name, items=records))
    return units


def _items(
    cell: str, files: Iterable[Packed], remote: Mapping[str, RemoteFile], cache: Cache
) -> tuple[Item, ...]:
    return tuple(item_of(f"{cell}/{file.name}", file, remote, cache) for file in files)


def item_of(path: str, packed: Packed, remote: Mapping[str, RemoteFile], cache: Cache) -> Item:
    """The item for one file: absent -> new, another size -> changed, else the hashes decide."""
    there = remote.get(path)
    known = remembered(packed, cache)
    size = known[0] if known else packed.size_bound
    if there is None:
        return _item(path, packed, size, State.NEW, known)
    if packed.is_exact and size != there.size:
        return _item(path, packed, size, State.CHANGED, known)
    size, hashes = known or hashed(packed, cache)
    is_same = hashes.sha256 == there.sha256 if there.sha256 else hashes.git_sha1 == there.git_sha1
    state = State.SAME if is_same and size == there.size else State.CHANGED
    return _item(path, packed, size, state, (size, hashes))


def _item(
    path: str, packed: Packed, size: int, state: State, known: tuple[int, Hashes] | None
) -> Item:
    return Item(
        remote=path, packed=packed, size=size, state=state, hashes=known[1] if known else None
    )


def remembered(packed: Packed, cache: Cache) -> tuple[int, Hashes] | None:
    """Size and hashes of a file if the cache has them; nothing is read."""
    if not packed.is_plain:
        return cache.packed(packed.name, packed.sources)
    hashes = cache.cached_hashes(packed.sources[0])
    return (packed.size_bound, hashes) if hashes else None


def hashed(packed: Packed, cache: Cache) -> tuple[int, Hashes]:
    """Size and hashes of a file, reading it if the cache does not have them."""
    known = remembered(packed, cache)
    if known is not None:
        return known
    if packed.is_plain:
        return packed.size_bound, cache.hashes(packed.sources[0])
    # git's hash starts with the size, so the size has to be known before the second pass
    size = packed.size_bound if packed.is_exact else sum(len(chunk) for chunk in packed.chunks())
    hashes = hash_chunks(packed.chunks(), size)
    cache.put_packed(packed.name, packed.sources, size, hashes)
    return size, hashes


def plan_warnings(
    plan: Plan, *, commits: int, private: bool, prune: bool = False, endpoint: str | None = None
) -> tuple[str, ...]:
    """What the user should know before saying yes."""
    found = list(plan.warnings)
    if commits > COMMIT_WARNING:
        found.append(
            f"{commits} commits; the Hub takes 128 an hour: "
            "--checkpoints-per-commit makes fewer, --wait waits"
        )
    total = plan.bytes_to_send
    if private and total > PRIVATE_QUOTA_BYTES:
        found.append(f"{total / 1e9:.0f} GB in a private repository; free accounts have 100 GB")
    found += _beyond_limits(plan)
    if plan.remote_only:
        count = len(plan.remote_only)
        fate = "--prune deletes them" if prune else "they stay (see --prune)"
        found.append(f"{count} files exist only in the repository; {fate}")
    if endpoint is not None:
        found.append(f"the endpoint is {endpoint}, not the public Hub")
    return tuple(found)


def _beyond_limits(plan: Plan) -> list[str]:
    """Files and folders that the Hub does not take, however they are sent."""
    sizes = {item.remote: item.size for unit in plan.units for item in unit.items}
    found = [
        f"{path} has {size / 1e9:.0f} GB; the Hub takes files of at most 500 GB"
        for path, size in sizes.items()
        if size > FILE_LIMIT_BYTES
    ]
    children: dict[str, set[str]] = {}
    for path in (*sizes, *(file.remote for file in plan.remote_only)):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            children.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    return found + [
        f"{folder}/ would have {len(names):,} entries; the Hub takes at most {FOLDER_LIMIT:,}"
        for folder, names in children.items()
        if len(names) > FOLDER_LIMIT
    ]
