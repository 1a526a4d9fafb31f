"""The card's layout and training sections, told from the resolved configs.

Lines that are the same for all cells are told once; a line that differs names its cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfe.budget import overruns, used_gpus
from rlfe.config import flat
from rlfe.hub.card_text import code, one_line, value_text, without_folders
from rlfe.hub.cardfacts import DEFAULT_LR, lr_side, rate_text, steps_text
from rlfe.hub.series import Cell, differences
from rlfe.schema import Study

MINUTES_BELOW_SECONDS = 2 * 3600


def layout_row(cell: Cell) -> dict[str, Any]:
    return {
        "folder": cell.name, "base": code(cell.base.shown), "arm": arm_text(cell),
        "lr": rate_text(cell.parts.lr), "run": cell.parts.seed or 0,
        "steps": steps_text(cell.steps), "gib": f"{cell.size_bytes / 2**30:.2f}",
        "state": one_line(cell.status),
    }  # fmt: skip


def arm_text(cell: Cell) -> str:
    if cell.arm.replay is None:
        return one_line(cell.parts.arm)
    head = "no buffer"
    if cell.arm.replay:
        strategy = cell.recipe.replay.strategy if cell.recipe else cell.parts.arm.split("_")[0]
        head = f"replay `{strategy}` (lambda={cell.arm.lam:g})"
    rest = cell.parts.arm.split("_")[2 if cell.arm.replay else 1 :]
    return ", ".join([head, *rest])


def rate_sentences(cells: Sequence[Cell]) -> list[str]:
    rates = sorted({cell.parts.lr for cell in cells}, reverse=True)
    sides: dict[str, list[str]] = {}
    for rate in rates:
        sides.setdefault(lr_side(rate), []).append(rate_text(rate))
    words = {"above": "above", "at": "equal to", "below": "below"}
    told = [
        f"{' and '.join(sides[side])} {'is' if len(sides[side]) == 1 else 'are'} {words[side]}"
        for side in words
        if side in sides
    ]
    return [f"Learning rates: {'; '.join(told)} the default of {rate_text(DEFAULT_LR)}."]


def training_lines(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for key, tell in (
        ("task", _task_line), ("algorithm", _algorithm_line), ("replay", _replay_line),
        ("optimiser", _optimiser_line), ("hardware", _hardware_line), ("time", _time_line),
        ("assumptions", _assumptions_line),
    ):  # fmt: skip
        told: dict[str, list[str]] = {}
        for cell in cells:
            if text := tell(cell):
                told.setdefault(text, []).append(cell.name)
        for text, names in told.items():
            where = "" if len(told) == 1 else f" ({', '.join(f'`{name}`' for name in names)})"
            lines.append(f"{key.capitalize()}: {text}{where}")
    return lines + _budget_lines(cells)


def _budget_lines(cells: Sequence[Cell]) -> list[str]:
    """What the cells of a study took together beyond its budget."""
    studies: dict[tuple[Study, int], list[float]] = {}
    for cell in cells:
        if cell.recipe is not None and cell.seconds:
            key = (cell.recipe.study, used_gpus(cell.recipe.engine))
            studies.setdefault(key, []).append(cell.seconds)
    return [
        f"Budget: {one_line(text)}"
        for (study, gpus), seconds in studies.items()
        for text in overruns(study, seconds, gpus)
    ]


def _task_line(cell: Cell) -> str:
    if cell.recipe is None:
        return f"{cell.parts.task}; config.toml is missing, settings are not known"
    train, size = cell.recipe.train, cell.recipe.data.size
    problems = f"the first {size} problems" if size else "all training problems"
    return (
        f"{cell.parts.task}, {problems}; {train.prompts_per_step} prompts a step, "
        f"{train.group_size} rollouts per prompt, at most {train.max_tokens} tokens, "
        f"temperature {train.temperature:g}; {cell.recipe.reward.kind} reward"
    )


def _algorithm_line(cell: Cell) -> str:
    if cell.recipe is None:
        return "not known"
    advantage, loss, filter_ = cell.recipe.advantage, cell.recipe.loss, cell.recipe.filter
    deviation = (
        f", standard deviation with ddof {advantage.ddof}" if advantage.name == "grpo" else ""
    )
    kept = (
        "no filter"
        if filter_.strategy == "none"
        else f"filter {filter_.strategy} {filter_.value:g}"
    )
    return (
        f"{advantage.name} advantages{deviation}; clipped importance sampling "
        f"[{1 - loss.clip_low:g}, {1 + loss.clip_high:g}], {loss.aggregation}; {kept}; "
        f"KL weight {cell.recipe.kl.beta:g}; sampler {cell.recipe.lag.steps} steps behind"
    )


def _replay_line(cell: Cell) -> str:
    if cell.recipe is None or cell.recipe.replay.strategy == "none":
        return "none" if cell.recipe else "not known"
    replay = cell.recipe.replay
    return (
        f"{replay.rollouts} past rollouts a step by `{replay.strategy}`, weight "
        f"lambda={replay.weight:g}, own denominator"
    )


def _optimiser_line(cell: Cell) -> str:
    if cell.recipe is None:
        return f"lr {rate_text(cell.parts.lr)}, the rest is not known"
    optim, lora = cell.recipe.optim, cell.recipe.lora
    what = f"LoRA rank {lora.rank}" if lora.rank else "all weights"
    return (
        f"AdamW, lr {rate_text(optim.lr)} {optim.schedule}, betas {optim.beta1:g}/{optim.beta2:g}, "
        f"weight decay {optim.weight_decay:g}, gradient clip {optim.grad_clip:g}; {what}, "
        f"float32 master weights, checkpoints in {cell.recipe.model.dtype}"
    )


def _hardware_line(cell: Cell) -> str:
    found = cell.provenance.get("hardware") or cell.provenance.get("platform")
    if isinstance(found, dict):
        return one_line(_machine(found))
    return one_line(str(found)) if found else "not recorded"


def _machine(facts: Mapping[str, Any]) -> str:
    """`2 x NVIDIA H200, CUDA 12.8; AMD EPYC 9654 (32 cores)`."""
    gpus = [str(name) for name in facts.get("gpus") or ()]
    told = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    if facts.get("cuda"):
        told.append(f"CUDA {facts['cuda']}")
    return f"{', '.join(told)}; {facts.get('cpu')} ({facts.get('cpu_cores')} cores)"


def _time_line(cell: Cell) -> str:
    if not cell.seconds:
        return "not recorded"
    if cell.seconds < MINUTES_BELOW_SECONDS:
        return f"{cell.seconds / 60:.1f} minutes of steps"
    return f"{cell.seconds / 3600:.1f} h of steps"


def _assumptions_line(cell: Cell) -> str:
    """What the study leaves open, with the value taken; nothing without assumptions."""
    if cell.recipe is None or not cell.recipe.study.assumptions:
        return ""
    values = flat(cell.recipe)
    told = []
    for text in cell.recipe.study.assumptions:
        key, _, why = text.partition(": ")
        value = value_text(values[key]) if key in values else "?"
        told.append(f"`{key}` = {value}" + (f" ({one_line(why)})" if why else ""))
    return f"left open by the study and chosen here: {'; '.join(told)}"


def difference_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    with_config = [cell.name for cell in cells]
    return [
        {"key": key, "values": [value_text(values.get(name)) for name in with_config]}
        for key, values in differences(cells).items()
    ]


def folded_configs(cells: Sequence[Cell]) -> list[dict[str, str]]:
    return [
        {"cell": cell.name, "text": without_folders(cell.config_text).rstrip()}
        for cell in cells
        if cell.config_text
    ]


def adapter_subfolder(cell: Cell | None) -> str:
    return f"{cell.name}/global_step_{cell.steps[-1]}/adapter" if cell else ""
