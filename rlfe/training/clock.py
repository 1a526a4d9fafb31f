"""Seconds by phase, peak memory, speed: what a step costs, kept apart from its results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

KIBIBYTE = 1024


class Clock:
    """`with clock.phase("sample"): ...`; phases of one name add up."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, rounded to milliseconds; `other` is what no phase claims."""
        other = time.perf_counter() - self._start - sum(self._seconds.values())
        phases = self._seconds | {"other": max(0.0, other)}
        return {name: round(value, 3) for name, value in phases.items()}


def peak_memory() -> dict[str, int]:
    """Peak bytes of this process and, where torch runs on CUDA, of the device since the last call.

    `cuda_bytes` and `cuda_reserved_bytes` are torch's own; `device_bytes` is what all processes
    hold on the device now (a sampler's process too).
    """
    found: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["process_bytes"] = peak if sys.platform == "darwin" else peak * KIBIBYTE
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["cuda_bytes"] = torch.cuda.max_memory_allocated()
        found["cuda_reserved_bytes"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        found["device_bytes"] = total - free
        torch.cuda.reset_peak_memory_stats()
    return found


def speeds(
    metrics: Mapping[str, Any], seconds: Mapping[str, float], *, rollouts: int, peak: float | None
) -> dict[str, float | None]:
    """Rates of a step; None where the work was not counted or the time is 0.

    `rollouts` and `tokens` per second of the whole step; `sampled` tokens per second of sampling;
    `trained` tokens (padding left out, replay and prompts included), `tflops` and `mfu` (share of
    `peak` FLOP/s) of the update.
    """
    whole, update = sum(seconds.values()), seconds.get("train", 0.0)
    flops, computed = metrics.get("update/flops"), metrics.get("update/tokens")
    padding = metrics.get("update/padding_share") or 0.0
    trained = None if computed is None else computed * (1 - padding)
    rate = _per(flops, update)
    return {
        "rollouts": _per(rollouts, whole),
        "tokens": _per(metrics.get("tokens/sampled"), whole),
        "sampled": _per(metrics.get("tokens/sampled"), seconds.get("sample", 0.0)),
        "trained": _per(trained, update),
        "tflops": None if rate is None else rate / 1e12,
        "mfu": None if rate is None or peak is None else rate / peak,
    }


def _per(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds
