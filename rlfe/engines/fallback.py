"""What samples where vLLM cannot: a recipe's wish, and what stands in for it.

A recipe that asks for vllm was written for another machine perhaps, so training goes on with the
transformers sampler and says so once; config.toml and the origins in provenance.json then name what
really samples, and why. Who types it (`--engine vllm`, `--set engine.sampler=vllm`, RLFE_*) wants
it and is refused. Evaluation never changes the engine within a series; only what a service trained
is evaluated here, where its checkpoints lie (`evaluated`).
Try it: `settled(config.load(["deepcoder-top-p-0.9"]))`.
"""

from __future__ import annotations

from dataclasses import replace

from rlfe.config import ENVIRONMENT_PREFIX, Resolved
from rlfe.engines.vllm_settings import lacking
from rlfe.schema import Recipe

KEY, STAND_IN = "engine.sampler", "transformers"
TYPED = ("--", ENVIRONMENT_PREFIX)  # how the origin of a value begins that no recipe gave


def settled(resolved: Resolved) -> tuple[Resolved, str | None]:
    """The configuration with a sampler that is there, and what to warn of, if it was changed."""
    recipe, origin = resolved.recipe, resolved.origins[KEY]
    lacks = lacking() if recipe.engine.sampler == "vllm" else None
    if lacks is None or origin.startswith(TYPED):
        return resolved, None
    engine = recipe.engine.model_copy(update={"sampler": STAND_IN})
    origins = {**resolved.origins, KEY: f"instead of vllm ({origin}): {lacks}"}
    changed = replace(
        resolved, recipe=recipe.model_copy(update={"engine": engine}), origins=origins
    )
    return changed, (
        f'{origin}: engine.sampler = "vllm", but {lacks}; {STAND_IN} samples instead, more slowly '
        "(pip install 'rlfe[vllm]', or --engine transformers to say so)"
    )


def evaluated(recipe: Recipe) -> Recipe:
    """The recipe as its checkpoints are evaluated: a service samples its own weights only."""
    if recipe.engine.sampler != "tinker":
        return recipe
    engine = recipe.engine.model_copy(update={"sampler": STAND_IN, "learner": STAND_IN})
    return recipe.model_copy(update={"engine": engine})
