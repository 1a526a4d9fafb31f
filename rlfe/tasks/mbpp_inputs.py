"""MBPP+ inputs: JSON values to the arguments that the functions take (`docs/judging.md` 1).

Source: `mbpp_deserialize_inputs` of evalplus 0.3.1 (evalplus/data/mbpp.py), for the ids that are
in MBPP+ v0.2.0. Checked against the original-format file, which holds the same inputs as Python
literals. Try: `arguments(2, [[3, 4], [5]])` is `[(3, 4), (5,)]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Arguments = Sequence[Any]


def _each(values: Arguments) -> Arguments:
    return [tuple(value) for value in values]


def _elements_of_each(values: Arguments) -> Arguments:
    return [[tuple(item) for item in value] for value in values]


def _elements_of_first(values: Arguments) -> Arguments:
    return [[tuple(item) for item in values[0]], values[1]]


def _first(values: Arguments) -> Arguments:
    return [tuple(values[0]), values[1]]


def _second(values: Arguments) -> Arguments:
    return [values[0], tuple(values[1])]


def _elements_and_each(values: Arguments) -> Arguments:
    return _each(_elements_of_each(values))


def _list_elements(values: Arguments) -> Arguments:
    return [tuple(tuple(item) if isinstance(item, list) else item for item in values[0])]


def _all_lists(value: Any) -> Any:
    return tuple(map(_all_lists, value)) if isinstance(value, list) else value


def _dict_values(values: Arguments) -> Arguments:
    return [{key: tuple(value) for key, value in values[0].items()}, *values[1:]]


def _float_complex(values: Arguments) -> Arguments:
    return (float(values[0]), complex(values[1]))


def _complex(values: Arguments) -> Arguments:
    return [complex(values[0])]


_RULES: tuple[tuple[Callable[[Any], Arguments], str], ...] = (
    (_each, "2 116 132 222 261 273 394 421 424 429 470 560 579 596 616 630 726 740 744 809"),
    (_elements_of_each, "63 64 70 94 120 237 272 299 409 473 614 780"),
    (_elements_of_first, "75 413 753"),
    (_first, "250 405 446 720 763 808"),
    (_second, "106 750"),
    (_elements_and_each, "259 445"),
    (_list_elements, "278"),
    (_all_lists, "580 615 791"),
    (_dict_values, "722"),
    (_float_complex, "124"),
    (_complex, "252"),
)
BY_ID = {int(number): rule for rule, ids in _RULES for number in ids.split()}


def arguments(number: int, values: Any) -> Arguments:
    """The arguments of one call of MBPP+ task `number` from its JSON input."""
    return BY_ID[number](values) if number in BY_ID else values
