"""Does a request fit the model's window? One rule for training and evaluation (algorithms 11)."""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """What happens to a request: `fits`, `shorten` or `fail_problem`, and its max_tokens."""

    action: str
    max_tokens: int


def budget(*, prompt_tokens: int, max_tokens: int, max_len: int) -> Budget:
    """Room of a request: prompt + completion <= max_len fits; nothing is cut from a prompt.

    With room for at least one token max_tokens becomes that room; with none it is 0 and all
    samples of the problem count as wrong. The number of problems never changes.
    """
    room = max_len - prompt_tokens
    if room >= max_tokens:
        return Budget("fits", max_tokens)
    if room >= 1:
        return Budget("shorten", room)
    return Budget("fail_problem", 0)
