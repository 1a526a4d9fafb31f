"""The speed of a run in a few lines, from its metrics.jsonl: where the time went, what it bought.

Not here: the numbers of a step (`rlfe.training.clock`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

GB = 1e9
Lines = Sequence[Mapping[str, Any]]


def summary(lines: Lines) -> dict[str, Any]:
    """Seconds by phase over all steps, medians over the steps of the rates, peaks of memory.

    Medians, for the first step pays for what starts and compiles.
    """
    seconds: dict[str, float] = {}
    for line in lines:
        for phase, value in line.get("seconds", {}).items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    speeds = [line.get("speed", {}) for line in lines]
    names = dict.fromkeys(name for speed in speeds for name in speed)
    peaks = [line.get("memory", {}) for line in lines]
    return {
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "speed": {name: _median([speed.get(name) for speed in speeds]) for name in names},
        "padding_share": _median([line.get("update/padding_share") for line in lines]),
        "peak_bytes": {
            name: max(peak[name] for peak in peaks if name in peak)
            for name in dict.fromkeys(name for peak in peaks for name in peak)
        },
    }


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """The summary in words; what is not known is left out. Empty without a step."""
    seconds, speed = facts["seconds"], facts["speed"]
    total = sum(seconds.values())
    if total <= 0:
        return []
    shares = ", ".join(
        f"{phase} {value:.1f} s ({value / total:.0%})"
        for phase, value in sorted(seconds.items(), key=lambda item: -item[1])
        if value / total >= 0.005
    )
    known = {name: value for name, value in speed.items() if value is not None}
    rates = [f"{known[name]:,.{digits}f} {words}" for name, digits, words in RATES if name in known]
    if "mfu" in known:
        rates.append(f"MFU {known['mfu']:.1%}")
    if facts["padding_share"] is not None:
        rates.append(f"padding {facts['padding_share']:.1%}")
    peaks = [
        f"{facts['peak_bytes'][name] / GB:.1f} GB {words}"
        for name, words in PEAKS
        if name in facts["peak_bytes"]
    ]
    found = [f"time    {shares}", f"speed   {', '.join(rates)}", f"memory  {', '.join(peaks)}"]
    return [line for line, parts in zip(found, (shares, rates, peaks), strict=True) if parts]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


RATES = (
    ("rollouts", 1, "rollouts/s"),
    ("tokens", 0, "tokens/s sampled in all"),
    ("sampled", 0, "tokens/s while sampling"),
    ("trained", 0, "tokens/s in the update"),
    ("tflops", 1, "TFLOP/s in the update"),
)
PEAKS = (
    ("cuda_bytes", "allocated by torch"),
    ("cuda_reserved_bytes", "reserved by torch"),
    ("device_bytes", "on the GPU after a step"),
    ("process_bytes", "of this process on the host"),
)
