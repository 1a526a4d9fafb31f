"""Sentences and cells of a card that are derived from the runs and never assumed.

Study 2's published card calls 6e-6 "below" 1e-6 and promises every step of a stride: both are
computed here. Try: `lr_side(6e-6, 1e-6) == "above"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from rlfe.schema import Optim

DEFAULT_LR = Optim().lr


class License(NamedTuple):
    """A license as the metadata block has it.

    `License("other", "qwen-research", "https://...")`; `name` and `link` belong to "other" only.
    """

    id: str
    name: str = ""
    link: str = ""


def lr_side(lr: float, default: float = DEFAULT_LR) -> str:
    """`above`, `below` or `at`: where a rate lies against another, as numbers."""
    if lr == default:
        return "at"
    return "above" if lr > default else "below"


def rate_text(value: float) -> str:
    """A rate as people write it: `rate_text(6e-06) == "6e-6"`, `rate_text(0.1) == "0.1"`."""
    if value >= 0.01:
        return f"{value:g}"
    mantissa, exponent = f"{value:.11e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def steps_text(steps: Iterable[int]) -> str:
    """The steps in a few words that claim exactly these steps.

    `steps_text([30, 60, 90, 100]) == "30-100 step 30"`: a stride from its own value on, the last
    may be the endpoint. Anything else is listed: `steps_text([30, 90]) == "30, 90"`; "none" when
    there are none.
    """
    ordered = sorted(set(steps))
    if not ordered:
        return "none"
    stride = ordered[0]
    on_stride = list(range(stride, ordered[-1] + 1, stride)) if stride > 0 else []
    endpoint = [] if ordered[-1] in on_stride else [ordered[-1]]
    if len(ordered) >= 3 and ordered == [*on_stride, *endpoint]:
        return f"{ordered[0]}-{ordered[-1]} step {stride}"
    return ", ".join(map(str, ordered))


@cache
def known_licenses() -> frozenset[str]:
    """License identifiers that the Hub knows."""
    text = resources.files("rlfe.hub").joinpath("licenses.txt").read_text(encoding="utf-8")
    return frozenset(text.split())


def is_license(text: object) -> bool:
    """Whether the Hub takes it as `license:`; `unknown` is no answer."""
    return isinstance(text, str) and text in known_licenses() and text != "unknown"


def common_license(found: Sequence[License | None]) -> License | None:
    """The one license of all bases; None when one is unknown, they differ, or there is none."""
    first = found[0] if found else None
    is_one = first is not None and all(other == first for other in found)
    return first if is_one and first is not None and is_license(first.id) else None
