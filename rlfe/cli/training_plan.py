"""What `rlfe train --dry-run` says: settings, steps, tokens, checkpoints and disk, engine and why.

Loads no model and no torch, writes nothing. Sizes are read from safetensors headers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlfe.checkpoints import kept_steps
from rlfe.cli.memory_plan import memory_facts, memory_line, memory_warning
from rlfe.config import Resolved
from rlfe.recipe_checks import notes
from rlfe.rundir import RunDir
from rlfe.schema import Recipe
from rlfe.weights import read_header

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STATE_BYTES = 12  # per trained weight: float32 and two moments
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`settings` are (key, value, origin); `command` is the real one."""

    settings: list[tuple[str, Any, str]]
    lines: list[str]
    warnings: list[str]
    facts: dict[str, Any]
    command: str

    def document(self) -> dict[str, Any]:
        rows = [{"key": k, "value": v, "origin": o} for k, v, o in self.settings]
        run = {**self.facts, "warnings": self.warnings, "command": self.command}
        return {"schema": "rlfe.train_plan/1", "rows": rows, "run": run}


def plan(
    resolved: Resolved,
    run: RunDir,
    command: str,
    unchecked: Sequence[str] = (),
    ranks: int = 1,
) -> Plan:
    """The plan of a run, from the recipe and the files that are there.

    `unchecked`: what could not be checked here, in words; it comes first among the warnings.
    `ranks`: processes that train together.
    """
    recipe = resolved.recipe
    facts = {
        "name": run.name,
        "path": str(run.path),
        **_work(recipe),
        **_storage(recipe, run),
        **_engine(resolved),
        **_ranks(recipe, ranks),
        **memory_facts(recipe, ranks),
        "notes": list(notes(recipe, ranks)),
    }
    values = [(key, value, resolved.origins[key]) for key, value in resolved.values().items()]
    return Plan(
        settings=values,
        lines=_lines(facts),
        warnings=[*unchecked, *_warnings(facts)],
        facts=facts,
        command=command,
    )


def _work(recipe: Recipe) -> dict[str, Any]:
    train = recipe.train
    rollouts = train.prompts_per_step * train.group_size
    size = min(train.mini_batch_rollouts or rollouts, rollouts)
    return {
        "steps": train.steps,
        "rollouts_per_step": rollouts,
        "tokens_per_step_at_most": rollouts * train.max_tokens,
        "optimiser_steps_per_step_at_most": math.ceil(rollouts / size) * train.epochs,
    }


def _storage(recipe: Recipe, run: RunDir) -> dict[str, Any]:
    kept = kept_steps(recipe.train.steps, recipe.save.every)
    count = min(len(kept), recipe.save.keep or len(kept))
    weights = _weight_count(Path(recipe.model.path).expanduser())
    size = None if weights is None else weights * BYTES[recipe.model.dtype]
    trained = weights if recipe.lora.rank == 0 else 0
    state = None if weights is None or trained is None else 2 * STATE_BYTES * trained
    place = next(folder for folder in (run.path, *run.path.absolute().parents) if folder.exists())
    return {
        "checkpoints": kept,
        "checkpoints_at_a_time": count,
        "bytes_per_checkpoint": size,
        "bytes_needed": None if size is None or state is None else count * size + state,
        "bytes_free": shutil.disk_usage(place).free,
    }


def _weight_count(folder: Path) -> int | None:
    """Numbers in a local model's weight files; None for a model that is not here."""
    files = sorted(folder.glob("*.safetensors")) if str(folder) != "." else []
    total = 0
    for file in files:
        try:
            header, _ = read_header(file)
        except (OSError, ValueError):
            return None
        total += sum(math.prod(tensor["shape"]) for tensor in header.values())
    return total or None


def _engine(resolved: Resolved) -> dict[str, Any]:
    engine, origins = resolved.recipe.engine, resolved.origins
    return {
        "sampler": engine.sampler,
        "learner": engine.learner,
        "device": engine.device,
        "engine_why": f"engine.sampler from {origins['engine.sampler']}, "
        f"engine.device from {origins['engine.device']}",
    }


def _ranks(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """How groups and rows are divided: slot by slot, and by tokens within an optimiser step."""
    count = recipe.train.prompts_per_step
    groups = [len(range(rank, count, ranks)) for rank in range(ranks)]
    return {"ranks": ranks, "groups_per_rank": groups}


def _divided(facts: dict[str, Any]) -> list[str]:
    if facts["ranks"] == 1:
        return []
    groups = facts["groups_per_rank"]
    most, least = max(groups), min(groups)
    each = str(most) if most == least else f"{least} or {most}"
    rollouts = facts["rollouts_per_step"] // sum(groups)
    return [
        f"ranks        {facts['ranks']}: each samples and judges {each} groups of {rollouts} a "
        "step, trains its share of the",
        "             rows (equal in tokens) and holds its share of weights and moments",
    ]


def _lines(facts: dict[str, Any]) -> list[str]:
    kept = facts["checkpoints"]
    shown = ", ".join(
        str(step) for step in (kept if len(kept) <= 8 else [*kept[:4], "...", kept[-1]])
    )
    size = facts["bytes_per_checkpoint"]
    each = "size unknown before the model is here" if size is None else f"{_gigabytes(size)} each"
    needed = facts["bytes_needed"]
    total = "" if needed is None else f"{_gigabytes(needed)} with the state; "
    memory = memory_line(facts)
    return [
        "",
        f"run          {facts['path']}",
        f"steps        {facts['steps']}",
        f"tokens       at most {facts['tokens_per_step_at_most']} a step "
        f"({facts['rollouts_per_step']} rollouts)",
        f"checkpoints  {len(kept)}: {shown} ({each})",
        f"disk         {total}{_gigabytes(facts['bytes_free'])} free",
        *([memory] if memory else []),
        f"engine       {facts['sampler']} samples, {facts['learner']} learns, device "
        f"{facts['device']} ({facts['engine_why']})",
        *_divided(facts),
    ]


def _warnings(facts: dict[str, Any]) -> list[str]:
    found = []
    if facts["bytes_needed"] is not None and facts["bytes_needed"] > facts["bytes_free"]:
        found.append("the disk is too small for this run; set save.keep or save.every")
    memory = memory_warning(facts)
    if memory is not None:
        found.append(memory)
    return found


def _gigabytes(size: int) -> str:
    return f"{size / GIGABYTE:.2f} GB" if size >= GIGABYTE / 100 else f"{size / 1e6:.2f} MB"
