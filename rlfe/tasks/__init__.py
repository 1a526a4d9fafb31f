"""Tasks: problems, prompts and judging. `base.py` says what a task is; `BY_NAME` lists them.

Try: `get("mbpp").problems("train")`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from rlfe.errors import RequestError

if TYPE_CHECKING:
    from rlfe.schema import Data
    from rlfe.tasks.base import Task

BY_NAME = {  # name -> module and class; loaded when asked for
    "mbpp": ("rlfe.tasks.mbpp", "Mbpp"),
    "mbpp_test": ("rlfe.tasks.mbpp", "MbppTest"),
    "mbpp_plus": ("rlfe.tasks.plus", "MbppPlus"),
    "humaneval_plus": ("rlfe.tasks.plus", "HumanEvalPlus"),
    "deepcoder": ("rlfe.tasks.deepcoder", "DeepCoder"),
    "gsm8k": ("rlfe.tasks.gsm8k", "Gsm8k"),
}


def get(
    name: str,
    module: str | None = None,
    *,
    mode: str | None = None,
    cpu_seconds: float | None = None,
    fraction: bool = False,
    data: Data | None = None,
    thinking: bool | None = None,
) -> Task:
    """The task of that name.

    Args:
        name: A key of `BY_NAME`, or the name of an own task.
        module: Python file of an own task, which `name` then names.
        mode: gsm8k only: `strict` or `flexible` decides the status; None is by prompt style.
        cpu_seconds: Training tasks: CPU seconds of a program; None is the task's own.
        fraction: Training tasks: run all tests, so that `facts` give the share that holds.
        data: A recipe's `data` section; with `source` set, the problems come from there.
        thinking: deepcoder only: open the reply with `<think>`.
    """
    if module is not None:
        own = importlib.import_module("rlfe.tasks.own")
        task: Task = own.OwnTask(name, module)
        return task
    if name not in BY_NAME:
        near = difflib.get_close_matches(name, BY_NAME, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Tasks are {', '.join(BY_NAME)}."
        raise RequestError(f"unknown task {name!r}", hint=f"{hint} Own ones need task.module.")
    build = _builder(name, data)
    settings = {
        "mode": mode,
        "cpu_seconds": cpu_seconds,
        "fraction": fraction or None,
        "data": data,
        "thinking": thinking,
    }
    taken = {k: v for k, v in settings.items() if k in build.SETTINGS and v is not None}
    built: Task = build(**taken)
    return built


def _builder(name: str, data: Data | None) -> Any:
    where, kind = BY_NAME[name]
    if data is None or data.source is None or name == "deepcoder":
        return getattr(importlib.import_module(where), kind)
    sourced = importlib.import_module("rlfe.tasks.own").SOURCED
    if name not in sourced:
        raise RequestError(
            f"data.source {data.source} cannot replace the problems of {name}",
            hint=f"It can for {', '.join(sorted(sourced))} and deepcoder.",
        )
    return sourced[name]
