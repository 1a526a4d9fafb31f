"""What the runs of a card say about themselves: one `Cell` per run folder.

Read from config.toml, provenance.json, metrics.jsonl and the checkpoint folders; nothing is
assumed: what a run does not say is None, and the card says that it is not known. No network: the
card of a base model on the Hub is handed in. Try: `read_cell(run, base_card=lambda name: None)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlfe import config, naming, records, remote
from rlfe.errors import RlfeError
from rlfe.hub import metadata
from rlfe.hub.cardfacts import License
from rlfe.hub.discover import LocalRun
from rlfe.hub.paths import repo_id_problem
from rlfe.naming import ArmFacts
from rlfe.schema import Recipe
from rlfe.types import CellName

CACHE_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that a run started from. `id` is its name on the Hub or None, never a path.

    `Base(id="Qwen/Qwen3-1.7B-Base", shown="Qwen/Qwen3-1.7B-Base", license=License("apache-2.0"))`
    """

    id: str | None
    shown: str
    license: License | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the card.

    `Cell(name="x_mbpp_nobuf_lr1e6", parts=CellName(...), steps=(30, 60), size_bytes=6_800_000_000,
    recipe=..., base=Base(...), planned_steps=500, last_step=450, ...)`
    """

    name: str
    parts: CellName
    steps: tuple[int, ...]
    size_bytes: int
    arm: ArmFacts
    base: Base
    recipe: Recipe | None
    config_text: str | None
    provenance: Mapping[str, Any]
    last_step: int | None
    ended: str | None = None
    rewards: tuple[float, float] | None = None  # first and last tenth of the steps, mean
    seconds: float | None = None
    has_adapter: bool = False
    left_home: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`complete`, or where it stopped and why, as far as that is known."""
        planned = self.recipe.train.steps if self.recipe else None
        last = self.last_step if self.last_step is not None else max(self.steps, default=0)
        why = f": {self.ended}" if self.ended else ""
        if planned is None:
            return f"last step {last}, planned steps unknown"
        if last >= planned:
            return "complete"
        return f"stopped at {last} of {planned}{why or ', reason not recorded'}"


def read_cell(run: LocalRun, base_card: Callable[[str], str | None]) -> Cell:
    """What one run folder says.

    Args:
        run: Its discovered content.
        base_card: README of a model on the Hub by id, or None when it is not at hand.
    """
    recipe, text = _recipe(run.folder)
    provenance = _json(run.folder / "provenance.json")
    steps = [line for line in _metrics(run.folder) if "step" in line]
    return Cell(
        name=run.name, parts=run.cell, recipe=recipe, config_text=text, provenance=provenance,
        steps=tuple(checkpoint.step for checkpoint in run.checkpoints),
        size_bytes=sum(e.size for c in run.checkpoints for e in c.entries),
        arm=naming.arm_facts(run.cell.arm), base=read_base(recipe, run, base_card),
        last_step=int(steps[-1]["step"]) if steps else None, ended=_ended(run.folder),
        rewards=_rewards(steps), seconds=_seconds(steps), left_home=run.left_home,
        has_adapter=any(e.parts[1] == "adapter" for c in run.checkpoints for e in c.entries),
    )  # fmt: skip


def _recipe(folder: Path) -> tuple[Recipe | None, str | None]:
    path = folder / "config.toml"
    if not path.is_file():
        return None, None
    return config.read_run_config(path), path.read_text(encoding="utf-8")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    try:
        return [line for line in records.read_jsonl(folder / "metrics.jsonl") if line]
    except RlfeError:  # a damaged log must not stop a push of good weights
        return []


def _ended(folder: Path) -> str | None:
    """Why the run ended early, as its record says."""
    found = _json(folder / "provenance.json").get("ended")
    return str(found) if found else None


def _rewards(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    values = [_metric(line, "reward/mean", "reward", "reward_mean") for line in steps]
    found = [value for value in values if value is not None]
    if not found:
        return None
    tenth = max(1, len(found) // 10)
    return sum(found[:tenth]) / tenth, sum(found[-tenth:]) / tenth


def _metric(line: Mapping[str, Any], *names: str) -> float | None:
    metrics = line.get("metrics", line)
    found = next((metrics[name] for name in names if metrics.get(name) is not None), None)
    return float(found) if isinstance(found, int | float) else None


def _seconds(steps: Sequence[Mapping[str, Any]]) -> float | None:
    phases = [line["seconds"] for line in steps if isinstance(line.get("seconds"), dict)]
    return sum(sum(phase.values()) for phase in phases) if phases else None


# -- the base model -----------------------------------------------------------------------------


def read_base(recipe: Recipe | None, run: LocalRun, base_card: Callable[[str], str | None]) -> Base:
    """The base model: its Hub id (from the path, or the README of a local copy) and license.

    A license stated in the run's config is taken as it is and nobody is asked.
    """
    path = recipe.model.path if recipe else ""
    stated = License(recipe.model.license) if recipe and recipe.model.license else None
    folder = local_folder(path, run.folder)
    if folder is not None or not path:
        readme = _readme(folder)
        meta = metadata.read(readme or "")
        return Base(
            id=_local_id(path, meta), shown=_local_id(path, meta) or _last_part(path),
            license=stated or license_of(meta),
        )  # fmt: skip
    if remote.is_remote(path):  # a checkpoint of a series: its repository is the base
        return Base(id=remote.parse(path).repo, shown=path, license=stated)
    if repo_id_problem(path):
        return Base(id=_local_id(path, {}), shown=_last_part(path), license=stated)
    found = stated or license_of(metadata.read(base_card(path) or ""))
    return Base(id=path, shown=path, license=found)


def local_folder(path: str, run: Path) -> Path | None:
    """The base model's folder when `path` is one, as seen from here or from the run's root."""
    if not path:
        return None
    places = [Path(path).expanduser(), run.parent / path, run.parent.parent / path]
    return next((place for place in places if place.is_dir()), None)


def _readme(folder: Path | None) -> str | None:
    path = folder / "README.md" if folder else None
    if path is None or not path.is_file():
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def _local_id(path: str, meta: Mapping[str, Any]) -> str | None:
    """Hub id of a local copy: from the Hub cache's folder name, or from the copy's own card."""
    cached = CACHE_FOLDER.search(path.replace("\\", "/"))
    if cached:
        return f"{cached[1]}/{cached[2]}"
    found = meta.get("base_model")
    name = found[0] if isinstance(found, list) and len(found) == 1 else found
    return name if isinstance(name, str) and repo_id_problem(name) is None else None


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "not recorded"


def license_of(meta: Mapping[str, Any]) -> License | None:
    """The license that a card states; None when it states none."""
    found = meta.get("license")
    if not isinstance(found, str):
        return None
    if found != "other":
        return License(found)
    return License(found, str(meta.get("license_name") or ""), str(meta.get("license_link") or ""))


# -- what differs between cells -----------------------------------------------------------------

NOT_COMPARED = ("about", "naming.", "track.", "matrix.", "study.", "run.resume", "model.license")


def differences(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Keys whose value is not the same in all configs: key -> cell -> value.

    The proof of "identical except": computed over every key of the resolved configs but names,
    trackers and recorded texts.
    """
    flats = {cell.name: config.flat(cell.recipe) for cell in cells if cell.recipe}
    keys = {key for flat in flats.values() for key in flat if not key.startswith(NOT_COMPARED)}
    found = {}
    for key in sorted(keys):
        values = {name: flat.get(key) for name, flat in flats.items()}
        if len({repr(value) for value in values.values()}) > 1:
            found[key] = values
    return found
