"""The work of `benchmarks/training.py`: MBPP prompts as plain text, a reward that is free.

The reward is a hash's last bit, so that nearly every group has both values and nearly every
rollout a gradient: no trainer gets away with skipping groups without signal.
"""

from __future__ import annotations

import zlib
from typing import Any


def texts() -> list[str]:
    """The 320 MBPP training prompts in base style, without a stop string."""
    from rlfe.tasks import get

    task = get("mbpp")
    return [task.prompt(problem, "base", ()).text for problem in task.problems("train")]


def rewarded(text: str) -> bool:
    return zlib.crc32(text.encode()) % 2 == 1


def problems(split: str) -> list[dict[str, Any]]:
    return [{"id": f"bench/{n}", "prompt": text} for n, text in enumerate(texts())]


def prompt(problem: Any, style: str) -> str:
    return str(problem.prompt)


def judge(problem: Any, text: str) -> bool:
    return rewarded(text)
