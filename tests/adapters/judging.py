"""Adapters of judging: extraction, execution and GSM8K answers, through the real judge."""

from __future__ import annotations

import atexit
import time
from decimal import Decimal
from typing import Any

from rlfe.sandbox.parts import Outcome
from rlfe.sandbox.pool import Judge
from rlfe.tasks import gsm8k_answer
from rlfe.tasks.extract import extract
from rlfe.tasks.mbpp import Mbpp
from rlfe.types import Problem

_judges: list[Judge] = []


def _judge() -> Judge:
    """One pool for all cases; programs of these families run nowhere else."""
    if not _judges:
        _judges.append(Judge(workers=1).__enter__())
        atexit.register(_judges[0].__exit__)
    return _judges[0]


def _run(program: str, tests: str) -> Outcome:
    problem = Problem(
        id="case", task="mbpp", split="train", prompt="", tests=tuple(tests.split("\n"))
    )
    ((_, outcome),) = _judge().run([Mbpp().case(problem, program, _judge())])
    return outcome


def code_exec(given: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    first = str(_run(given["program"], given["tests"]).status)
    seconds = time.monotonic() - started
    second = str(_run(given["program"], given["tests"]).status)
    verdict = "pass" if first == "passed" else "fail"
    return {"verdict": verdict if first == second else "unsteady", "max_wall_s": seconds}


def code_exec_differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    wrong = []
    if found["verdict"] != expected["verdict"]:
        wrong.append(f"verdict {found['verdict']}, expected {expected['verdict']}")
    if found["max_wall_s"] > expected["max_wall_s"]:
        wrong.append(f"took {found['max_wall_s']:.1f} s of {expected['max_wall_s']}")
    return wrong


def code_extract(given: dict[str, Any]) -> dict[str, Any]:
    program = extract(
        given["output"], entry_point=given["entry_point"], continues_code=given["continues"]
    ).program
    return {"passes": bool(program) and str(_run(program, given["tests"]).status) == "passed"}


def gsm8k(given: dict[str, Any]) -> dict[str, Any]:
    found = gsm8k_answer.answer(given["response"], mode="flexible")
    right = gsm8k_answer.is_right(found, gsm8k_answer.gold(given["reference"]))
    number = int(found) if isinstance(found, Decimal) and found == int(found) else found
    return {"answer": number, "correct": right}


ADAPTERS = {"code_exec": code_exec, "code_extract": code_extract, "gsm8k_answer": gsm8k}
COMPARE = {"code_exec": code_exec_differences}
# The jail refuses new processes, so a program that starts one fails.
OWN_ANSWERS = {"code_exec-child": {"verdict": "fail", "max_wall_s": 10}}
