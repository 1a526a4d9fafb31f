"""When an answer is right: evalplus 0.3.1's comparison on decoded values (`docs/judging.md` 5.1).

What: one checker per part of a task, fed with encoded answers in order. What not: no code of the
program runs here; expected values live here and nowhere near it. Source of the rules:
evalplus/eval/__init__.py (`unsafe_execute`) and evalplus/eval/_special_oracle.py @0.3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlfe.sandbox.encoding import (
    Digest,
    Malformed,
    Opaque,
    canonical_digest,
    decode,
    equal,
    type_name,
)
from rlfe.sandbox.inside.wire import Unencodable

SET_TASKS = frozenset(
    ("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum",
     "intersection_array", "find_dissimilar", "Diff")
)  # fmt: skip
PRESENCE_TASKS = frozenset(("check_str", "text_match_three", "text_starta_endb"))
FLOAT_ATOL, RTOL = 1e-6, 1e-7
Exact = Callable[[Any, Any, Sequence[Any], float], bool]


@dataclass(frozen=True, slots=True)
class Expected:
    """One expected result: its encoding, or a digest where that is long."""

    encoded: bytes

    @property
    def digest(self) -> Digest | None:
        value = decode(self.encoded) if self.encoded[:1] == b"D" else None
        return value if isinstance(value, Digest) else None


def shape_of(entry_point: str) -> str:
    """What the child sends for a value of this task."""
    if entry_point in SET_TASKS:
        return "elements"
    return "presence" if entry_point in PRESENCE_TASKS else "value"


def is_floats(value: Any) -> bool:
    """A float, or a non-empty list or tuple of floats only."""
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


class Checker:
    """`check(i, encoded)` for the inputs of one part, in order.

    Args:
        entry_point: Chooses the special rules of evalplus.
        expected: One per input.
        inputs: The arguments of each call (two rules work the answer out from them).
        atol: The task's own tolerance; it becomes 1e-6 from the first float result on.
        poly: HumanEval/32: any root of the polynomial is right.
    """

    def __init__(
        self,
        entry_point: str,
        expected: Sequence[Expected],
        inputs: Sequence[Sequence[Any]],
        atol: float,
        *,
        poly: bool = False,
    ) -> None:
        self.expected, self.inputs = expected, inputs
        self.exact: Exact = _RULES.get(entry_point, _plain)
        self.poly, self.atol = poly, atol
        self.values = [None if e.encoded[:1] == b"D" else decode(e.encoded) for e in expected]
        self.shortcut = [e.encoded if e.encoded[:1] != b"D" and not poly else b"" for e in expected]
        self.tolerances = self._sticky(atol)
        for index, value in enumerate(self.values):
            if not equal(value, value) or _has_nan(value):
                self.shortcut[index] = b""

    def _sticky(self, atol: float) -> list[tuple[float, float]]:
        """(tolerance of the special rules, tolerance of the comparison) per input."""
        found = []
        for value in self.values:
            before = atol
            if atol == 0 and is_floats(value):
                atol = FLOAT_ATOL
            found.append((before, atol))
        return found

    def __call__(self, index: int, data: bytes) -> bool:
        """Whether answer `index` is right; raises Malformed."""
        if data == self.shortcut[index]:
            return True
        wanted = self.expected[index].digest
        if wanted is not None:
            return _same_digest(data, wanted)
        value = decode(data)
        if isinstance(value, Digest):
            return value.kind == "k" and _digest_of(self.values[index]) == value.sha256
        try:
            return self._right(index, value, data)
        except (ArithmeticError, TypeError, ValueError, RecursionError, AttributeError):
            return False

    def _right(self, index: int, value: Any, data: bytes) -> bool:
        wanted, inputs = self.values[index], self.inputs[index]
        special, atol = self.tolerances[index]
        if self.poly:
            return abs(_poly(inputs[0], value)) <= special
        if self.exact(value, wanted, inputs, special):
            return True
        if atol == 0 or type_name(data) != type_name(self.expected[index].encoded):
            return False
        if isinstance(wanted, list | tuple) and len(value) != len(wanted):
            return False
        return _close(value, wanted, atol)


def _has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_nan, value))
    return isinstance(value, dict) and any(map(_has_nan, [*value, *value.values()]))


def _digest_of(value: Any) -> bytes:
    try:
        return canonical_digest(value)
    except Unencodable:
        return b""


def _same_digest(data: bytes, wanted: Digest) -> bool:
    found = decode(data)
    if isinstance(found, Digest):
        return found == wanted if found.kind == "m" else found.sha256 == wanted.sha256
    return wanted.kind == "k" and _digest_of(found) == wanted.sha256


def _close(value: Any, wanted: Any, atol: float) -> bool:
    """numpy's `allclose`; two floats take the same steps without it."""
    if type(value) is float and type(wanted) is float:
        within = abs(value - wanted) <= atol + RTOL * abs(wanted)
        return value == wanted or (math.isfinite(wanted) and within)
    import numpy as np

    with np.errstate(all="ignore"):
        return bool(np.allclose(value, wanted, rtol=RTOL, atol=atol))


# -- evalplus' special rules; each returns its `exact_match`


def _plain(value: Any, wanted: Any, inputs: Sequence[Any], atol: float) -> bool:
    return equal(value, wanted)


def _as_sets(value: Any, wanted: Any, inputs: Sequence[Any], atol: float) -> bool:
    return bool(set(value) == set(wanted))


def _presence(value: Any, wanted: Any, inputs: Sequence[Any], atol: float) -> bool:
    return bool(wanted == (value if isinstance(value, bool) else value is not None))


def _surface_area(value: Any, wanted: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Mbpp/581: the height may be read as the perpendicular height."""
    base, height = inputs
    slant = math.sqrt((base / 2) ** 2 + height**2)
    return equal(value, wanted) or abs(value - round(base**2 + 4 * (base * slant) / 2)) <= atol


def _digit_distance(value: Any, wanted: Any, inputs: Sequence[Any], atol: float) -> bool:
    """Mbpp/558: digits may be compared after padding with zeros."""
    left, right = str(inputs[0]), str(inputs[1])
    width = max(len(left), len(right))
    pairs = zip(left.zfill(width), right.zfill(width), strict=True)
    return equal(value, wanted) or bool(value == sum(abs(int(a) - int(b)) for a, b in pairs))


def _poly(coefficients: Sequence[float], x: Any) -> float:
    """HumanEval/32: the polynomial at x."""
    if isinstance(x, Opaque):
        raise TypeError("not a number")
    return sum(factor * math.pow(x, power) for power, factor in enumerate(coefficients))


_RULES: dict[str, Exact] = {
    **dict.fromkeys(SET_TASKS, _as_sets),
    **dict.fromkeys(PRESENCE_TASKS, _presence),
    "surface_Area": _surface_area,
    "digit_distance_nums": _digit_distance,
}
__all__ = ["Checker", "Expected", "Malformed", "is_floats", "shape_of"]
