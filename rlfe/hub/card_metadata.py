"""The values of a card's metadata block: license, base models, data sets, tags. Hub ids only.

How the block is written and checked is `rlfe.hub.metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlfe.errors import RequestError
from rlfe.hub.cardfacts import License, common_license
from rlfe.hub.material import Material
from rlfe.hub.series import Cell

DATASETS = {
    "mbpp": "google-research-datasets/mbpp",
    "gsm8k": "openai/gsm8k",
    "deepcoder": "agentica-org/DeepCoder-Preview-Dataset",
}
TASK_TAGS = {"mbpp": "code-generation", "deepcoder": "code-generation", "gsm8k": "math"}
UNKNOWN_LICENSE = License("unknown")
FILE_SUFFIXES = (".jsonl", ".parquet", ".json", ".zst", ".gz")


def front_matter(material: Material) -> dict[str, Any]:
    """The values of the metadata block; Hub ids only."""
    found = license_of(material) or UNKNOWN_LICENSE
    meta: dict[str, Any] = {"license": found.id}
    if found.id == "other":
        meta["license_name"] = found.name or "see-base-model"
        if found.link:
            meta["license_link"] = found.link
    meta |= {"library_name": "transformers", "pipeline_tag": "text-generation", "language": ["en"]}
    bases = _base_ids(material)
    if bases:
        # two bases without the relation are read as a merge
        meta |= {"base_model": bases, "base_model_relation": "finetune"}
    datasets = sorted({name for cell in material.cells if (name := _dataset(cell))})
    if datasets:
        meta["datasets"] = datasets
    return {**meta, "tags": _tags(material.cells)}


def license_of(material: Material) -> License | None:
    """The stated license, else the one that all bases have; None: unknown or mixed."""
    return material.license or common_license([cell.base.license for cell in material.cells])


def check_license(material: Material) -> None:
    """Raises `RequestError` when the license is unknown or the bases' licenses differ."""
    if license_of(material) is not None:
        return
    bases = {cell.base.shown: cell.base.license for cell in material.cells}
    texts = [f"{name}: {found.id if found else 'unknown'}" for name, found in sorted(bases.items())]
    raise RequestError(
        f"the license is not clear ({'; '.join(texts)})",
        hint="State it with --license ID (`other` needs --license-name), "
        "or as model.license in the recipe.",
    )


def _base_ids(material: Material) -> list[str]:
    if material.base_model:
        return [material.base_model]
    return sorted({cell.base.id for cell in material.cells if cell.base.id})


def _dataset(cell: Cell) -> str | None:
    source = cell.recipe.data.source if cell.recipe else None
    if not source:
        return DATASETS.get(cell.parts.task)
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not source.endswith(FILE_SUFFIXES)
    return source if is_id else None


def _tags(cells: Sequence[Cell]) -> list[str]:
    tags = ["reinforcement-learning"]
    tags += sorted({cell.recipe.advantage.name for cell in cells if cell.recipe})
    tags += sorted({TASK_TAGS[c.parts.task] for c in cells if c.parts.task in TASK_TAGS})
    tags += sorted({cell.parts.task for cell in cells})
    tags += ["experience-replay"] if any(cell.arm.replay for cell in cells) else []
    tags += ["catastrophic-forgetting"]
    tags += ["ablation"] if len(cells) > 1 else []
    return [*dict.fromkeys(tags), "rlfe"]
