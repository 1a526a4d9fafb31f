"""What lies in a run folder and may go up: stages 1 and 2 of a push, without the network.

Runs by name, checkpoints in numeric order, each complete or left home whole and named; files by
the allow-list; text looked through for secrets. Reads headers and text the first time and only
`stat`s afterwards. Try: `discover(Path("runs/x_mbpp_nobuf_lr1e6"), Cache(...))`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlfe import naming
from rlfe.config import read_run_config
from rlfe.errors import RequestError
from rlfe.hub.cache import Cache
from rlfe.hub.completeness import problems
from rlfe.hub.contents import RECORD_FOLDERS, Entry, Kind, kind_of, leaves, walk
from rlfe.hub.packing import Packed, pack
from rlfe.hub.secrets import first_secret, is_scanned
from rlfe.types import CellName


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoint:
    """A complete checkpoint of a run. `name` is its folder's: "global_step_30"."""

    cell: str
    step: int
    name: str
    folder: Path
    entries: tuple[Entry, ...]

    @property
    def subfolder(self) -> str:
        return f"{self.cell}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """What a run folder offers to a push; `left_home` maps `<cell>/<folder>` to its reason."""

    name: str
    folder: Path
    cell: CellName
    checkpoints: tuple[LocalCheckpoint, ...]
    records: tuple[Packed, ...]
    left_home: Mapping[str, str]
    unsent: tuple[str, ...] = ()  # folders that exist here and were not asked for
    warnings: tuple[str, ...] = ()


def discover(
    folder: Path, cache: Cache, *, steps: str | None = None, exclude: Collection[str] = ()
) -> LocalRun:
    """Everything of one run that a push would send.

    Args:
        folder: The run folder, links resolved.
        cache: Its memory; what is learnt is put there (the caller saves it).
        steps: Which checkpoints, such as "30:500:30,last"; None: all.
        exclude: Record folders that stay home: logs, rollouts, evals.

    Raises:
        RequestError: The folder's name is no cell, `steps` cannot be read, or a text file holds
            something that looks like a token.
    """
    cell = run_cell(folder)
    by_step: dict[str, list[Entry]] = {}
    records: list[Entry] = []
    for entry in walk(folder):
        kind = kind_of(entry.parts)
        if kind is Kind.CHECKPOINT:
            by_step.setdefault(entry.parts[0], []).append(entry)
        elif kind is not None and entry.parts[0] not in exclude:
            records.append(entry)
    checkpoints, left_home = _checkpoints(folder, by_step, cache, steps)
    outside = [entry.name for entry in records if leaves(entry, folder)]
    records = [entry for entry in records if entry.name not in outside]
    files = [entry for checkpoint in checkpoints for entry in checkpoint.entries]
    _refuse_secrets(folder.name, [*files, *records], cache)
    stays = f"{folder.name}/%s links out of the run and stays home"
    sent = {checkpoint.name for checkpoint in checkpoints}
    return LocalRun(
        name=folder.name, folder=folder, cell=cell, checkpoints=tuple(checkpoints),
        records=tuple(pack(records)), left_home=left_home,
        unsent=tuple(sorted((set(step_folders(folder)) - sent) | set(exclude))),
        warnings=tuple(stays % name for name in outside),
    )  # fmt: skip


def run_cell(folder: Path) -> CellName:
    """The cell that the folder's name says; an own task is known by the run's config."""
    try:
        return naming.parse_cell(folder.name)
    except RequestError:
        config = folder / "config.toml"
        if not config.is_file():
            raise
        own_task = naming.cell_of(read_run_config(config)).task
        return naming.parse_cell(folder.name, {*naming.TASKS, own_task})


def step_folders(folder: Path) -> dict[str, int]:
    """Checkpoint folders of a run by name, with their steps."""
    there = [path.name for path in folder.iterdir() if path.is_dir()]
    return {name: step for name in there if (step := naming.step_of(name)) is not None}


def _checkpoints(
    folder: Path, by_step: Mapping[str, list[Entry]], cache: Cache, steps: str | None
) -> tuple[list[LocalCheckpoint], dict[str, str]]:
    names = step_folders(folder)
    wanted = set(select_steps(steps, names.values())) if steps else set(names.values())
    found: list[LocalCheckpoint] = []
    left_home: dict[str, str] = {}
    for name, step in sorted(names.items(), key=lambda item: (item[1], len(item[0]))):
        subfolder = f"{folder.name}/{name}"
        entries = tuple(by_step.get(name, ()))
        if step not in wanted:
            continue
        if found and found[-1].step == step:
            left_home[subfolder] = f"{found[-1].name} is the same step"
        elif lacks := _problems(folder / name, entries, cache):
            left_home[subfolder] = "; ".join(lacks)
        else:
            found.append(LocalCheckpoint(
                cell=folder.name, step=step, name=name, folder=folder / name, entries=entries
            ))  # fmt: skip
    return found, left_home


def _problems(folder: Path, entries: tuple[Entry, ...], cache: Cache) -> list[str]:
    """`problems`, remembered by the state of all files of the folder, unsent ones too."""
    if folder.is_symlink():
        return ["the folder is a link: move the checkpoint itself into the run"]
    everything = tuple(walk(folder, everything=True))
    if cache.is_complete(folder.name, everything):
        return []
    lacks = problems(folder, entries)
    if not lacks:
        cache.put_complete(folder.name, everything)
    return lacks


def _refuse_secrets(run: str, entries: Iterable[Entry], cache: Cache) -> None:
    for entry in entries:
        if not is_scanned(entry.name) or cache.is_clean(entry):
            continue
        secret = first_secret(entry.path)
        if secret is not None:
            raise RequestError(
                f"{run}/{entry.name}:{secret.line} holds what looks like a {secret.shape}",
                hint=_secret_hint(entry),
            )
        cache.put_clean(entry)


def _secret_hint(entry: Entry) -> str:
    away = "Revoke it if it is real, remove it from the file, and push again"
    if entry.parts[0] in RECORD_FOLDERS:
        return f"{away} (or leave the folder out with --exclude {entry.parts[0]})."
    return f"{away}."


def select_steps(text: str, steps: Iterable[int]) -> list[int]:
    """The steps that `text` asks for, ascending: "30:500:30,last" takes a range and the endpoint.

    `select_steps("30:90:30,last", [30, 45, 60, 100]) == [30, 60, 100]`. Items are separated by
    commas: a step, FIRST:LAST, FIRST:LAST:STRIDE (LAST included), or `last`. Steps that are not
    there are no mistake. Raises `RequestError` on anything else.
    """
    there = sorted(set(steps))
    chosen: set[int] = set()
    for item in text.split(","):
        if item.strip() == "last":
            chosen.update(there[-1:])
        else:
            chosen.update(_steps_of_item(item.strip(), text))
    return [step for step in there if step in chosen]


def _steps_of_item(item: str, text: str) -> range:
    numbers = item.split(":")
    if len(numbers) > 3 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise RequestError(
            f"--steps {text!r}: {item!r} is not a step, a range or `last`",
            hint="Write for example --steps '30:500:30,last'.",
        )
    first = int(numbers[0])
    last = int(numbers[1]) if len(numbers) > 1 else first
    stride = int(numbers[2]) if len(numbers) > 2 else 1
    return range(first, last + 1, max(stride, 1))
