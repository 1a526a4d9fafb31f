"""The card's last sections: where everything comes from, and what is not known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rlfe import __version__
from rlfe.hub.card_text import code, one_line, without_folders
from rlfe.hub.material import Material
from rlfe.hub.series import Cell


def no_holdout(cells: Sequence[Cell]) -> list[str]:
    tasks = ", ".join(sorted({cell.parts.task for cell in cells}))
    return [f"Not computed for {tasks}: no packaged train/test pair is known for it."]


def provenance_lines(material: Material) -> list[str]:
    lines = [f"Card written by rlfe {__version__} from the run folders themselves."]
    for tell in (_versions_line, _data_line, _command_line):
        told: dict[str, list[str]] = {}
        for cell in material.cells:
            told.setdefault(tell(cell), []).append(cell.name)
        for text, names in told.items():
            where = "" if len(told) == 1 else f" ({', '.join(f'`{name}`' for name in names)})"
            lines.append(text + where)
    configs = [
        f"`{cell.name}` {hashlib.sha256(cell.config_text.encode()).hexdigest()[:12]}"
        for cell in material.cells
        if cell.config_text
    ]
    if configs:
        lines.append(f"config.toml (sha256): {', '.join(configs)}.")
    for cell in material.cells:
        ids = {
            name: oid for name, oid in material.commits.items() if name.startswith(cell.name + "/")
        }
        if ids:
            told_ids = ", ".join(
                f"{name.rpartition('_')[2]}: {oid[:8]}" for name, oid in ids.items()
            )
            lines.append(f"Hub commits of `{cell.name}` by step: {told_ids}.")
    return lines


def _versions_line(cell: Cell) -> str:
    facts = cell.provenance
    if not facts:
        return "Versions: not recorded (provenance.json is missing)"
    commit = facts.get("git_commit")
    told = f"commit {str(commit)[:12]}" if commit else "commit not recorded"
    told += ", with uncommitted changes" if str(commit).endswith("+") else ""
    packages = facts.get("packages") or {}
    versions = ", ".join(f"{name} {packages[name]}" for name in sorted(packages))
    return one_line(
        f"Versions: rlfe {facts.get('rlfe')} ({told}), Python {facts.get('python')}, {versions}"
    )


def _data_line(cell: Cell) -> str:
    hashes = cell.provenance.get("data") or {}
    told = ", ".join(f"{name} {str(value)[:12]}" for name, value in sorted(hashes.items()))
    return f"Data: {one_line(told) or 'hashes not recorded'}"


def _command_line(cell: Cell) -> str:
    command = cell.provenance.get("command") or []
    text = without_folders(" ".join(map(str, command)))
    return f"Command: `{one_line(text)}`" if text else "Command: not recorded"


def gap_lines(material: Material) -> list[str]:
    found = []
    for cell in material.cells:
        planned = cell.status
        if planned != "complete":
            found.append(f"`{cell.name}`: {one_line(planned)}.")
        if not cell.steps:
            found.append(f"`{cell.name}`: no checkpoint is here.")
        found += [
            f"`{n}` is not here: {one_line(why)}." for n, why in sorted(cell.left_home.items())
        ]
        if cell.base.id is None and not material.base_model:
            found.append(
                f"`{cell.name}`: the base model {code(cell.base.shown)} has no known Hub id."
            )
        if not any(point.cell == cell.name for point in material.results.scores):
            found.append(f"`{cell.name}`: not evaluated.")
    found += [
        f"`{name}` is in this repository and not described here." for name in material.other_cells
    ]
    return found or ["none known."]
