"""Names of runs: folder name <-> fields, checkpoint names, learning-rate tags.

A run folder's name is the key of every table and the folder on the Hub, so it is made in one place
and read in one place. What does not fit is reported, never guessed. Not here: where folders lie
(`rlfe.rundir`). Try: `parse_cell("qwen3_1p7b_base_mbpp_hardcd_lam0p1_lr6e6")`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import NamedTuple

from rlfe.errors import RequestError
from rlfe.schema import Recipe
from rlfe.types import CellName

TASKS = ("mbpp", "gsm8k", "deepcoder", "humaneval")
REPLAY = {"uniform": "uniform", "hard": "hard", "hard_cooldown": "hardcd", "ce": "ce"}
FILTER = {"top_p": "topp", "top_k": "topk", "top_k_abs": "topkabs", "min_p": "minp"}
ADVANTAGE = {
    "dr_grpo": "drgrpo",
    "rloo": "rloo",
    "maxrl": "maxrl",
    "tailrl": "tailrl",
    "centered": "centered",
}
STEP = re.compile(r"global_step_([0-9]+)")
LR_TAG = re.compile(r"lr([1-9])(?:p([0-9]+))?e([0-9]+)")
PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NUMBER = re.compile(r"[0-9]+(p[0-9]+)?")


class ArmFacts(NamedTuple):
    """What an arm's name says. `ArmFacts(replay=True, lam=0.1)`; None: not known."""

    replay: bool | None
    lam: float | None


def lr_tag(value: float | str) -> str:
    """The tag of a learning rate: `lr_tag("6e-6") == lr_tag(0.000006) == "lr6e6"`.

    Twelve significant digits count, so noise in the last digits gives no second tag.

    Raises:
        RequestError: Not a number, or not between 0 and 1 (1e6 would collide with 1e-6).
    """
    mantissa, exponent = f"{_rate(value):.11e}".split("e")
    if int(exponent) >= 0:
        raise RequestError(f"learning rate {value} is not below 1", hint="Give a value like 6e-6.")
    digits = mantissa.rstrip("0").rstrip(".").replace(".", "p")
    return f"lr{digits}e{-int(exponent)}"


def _rate(value: float | str) -> float:
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except ValueError:
        rate = math.nan
    if not 0 < rate < 1:
        raise RequestError(
            f'learning rate "{value}" is not a number between 0 and 1',
            hint="Give a value like 6e-6.",
        )
    return rate


def parse_lr_tag(tag: str) -> float:
    """The reverse of `lr_tag`: `parse_lr_tag("lr6e6") == 6e-6`, the float of the literal.

    Raises:
        RequestError: Not a tag, or not the one spelling of its value (`lr60e7`, `lr1p50e6`).
    """
    match = LR_TAG.fullmatch(tag)
    if match is None:
        raise RequestError(f'"{tag}" is no learning-rate tag', hint="A tag looks like lr6e6.")
    digits, fraction, exponent = match.groups()
    rate = float(f"{digits}.{fraction or 0}e-{exponent}")
    if lr_tag(rate) != tag:
        raise RequestError(f'"{tag}" is no learning-rate tag', hint=f"It is {lr_tag(rate)}.")
    return rate


def parse_cell(name: str, tasks: Collection[str] = TASKS) -> CellName:
    """Read a run folder's name. The last task token divides model from arm.

    Raises:
        RequestError: The name does not fit `<model>_<task>_<arm>_<lr>[_s<seed>]`.
    """
    tokens = name.split("_")
    seed = None
    if re.fullmatch(r"s(0|[1-9][0-9]*)", tokens[-1]):
        seed = int(tokens.pop()[1:])
    places = [place for place, token in enumerate(tokens) if token in tasks]
    if not places:
        raise _misfit(name, f"no task token ({', '.join(tasks)})")
    model, arm = "_".join(tokens[: places[-1]]), "_".join(tokens[places[-1] + 1 : -1])
    for label, part in (("model", model), ("arm", arm)):
        if not PART.fullmatch(part):
            raise _misfit(name, f"no {label}" if not part else f'{label} "{part}"')
    try:
        lr = parse_lr_tag(tokens[-1])
    except RequestError as error:
        raise _misfit(name, error.what) from None
    return CellName(model=model, task=tokens[places[-1]], arm=arm, lr=lr, seed=seed)


def _misfit(name: str, why: str) -> RequestError:
    return RequestError(
        f'"{name}" is no run name: {why}',
        hint="It should read <model>_<task>_<arm>_<lr>[_s<seed>].",
    )


def format_cell(cell: CellName) -> str:
    """The folder name of a cell. Reading it back gives the same cell, else RequestError."""
    seed = "" if cell.seed is None else f"_s{cell.seed}"
    name = f"{cell.model}_{cell.task}_{cell.arm}_{lr_tag(cell.lr)}{seed}"
    back = parse_cell(name, {*TASKS, cell.task})
    if (back.model, back.task, back.arm, back.seed) != (cell.model, cell.task, cell.arm, cell.seed):
        raise RequestError(
            f'"{name}" would be read as model "{back.model}" and arm "{back.arm}"',
            hint="Set naming.model or naming.arm to something without a task's name.",
        )
    return name


def parse_path(text: str) -> tuple[CellName, int | None]:
    """Cell and step of a path: `parse_path("runs/tiny_mbpp_nobuf_lr1e3/global_step_30")`."""
    parts: list[str] = []
    for part in PurePosixPath(text.replace("\\", "/")).parts:
        if part == ".." and parts:
            parts.pop()
        elif part != "..":
            parts.append(part)
    step = step_of(parts[-1]) if parts else None
    if step is not None:
        parts.pop()
    return parse_cell(parts[-1] if parts else ""), step


def checkpoint_name(step: int) -> str:
    """`checkpoint_name(30) == "global_step_30"`."""
    assert step >= 0, step
    return f"global_step_{step}"


def step_of(folder_name: str) -> int | None:
    """The step of a checkpoint folder's name; None if it is not exactly global_step_<digits>."""
    match = STEP.fullmatch(folder_name)
    return int(match[1]) if match else None


def model_name(path: str) -> str:
    """Model part of a run name: `model_name("Qwen/Qwen3-1.7B-Base") == "qwen3_1p7b_base"`."""
    last = PurePosixPath(path.replace("\\", "/")).name.lower()
    name = re.sub(r"[^a-z0-9_]", "_", last.replace(".", "p")).strip("_")
    if not name or last == "..":
        raise RequestError(
            f'no model name can be read from model.path "{path}"',
            hint="Set model.path, or naming.model for the folder's name.",
        )
    return name


def task_token(task: str) -> str:
    """A task's name as it stands in a run's name: `task_token("mbpp_plus") == "mbppplus"`."""
    return re.sub(r"[^a-z0-9]", "", task.lower())


def cell_of_run(name: str, recipe: Recipe) -> CellName:
    """Read a run folder's name with its own configuration, which knows an own task's name.

    Raises:
        RequestError: The name does not fit.
    """
    return parse_cell(name, {*TASKS, task_token(recipe.task.name)})


def cell_of(recipe: Recipe) -> CellName:
    """The cell that a resolved recipe trains. The seed is named only when it is not 0."""
    fake = recipe.engine.sampler == "fake" and not recipe.model.path
    return CellName(
        model=recipe.naming.model or ("fake" if fake else model_name(recipe.model.path)),
        task=task_token(recipe.task.name),
        arm=recipe.naming.arm or arm_name(recipe),
        lr=recipe.optim.lr,
        seed=recipe.run.seed or None,
    )


def arm_name(recipe: Recipe) -> str:
    """`nobuf` or `hardcd_lam0p1`, then the settings that differ from the defaults, in order."""
    replay, chosen = recipe.replay, recipe.filter
    parts = ["nobuf"]
    if replay.strategy != "none":
        parts = [REPLAY[replay.strategy], f"lam{_number_tag(replay.weight)}"]
    if chosen.strategy != "none":
        parts.append(FILTER[chosen.strategy] + _number_tag(chosen.value))
    if recipe.advantage.name != "grpo":
        parts.append(ADVANTAGE[recipe.advantage.name])
    if recipe.lag.steps:
        parts.append(f"lag{recipe.lag.steps}")
    return "_".join(parts)


def arm_facts(arm: str) -> ArmFacts:
    """Replay and lambda of an arm's name; an arm that is not known gets neither."""
    buffer, *rest = arm.split("_")
    lam: float | None = None
    if buffer in REPLAY.values():
        tag = rest.pop(0) if rest else ""
        if not (tag.startswith("lam") and NUMBER.fullmatch(tag[3:])):
            return ArmFacts(None, None)
        lam = float(tag[3:].replace("p", "."))
    elif buffer != "nobuf":
        return ArmFacts(None, None)
    if not all(_known_setting(token) for token in rest):
        return ArmFacts(None, None)
    return ArmFacts(lam is not None, lam)


def _known_setting(token: str) -> bool:
    if token in ADVANTAGE.values():
        return True
    starts = (*sorted(FILTER.values(), key=len, reverse=True), "lag")
    start = next((word for word in starts if token.startswith(word)), None)
    return start is not None and NUMBER.fullmatch(token[len(start) :]) is not None


def _number_tag(value: float) -> str:
    """`0.1 -> "0p1"`, `1.0 -> "1"`: at most 12 decimals, the point as p."""
    return f"{value:.12f}".rstrip("0").rstrip(".").replace(".", "p")
