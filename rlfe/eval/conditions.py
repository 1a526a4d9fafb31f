"""Stated conditions on scores: `mbpp_plus/pass@1>=0.35` holds or does not.

A condition is about every checkpoint of the call; base models count only when nothing else was
scored, because a condition is about what training made. A score that does not exist does not meet
anything. Scores are shares, 0 to 1.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlfe.errors import RequestError
from rlfe.eval.merge import Row

FORM = re.compile(r"\s*([\w.-]+)/pass@(\d+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*")
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`Condition(text="gsm8k/pass@1>=0.3", task="gsm8k", k=1, sign=">=", value=0.3)`"""

    text: str
    task: str
    k: int
    sign: str
    value: float


def parse(text: str) -> Condition:
    """Read one condition.

    Raises:
        RequestError: It does not have the form, or its number lies outside 0..1.
    """
    match = FORM.fullmatch(text)
    try:
        value = float(match[4]) if match else None
    except ValueError:
        value = None
    if match is None or value is None or not 0 <= value <= 1:
        raise RequestError(
            f'"{text}" is no condition on a score',
            hint="Write --require 'mbpp_plus/pass@1>=0.35'; scores are shares from 0 to 1.",
        )
    return Condition(text=text, task=match[1], k=int(match[2]), sign=match[3], value=value)


def check(conditions: Sequence[Condition], samples: Mapping[str, int]) -> None:
    """Refuse conditions on scores that cannot exist; `samples`: task of a row -> its n.

    Raises:
        RequestError: The task is not scored in this call, or k is larger than n.
    """
    for condition in conditions:
        n = samples.get(condition.task)
        if n is None:
            raise RequestError(
                f"--require '{condition.text}': {condition.task} is not scored in this call",
                hint=f"It scores {', '.join(samples)}.",
            )
        if not 1 <= condition.k <= n:
            raise RequestError(
                f"--require '{condition.text}': pass@{condition.k} does not exist with n={n}",
                hint=f"Ask for k from 1 to {n}, or sample more with -n.",
            )


def unmet(conditions: Sequence[Condition], rows: Sequence[Row]) -> list[str]:
    """One sentence for every condition and checkpoint where it does not hold."""
    trained = [row for row in rows if int(row["step"]) > 0] or list(rows)
    found = []
    for condition in conditions:
        here = [r for r in trained if (r["task"], int(r["k"])) == (condition.task, condition.k)]
        if not here:
            found.append(f"{condition.text}: no such score in this call")
        for row in here:
            score = float(row["score"]) if row["score"] else None
            if score is None or not COMPARE[condition.sign](score, condition.value):
                shown = "no score" if score is None else f"{score:.4f}"
                found.append(f"{condition.text}: {row['cell']} step {row['step']} has {shown}")
    return found
