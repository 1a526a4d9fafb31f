"""What runs took against what their study allowed: shown, never enforced.

Counted are the seconds of training steps in metrics.jsonl, of steps that were repeated after a
resume only once; GPUs are those that one process uses. Not here: evaluation.
Try: `overruns(Study(budget_gpu_hours=2), [7300.0])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlfe.schema import Engine, Study


def step_seconds(lines: Iterable[Mapping[str, Any]]) -> float:
    """Seconds of all steps of a metrics.jsonl."""
    return sum(
        sum(line["seconds"].values()) for line in lines if isinstance(line.get("seconds"), dict)
    )


def used_gpus(engine: Engine) -> int:
    """GPUs that one training process computes on."""
    return engine.tensor_parallel if engine.sampler == "vllm" else 1


def overruns(study: Study, seconds: Sequence[float], gpus: int = 1) -> list[str]:
    """A sentence for each limit of the study that its runs broke; `seconds` of each run."""
    found = []
    hours, longest = sum(seconds) * gpus / 3600, max(seconds, default=0.0) / 60
    if 0 < study.budget_gpu_hours < hours:
        found.append(
            f"steps took {hours:.2f} GPU hours, more than study.budget_gpu_hours = "
            f"{study.budget_gpu_hours:g}"
        )
    if 0 < study.max_wall_minutes < longest:
        found.append(
            f"the steps of a run took {longest:.1f} minutes, more than study.max_wall_minutes = "
            f"{study.max_wall_minutes:g}"
        )
    return found
