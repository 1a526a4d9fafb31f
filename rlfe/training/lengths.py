"""Prompts that do not fit: refused before a model is loaded, or left out of the training list.

Fits: prompt tokens + train.max_tokens <= model.max_len. Nothing is cut from a prompt. Evaluation
never leaves a problem out; its rule is in `rlfe.eval`. docs/algorithms.md 11.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlfe.errors import RequestError

SHOWN = 10


def fitting(
    prompt_tokens: Mapping[str, int], *, max_tokens: int, max_len: int, fail: bool = True
) -> tuple[list[str], list[str]]:
    """(ids that fit, ids that do not), both in the given order.

    Args:
        prompt_tokens: Tokens of every prompt after the template, by problem id.
        fail: `data.fail_on_prompt_too_long`; false leaves the problems out.

    Raises:
        RequestError: With `fail`, if any does not fit; without, if none is left.
    """
    limit = max_len - max_tokens
    fits: list[str] = []
    long: list[str] = []
    for problem_id, tokens in prompt_tokens.items():
        (fits if tokens <= limit else long).append(problem_id)
    if long and (fail or not fits):
        shown = ", ".join(f"{name} ({prompt_tokens[name]})" for name in long[:SHOWN])
        more = f" and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        raise RequestError(
            f"{len(long)} of {len(prompt_tokens)} prompts are longer than the {limit} tokens that "
            f"model.max_len = {max_len} leaves beside train.max_tokens = {max_tokens}: "
            f"{shown}{more}",
            hint="raise model.max_len, lower train.max_tokens, or set "
            "data.fail_on_prompt_too_long = false to leave them out",
        )
    return fits, long
