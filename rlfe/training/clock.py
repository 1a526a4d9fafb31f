"""Wall seconds by phase and the peak of memory: what a step costs, kept apart from its results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    """Peak bytes of this process and, where torch runs on CUDA, of the device."""
    found: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["process_bytes"] = peak if sys.platform == "darwin" else peak * KIBIBYTE
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["cuda_bytes"] = torch.cuda.max_memory_allocated()
    return found
