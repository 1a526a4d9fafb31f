"""Tasks: problems, prompts and judging. `base.py` says what a task is; `BY_NAME` lists them.

Try: `get("mbpp").problems("train")`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from rlfe.errors import RequestError

if TYPE_CHECKING:
    from rlfe.tasks.base import Task

BY_NAME = {  # name -> module and class; loaded when asked for
    "mbpp": ("rlfe.tasks.mbpp", "Mbpp"),
    "mbpp_test": ("rlfe.tasks.mbpp", "MbppTest"),
    "mbpp_plus": ("rlfe.tasks.plus", "MbppPlus"),
    "humaneval_plus": ("rlfe.tasks.plus", "HumanEvalPlus"),
    "gsm8k": ("rlfe.tasks.gsm8k", "Gsm8k"),
}


def get(
    name: str,
    module: str | None = None,
    *,
    mode: str | None = None,
    cpu_seconds: float | None = None,
    fraction: bool = False,
) -> Task:
    """The task of that name.

    Args:
        name: A key of `BY_NAME`.
        module: Python file of an own task, which `name` then names.
        mode: gsm8k only: `strict` or `flexible` decides the status; None is by prompt style.
        cpu_seconds: Training tasks: CPU seconds of a program; None is the task's own.
        fraction: Training tasks: run all tests, so that `facts` give the share that holds.
    """
    if name not in BY_NAME:
        near = difflib.get_close_matches(name, BY_NAME, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Tasks are {', '.join(BY_NAME)}."
        raise RequestError(f"unknown task {name!r}", hint=hint)
    where, kind = BY_NAME[name]
    settings = {"mode": mode, "cpu_seconds": cpu_seconds, "fraction": fraction or None}
    build = getattr(importlib.import_module(where), kind)
    taken = {key: value for key, value in settings.items() if key in build.SETTINGS and value}
    task: Task = build(**taken)
    return task
