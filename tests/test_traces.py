"""Which programs can leave something behind for their own later parts, and what that changes."""

from __future__ import annotations

import ast

import pytest

from rlfe.sandbox import worker
from rlfe.sandbox.encoding import encode
from rlfe.sandbox.parts import Case, Part
from rlfe.sandbox.pool import Judge
from rlfe.sandbox.traces import keep_quiet, leaves_nothing
from rlfe.types import Status

PURE = "import math\nfrom collections import Counter as C\n\ndef f(x):\n    return math.sqrt(x)\n"


@pytest.mark.parametrize(
    ("program", "nothing"),
    [
        (PURE, True),
        ("class A:\n    def __init__(self, x):\n        pass\n", True),
        ("seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)\n", True),  # its own list
        ("class A:\n    def f(self, x):\n        self.x = x\n", False),  # in doubt
        ("import random\n", False),
        ("import collections.abc, os.path\n", False),
        ("from .x import y\n", False),
        ("import math\nmath.pi = 3\n", False),
        ("import math\nsetattr(math, 'pi', 3)\n", False),
        ("def f(x):\n    return f.__globals__\n", False),
        ("__builtins__['len'] = None\n", False),
        ("def f(x):\n    open('x', 'a').write('x')\n", False),
        (
            "def f(x):\n    try:\n        return [0] * x\n    except Exception:\n        pass\n",
            False,
        ),
        ("def f(x:\n", False),
        ("x = " + "(" * 5000 + ")" * 5000, False),
    ],
)
def test_what_leaves_nothing_behind(program: str, nothing: bool) -> None:
    assert leaves_nothing(program) is nothing


def test_nobody_is_warned_of_a_programs_escapes(recwarn: pytest.WarningsRecorder) -> None:
    program = "def f(x):\n    return '\\d' + 0if x else 1\n"
    with pytest.warns((SyntaxWarning, DeprecationWarning)):
        ast.parse(program)
    keep_quiet()
    assert leaves_nothing(program)
    assert not recwarn.list


def asked(name: str, call: str, wanted: int) -> Part:
    return Part(
        name=name, mode="expressions", inputs=(call,), check=lambda _, data: data == encode(wanted)
    )


@pytest.mark.parametrize(
    ("program", "status", "runs"),
    [
        ("def f(x):\n    return x\n", Status.FAILED, 1),
        ("import random\ndef f(x):\n    return x\n", Status.FAILED, 2),
        # right for a fresh process, wrong for one in which it has been asked before
        (
            "import string\ndef f(x):\n    was = getattr(string, 'was', 0)\n    string.was = x\n"
            "    return 0 if was else x + (x == 2)\n",
            Status.PASSED,
            2,
        ),
    ],
)
def test_a_later_part_that_failed_runs_again_only_where_an_earlier_one_can_matter(
    monkeypatch: pytest.MonkeyPatch, program: str, status: Status, runs: int
) -> None:
    begun: list[int] = []
    begin = worker.Worker.begin

    def counted(self: worker.Worker, text: str, *arguments: object) -> None:
        begun.append(text == program)
        begin(self, text, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker.Worker, "begin", counted)
    parts = (asked("base", "f(1)", 1), asked("plus", "f(2)", 3))
    with Judge(workers=1) as judge:
        ((_, outcome),) = judge.run([Case(key=0, program=program, parts=parts, shared=True)])
    assert outcome.status is status
    assert sum(begun) == runs
