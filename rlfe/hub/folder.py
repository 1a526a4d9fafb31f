"""The same tree as on the Hub, in a local folder: `from_pretrained(DIR, subfolder=...)` loads it.

Each checkpoint is written beside and renamed, so a killed push leaves nothing that looks whole.
A file with the same size and time is taken for the same and not copied again.
Try: `rlfe push runs/x --to-folder out --yes`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rlfe import rundir
from rlfe.errors import RequestError
from rlfe.hub.plan import Item, Plan, State, Unit
from rlfe.hub.publish import Documents


def check_target(target: Path, runs: Iterable[Path]) -> None:
    """Raises `RequestError` when the folder is, holds or lies in a run that is pushed."""
    place = target.expanduser().resolve()
    for run in runs:
        if place in (run, run.parent) or place.is_relative_to(run):
            raise RequestError(
                f"--to-folder {target} would write over the run {run.name}",
                hint="Give another folder, for example --to-folder published.",
            )


def same_in_folder(plan: Plan, target: Path) -> Plan:
    """The plan with the states that hold for `target`: absent, other size or time, or same."""

    def unit_of(unit: Unit) -> Unit:
        return replace(unit, items=tuple(_stated(item, target) for item in unit.items))

    return replace(plan, units=tuple(unit_of(unit) for unit in plan.units), remote_known=True)


def _stated(item: Item, target: Path) -> Item:
    try:
        there = (target / item.remote).stat()
    except OSError:
        return replace(item, state=State.NEW)
    newest = max(source.mtime_ns for source in item.packed.sources)
    is_same = there.st_mtime_ns == newest and (
        not item.packed.is_exact or there.st_size == item.packed.size_bound
    )
    return replace(item, state=State.SAME if is_same else State.CHANGED)


def write_tree(
    plan: Plan, target: Path, documents: Documents | None, advance: Callable[[int, str], None]
) -> list[str]:
    """Write what is new or changed; returns the paths written, documents last."""
    written: list[str] = []
    for unit in plan.to_send:
        written += _write_unit(unit, target)
        advance(unit.bytes_to_send, unit.title)
    contents = documents.contents(lambda path: _text(target / path)) if documents else {}
    for path, data in contents.items():
        if not (target / path).is_file() or (target / path).read_bytes() != data:
            rundir.write_bytes(target / path, data)
            written.append(path)
    return written


def _write_unit(unit: Unit, target: Path) -> list[str]:
    inside = f"{unit.checkpoint.subfolder}/" if unit.checkpoint else None
    parts = [i for i in unit.items if inside and i.remote.startswith(inside)]
    if unit.checkpoint and any(item.state is not State.SAME for item in parts):
        with rundir.new_folder(target / unit.checkpoint.subfolder) as folder:
            for item in parts:
                _copy(item, folder / item.remote.removeprefix(inside or ""))
    loose = [item for item in unit.to_send if item not in parts]
    for item in loose:
        place = target / item.remote
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_name(f".{place.name}.partial")
        _copy(item, beside)
        os.replace(beside, place)
    return [item.remote for item in unit.to_send]


def _copy(item: Item, place: Path) -> None:
    """Copy or pack one file; its time becomes that of the newest source."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if item.packed.is_plain:
        shutil.copyfile(item.packed.sources[0].path, place)
    else:
        with place.open("wb") as file:
            file.writelines(item.packed.chunks())
    newest = max(source.mtime_ns for source in item.packed.sources)
    os.utime(place, ns=(newest, newest))


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
