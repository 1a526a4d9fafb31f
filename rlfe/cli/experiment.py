"""The experiment document of recipes: what varies, then one chapter a recipe, then what is shared.

Written from the resolved settings alone, so it cannot disagree with what runs.
Try: `rlfe recipes doc lr-ladder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfe import config, sweeps
from rlfe.naming import cell_of, format_cell
from rlfe.schema import Recipe
from rlfe.toml import value

PRIVATE = ("about", "study.", "track.", "matrix.", "naming.")  # told elsewhere or not a setting


def document(recipes: Sequence[str], environment: Mapping[str, str]) -> str:
    """The Markdown text for one or several recipes."""
    loaded = {name: config.load([name], environment=environment).recipe for name in recipes}
    flats = {name: config.flat(recipe) for name, recipe in loaded.items()}
    defaults = config.flat(Recipe())
    told = [key for key in _keys(flats) if not key.startswith(PRIVATE)]
    differing = [key for key in told if len({repr(flat.get(key)) for flat in flats.values()}) > 1]
    shared = [key for key in told if key not in differing]
    parts = [_overview(loaded, flats, differing)]
    parts += [_chapter(name, recipe, flats[name], differing) for name, recipe in loaded.items()]
    flat = next(iter(flats.values()))
    lines = [_setting(key, flat[key]) for key in shared if flat[key] != defaults.get(key)]
    parts.append("## Common settings\n\n" + "\n".join(lines) + "\n\nAll other keys: defaults.")
    return "\n\n".join(parts)


def _keys(flats: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for flat in flats.values() for key in flat))


def _setting(key: str, item: Any) -> str:
    return f"- `{key} = {'none' if item is None else value(item)}`"


def assumption(text: str, flat: Mapping[str, Any]) -> str:
    """ "key: why" with the value that the key has."""
    key, _, why = text.partition(": ")
    return _setting(key, flat.get(key)) + (f": {why}" if why else "")


def _overview(
    loaded: Mapping[str, Recipe], flats: Mapping[str, Mapping[str, Any]], differing: Sequence[str]
) -> str:
    rows = ["# Experiment", "", "| recipe | purpose | variables |", "| --- | --- | --- |"]
    for name, recipe in loaded.items():
        variables = [
            f"{key} = {value(flats[name][key])}" for key in differing if key in flats[name]
        ]
        variables += [f"{key} x {len(entries)}" for key, entries in recipe.matrix.items()]
        rows.append(f"| {name} | {recipe.about} | {', '.join(variables) or 'none'} |")
    return "\n".join(rows)


def _chapter(name: str, recipe: Recipe, flat: Mapping[str, Any], differing: Sequence[str]) -> str:
    lines = [f"## {recipe.study.title or name}", "", "Goal:", ""]
    lines += [f"- {recipe.study.hypothesis or recipe.about}"]
    if recipe.study.criterion:
        lines += [f"- Criterion: {recipe.study.criterion}"]
    lines += ["", "Key details:", ""]
    lines += [_setting(key, flat[key]) for key in differing if key in flat]
    lines += [
        f"- {recipe.train.steps} steps of {recipe.train.prompts_per_step} prompts x "
        f"{recipe.train.group_size} rollouts, a checkpoint every {recipe.save.every} steps"
    ]
    if recipe.study.assumptions:
        lines += ["", "Assumptions (the study leaves these open):", ""]
        lines += [assumption(text, flat) for text in recipe.study.assumptions]
    lines += ["", "Source:", "", f"- recipe `{name}` (`rlfe recipes show {name}`)"]
    lines += ["", "Outputs:", ""]
    lines += [f"- `runs/{cell}`" for cell in _cells(name, recipe)]
    if recipe.track.name:
        lines += [f"- tracker: project `{recipe.track.project}`, run `{recipe.track.name}`"]
    return "\n".join(lines)


def _cells(name: str, recipe: Recipe) -> list[str]:
    if recipe.matrix:
        return [cell.name for cell in sweeps.cells([name])]
    return [format_cell(cell_of(recipe))]
