"""What `rlfe train --dry-run` says about GPU memory: what a run needs, what is there, ways out.

The GPU that nvidia-smi lists first is asked for its size; without one only the need is stated. A
model that is on the Hub and not in the local cache is unknown; no network is used. Not here: the
formulas (`rlfe.engines.memory`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlfe.cli.checks import gpu_names
from rlfe.engines.memory import estimate, ways_out
from rlfe.engines.source import local_folder, read_json
from rlfe.errors import RlfeError
from rlfe.schema import Recipe

GB = 1e9
MEBIBYTE = 2**20


def memory_facts(recipe: Recipe, ranks: int = 1) -> dict[str, Any]:
    """Facts of the plan under `memory`; empty where no GPU of this machine would learn."""
    if recipe.engine.learner != "transformers" or recipe.engine.device in ("cpu", "mps"):
        return {}
    config = _config(recipe)
    found = estimate(recipe, config, ranks=ranks) if config else None
    if config is None or found is None:
        return {"memory": None}
    name, size = first_gpu()
    facts: dict[str, Any] = {
        "parts": dict(found.parts),
        "total_bytes": found.total,
        "sampler_share": found.sampler_share,
        "gpu": name,
        "gpu_bytes": size,
    }
    if size is not None:
        facts |= {"fits": found.fits(size), "ways_out": ways_out(recipe, config, size, ranks=ranks)}
    return {"memory": facts}


def _config(recipe: Recipe) -> dict[str, Any] | None:
    """The model's config.json, if it is on this machine."""
    try:
        folder = local_folder(recipe.model.path)
    except RlfeError:
        return None
    if folder is None:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            file = try_to_load_from_cache(
                recipe.model.path, "config.json", revision=recipe.model.revision
            )
        except HFValidationError:  # hf://...: a checkpoint in a repository
            return None
        folder = Path(file).parent if isinstance(file, str) else None
    return None if folder is None else read_json(folder / "config.json")


def first_gpu() -> tuple[str | None, int | None]:
    """Name and bytes of the first GPU; (None, None) without one."""
    for line in gpu_names():
        name, _, memory = line.rpartition(",")
        number = memory.strip().removesuffix("MiB").strip()
        if name and number.isdigit():
            return name.strip(), int(number) * MEBIBYTE
    return None, None


def memory_line(facts: dict[str, Any]) -> str | None:
    """`memory       48.1 GB on one GPU: weights 6.9, ...`; None where nothing is to be said."""
    if "memory" not in facts:
        return None
    memory = facts["memory"]
    if memory is None:
        return "memory       unknown: no config.json here with sizes that are known"
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in memory["parts"].items())
    text = f"memory       {memory['total_bytes'] / GB:.1f} GB on one GPU: {parts}"
    share = memory["sampler_share"]
    if share:
        text += f"; and {share:g} of the GPU for the sampler"
    if memory["gpu_bytes"] is not None:
        text += f"; {memory['gpu']} has {memory['gpu_bytes'] / GB:.1f} GB"
    return text


def memory_warning(facts: dict[str, Any]) -> str | None:
    """What to change where the run does not fit."""
    memory = facts.get("memory")
    if not memory or memory.get("fits", True):
        return None
    needed = memory["total_bytes"] + memory["sampler_share"] * memory["gpu_bytes"]
    return (
        f"the run needs about {needed / GB:.0f} GB of GPU memory and {memory['gpu']} has "
        f"{memory['gpu_bytes'] / GB:.0f} GB; change one or more: {'; '.join(memory['ways_out'])}"
    )
