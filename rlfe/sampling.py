"""Which sampling values reach an engine: all set here, none taken from generation_config.json.

Of the checkpoint's generation config only its end tokens are read (docs/algorithms.md 6).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlfe.errors import RequestError

NEUTRAL: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,  # off
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def effective(*, n: int, max_tokens: int, **values: float | int) -> dict[str, float | int]:
    """Every sampling value: what was asked for, else the neutral one.

    Raises:
        RequestError: n < 1, max_tokens < 1, temperature < 0, top_p outside (0, 1], min_p outside
            [0, 1], top_k below 1 and not -1, an unknown name, or several greedy samples (copies).
    """
    unknown = sorted(set(values) - set(NEUTRAL))
    if unknown:
        raise RequestError(f'unknown sampling value "{unknown[0]}"', hint=_known())
    merged = {**NEUTRAL, **values, "max_tokens": max_tokens, "n": n}
    _check("n", n, n >= 1, "at least 1")
    _check("max_tokens", max_tokens, max_tokens >= 1, "at least 1")
    _check("temperature", merged["temperature"], merged["temperature"] >= 0, "at least 0")
    _check("top_p", merged["top_p"], 0 < merged["top_p"] <= 1, "in (0, 1]")
    _check("min_p", merged["min_p"], 0 <= merged["min_p"] <= 1, "in [0, 1]")
    _check("top_k", merged["top_k"], merged["top_k"] >= 1 or merged["top_k"] == -1, "-1 or above 0")
    if merged["temperature"] == 0 and n > 1:
        raise RequestError(
            f"{n} samples at temperature 0 would be {n} copies of one",
            hint="set n to 1, or a temperature above 0",
        )
    return merged


def stop_token_ids(
    *,
    tokenizer_eos_id: int | None,
    config: Mapping[str, Any] | None,
    generation_config: Mapping[str, Any] | None,
) -> tuple[int, ...]:
    """Union of the end tokens of tokenizer, config.json and generation_config.json, sorted.

    A base and a chat checkpoint disagree about them; the union makes both stop.
    """
    found = {tokenizer_eos_id} if tokenizer_eos_id is not None else set()
    for source in (config, generation_config):
        value = (source or {}).get("eos_token_id")
        found |= {value} if isinstance(value, int) else set(value or ())
    return tuple(sorted(found))


def shared_streams(*, seed_a: int, seed_b: int, n: int) -> int:
    """Streams in common if sample i had the plain seed base + i, as vLLM counts them.

    rlfe derives a seed per block of samples instead (`rlfe.randomness`); this says why.
    """
    return max(0, n - abs(seed_a - seed_b))


def _check(name: str, value: float, good: bool, allowed: str) -> None:
    if not good:
        raise RequestError(f"{name} has to be {allowed}, got {value:g}", hint=f"change {name}")


def _known() -> str:
    return f"known: n, max_tokens, {', '.join(NEUTRAL)}"
