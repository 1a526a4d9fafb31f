"""Run every case family of a folder through the real code.

`python -m tests.cases DIR` prints one line for each failing case and a total, and exits 1 if any
fails. The format is DIR/README.md's. What connects a family to the code are the thin functions in
`tests/adapters/*.py`: `ADAPTERS` maps a family to a function from a case's input to its output. A
module may also hold `COMPARE` (family -> differences between output and expected, where equality
is not the question) and `OWN_ANSWERS` (id of a case that leaves a choice -> what rlfe chose).
A family without an adapter counts as `not built yet`.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tests.adapters
from rlfe.errors import RlfeError

Adapter = Callable[[dict[str, Any]], dict[str, Any]]
Compare = Callable[[dict[str, Any], dict[str, Any]], list[str]]
TOLERANCE = 1e-9
NAMED_TOLERANCE = re.compile(r"(?:[Tt]olerance|within) (1e-\d+)")
# How a failure is told from a refusal: a refusal is an RlfeError or an answer {"error": True}.
REFUSED = {"error": True}


@dataclass
class Adapters:
    """Everything that tests/adapters defines."""

    run: dict[str, Adapter] = field(default_factory=dict)
    compare: dict[str, Compare] = field(default_factory=dict)
    own_answers: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Total:
    """Counts of a whole run. `str(Total(2, ["x: ..."], 1))` is its last line."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    not_built: int = 0

    def __str__(self) -> str:
        cases = self.passed + len(self.failures) + self.not_built
        return (
            f"{cases} cases: {self.passed} passed, {len(self.failures)} failed, "
            f"{self.not_built} not built yet"
        )


def load_adapters() -> Adapters:
    """Import tests/adapters/*.py and join their tables."""
    found = Adapters()
    for module in pkgutil.iter_modules(tests.adapters.__path__):
        names = vars(importlib.import_module(f"tests.adapters.{module.name}"))
        found.run |= names.get("ADAPTERS", {})
        found.compare |= names.get("COMPARE", {})
        found.own_answers |= names.get("OWN_ANSWERS", {})
    return found


def run_folder(folder: Path, adapters: Adapters) -> Total:
    """Run all families of a folder."""
    total = Total()
    for path in sorted(folder.glob("*.json")):
        family = json.loads(path.read_text())
        for case in family["cases"]:
            if family["family"] not in adapters.run:
                total.not_built += 1
                continue
            wrong = run_case(family, case, adapters)
            if wrong:
                total.failures.append(f"{case['id']}: {'; '.join(wrong)}")
            else:
                total.passed += 1
    return total


def run_case(family: Mapping[str, Any], case: Mapping[str, Any], adapters: Adapters) -> list[str]:
    """What is wrong with one case's answer; empty when it is right."""
    name, expected = family["family"], case["expected"]
    if case["id"] in adapters.own_answers:
        if "policy" not in case:
            return ["has an own answer although the case leaves no choice"]
        expected = adapters.own_answers[case["id"]]
    start = time.monotonic()
    try:
        output = adapters.run[name](case["input"])
    except RlfeError as error:
        output = {**REFUSED, "message": str(error)}
    except Exception as error:  # one bad case must not hide the others
        return [f"{type(error).__name__}: {error}"]
    output = {**output}
    if expected.get("error") is True and output.get("error") is True:
        return []
    if name in adapters.compare:
        return adapters.compare[name](output, expected)
    limit = expected.get("max_wall_s")
    if limit is not None:
        output["max_wall_s"] = limit
        if time.monotonic() - start > limit:
            return [f"took {time.monotonic() - start:.1f} s, allowed are {limit}"]
    return list(differences(output, expected, tolerance(family["rule"])))


def tolerance(rule: str) -> float:
    """The tolerance that a rule names, else 1e-9."""
    named = NAMED_TOLERANCE.findall(rule)
    return float(named[-1]) if named else TOLERANCE


def differences(got: Any, expected: Any, allowed: float, place: str = "") -> Iterator[str]:
    """Where `got` is not `expected`; keys that are only in `got` do not count."""
    if isinstance(expected, dict) and isinstance(got, Mapping):
        for key, value in expected.items():
            if key not in got:
                yield f"{place}{key} is missing" + (
                    f" ({got['message']})" if "message" in got else ""
                )
            else:
                yield from differences(got[key], value, allowed, f"{place}{key}.")
        if "error" in got and "error" not in expected and got["error"]:
            yield f"refused: {got.get('message', '')}"
    elif isinstance(expected, list) and isinstance(got, list | tuple):
        if len(got) != len(expected):
            yield f"{place[:-1]} is {got!r}, expected {expected!r}"
            return
        for number, (item, wanted) in enumerate(zip(got, expected, strict=True)):
            yield from differences(item, wanted, allowed, f"{place}{number}.")
    elif not same(got, expected, allowed):
        yield f"{place[:-1]} is {got!r}, expected {expected!r}"


def same(got: Any, expected: Any, allowed: float) -> bool:
    """Equality of two leaves; numbers with a tolerance, true is not 1."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (got, expected))
    if numbers:
        return math.isclose(got, expected, rel_tol=allowed, abs_tol=allowed)
    return type(got) is type(expected) and bool(got == expected)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m tests.cases DIR", file=sys.stderr)
        return 2
    total = run_folder(Path(arguments[0]), load_adapters())
    for line in total.failures:
        print(line)
    print(total)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
