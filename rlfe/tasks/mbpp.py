"""MBPP: the 320 training problems, and the 276 test problems outside MBPP+.

What: the split by rule, prompts with the task's asserts, and the three asserts as the verdict.
What not: MBPP+ verdicts (`mbpp_plus`). The child evaluates the left sides; the right sides stay
here. Try: `get("mbpp").problems("train")[0]`.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rlfe.errors import RequestError, RlfeError
from rlfe.sandbox.encoding import decode, encode, equal
from rlfe.sandbox.parts import Part, value_record
from rlfe.sandbox.pool import Judge
from rlfe.tasks import packaged
from rlfe.tasks.coding import CodingTask, check_style, pick_examples
from rlfe.types import Message, Problem, Prompt

DATA, PLUS, IDS = "mbpp.jsonl.gz", "MbppPlus-v0.2.0.jsonl.gz", "mbpp_train320_ids.json"
CPU_SECONDS = 0.8
BASE_STOPS = ("[DONE]", "\n[BEGIN]", "\nYou are an expert Python programmer")
_HEAD = "You are an expert Python programmer, and here is your task: "


def partition(all_ids: set[int], plus_ids: set[int]) -> tuple[set[int], set[int]]:
    """(training ids, test ids outside MBPP+): the 320 rule.

    Training = all - MBPP+ - the canonical test split 11..510. Raises RlfeError unless MBPP+, the
    test problems outside it and the training problems are 378 + 276 + 320 = 974 ids.
    """
    canonical_test = set(range(11, 511))
    train = all_ids - plus_ids - canonical_test
    test = (all_ids & canonical_test) - plus_ids
    counts = (len(all_ids), len(plus_ids & all_ids), len(plus_ids), len(test), len(train))
    if counts != (974, 378, 378, 276, 320) or all_ids != set(range(1, 975)):
        raise RlfeError(
            f"MBPP does not split into 378 + 276 + 320 problems: {counts}",
            hint="The packaged data files do not fit each other; install rlfe again.",
        )
    return train, test


@functools.cache
def _split_ids() -> tuple[frozenset[int], frozenset[int]]:
    plus = {int(row["task_id"].split("/")[1]) for row in packaged.rows(PLUS)}
    train, test = partition(set(_rows()), plus)
    listed = packaged.document(IDS)
    if set(listed["task_ids"]) != train or len(listed["task_ids"]) != listed["count"]:
        raise RlfeError(f"{IDS} does not follow its rule", hint="Install rlfe again.")
    return frozenset(train), frozenset(test)


@functools.cache
def _rows() -> dict[int, dict[str, Any]]:
    return {row["task_id"]: row for row in packaged.rows(DATA)}


def split_assert(text: str) -> tuple[str, Any]:
    """(left side, value of the right side) of `assert LEFT == LITERAL`.

    Raises RequestError for any other statement.
    """
    try:
        (node,) = ast.parse(text.strip()).body
        test = node.test if isinstance(node, ast.Assert) else None
        if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
            return ast.unparse(test.left), ast.literal_eval(test.comparators[0])
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"not `assert expression == literal`: {text[:200]}") from error
    raise RequestError(f"not `assert expression == literal`: {text[:200]}")


def entry_point(tests: Sequence[str], code: str) -> str:
    """The first function of `code` that every assert calls."""
    defined = {n.name for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef)}
    called = [_called(test) for test in tests]
    return next((name for name in called[0] if name in defined.intersection(*called)), "")


def called_by_all(tests: Sequence[str]) -> str:
    """The one name that every assert calls and no builtin has; "" if that is not one."""
    shared = set.intersection(*(set(_called(test)) for test in tests)) - set(dir(builtins))
    return shared.pop() if len(shared) == 1 else ""


def _called(text: str) -> list[str]:
    return [
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]


def _problem(number: int, task: str, split: str) -> Problem:
    row = _rows()[number]
    code = row["code"].replace("\r\n", "\n").replace("\r", "\n")
    tests = tuple(test.replace("\r\n", "\n") for test in row["test_list"])
    return Problem(
        id=f"mbpp/{number}",
        task=task,
        split=split,
        prompt=row["text"],
        answer=code,
        tests=tests,
        entry_point=entry_point(tests, code),
        extra={"setup": row["test_setup_code"].replace("\r\n", "\n")},
    )


@functools.cache
def training_problems() -> tuple[Problem, ...]:
    """The 320, by id."""
    return tuple(_problem(number, "mbpp", "train") for number in sorted(_split_ids()[0]))


@functools.cache
def held_out_problems() -> tuple[Problem, ...]:
    """The 276, by id."""
    return tuple(_problem(number, "mbpp_test", "test") for number in sorted(_split_ids()[1]))


def prompt(problem: Problem, style: str, examples: Sequence[Problem]) -> Prompt:
    """The MBPP prompt; it shows the asserts, because most texts name no function."""
    if style == "base":
        shown = [f"{_base(example)}{example.answer}\n[DONE]\n\n" for example in examples]
        text = "".join(shown) + _base(problem)
        return Prompt(format="mbpp-base-v1", text=text, stop=BASE_STOPS, continues_code=True)
    turns: list[Message] = []
    for example in examples:
        turns.append(Message(role="user", text=_chat(example)))
        turns.append(Message(role="assistant", text=f"```python\n{example.answer}\n```"))
    turns.append(Message(role="user", text=_chat(problem)))
    return Prompt(format="mbpp-chat-v1", messages=tuple(turns))


def _base(problem: Problem) -> str:
    tests = "\n".join(problem.tests)
    return f"{_HEAD}{problem.prompt} Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"


def _chat(problem: Problem) -> str:
    tests = "\n".join(problem.tests)
    return (
        f"{problem.prompt}\n\nYour program should pass these tests:\n\n{tests}\n\n"
        "Write one self-contained Python program in a single fenced block that starts with "
        "```python and ends with ```."
    )


def assert_part(
    problem: Problem, *, cpu_seconds: float = CPU_SECONDS, keep_going: bool = False
) -> Part:
    """The problem's asserts: left sides for the child, right sides kept here."""
    pairs = [split_assert(test) for test in problem.tests]
    expected = [(encode(value), value) for _, value in pairs]

    def check(index: int, data: bytes) -> bool:
        encoded, value = expected[index]
        return data == encoded or equal(decode(data), value)

    return Part(
        name="asserts",
        mode="expressions",
        inputs=tuple(left for left, _ in pairs),
        right_records=tuple(value_record(encoded) for encoded, _ in expected),
        setup=problem.extra.get("setup", ""),
        check=check,
        cpu_seconds=cpu_seconds,
        call_seconds=cpu_seconds,
        keep_going=keep_going,
    )


class Mbpp(CodingTask):
    """Task `mbpp`: 320 problems to train on, the 276 of `mbpp_test` held out."""

    name = "mbpp"
    version = "mbpp-asserts v1"
    SETTINGS: tuple[str, ...] = ("cpu_seconds", "fraction")
    splits: Mapping[str, Any] = {"train": training_problems, "test": held_out_problems}

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS, fraction: bool = False) -> None:
        self.cpu_seconds, self.fraction = cpu_seconds, fraction
        self._parts: dict[tuple[Any, ...], Part] = {}

    def problems(self, split: str) -> tuple[Problem, ...]:
        if split not in self.splits:
            raise RequestError(
                f"task {self.name} has no split {split!r}", hint=f"It has {', '.join(self.splits)}."
            )
        found: tuple[Problem, ...] = self.splits[split]()
        return found

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        check_style(style, self.name)
        solved = {example.id: example for example in training_problems()}
        return prompt(problem, style, pick_examples(examples, solved, "mbpp"))

    def data_sha256(self) -> str:
        return packaged.sha256(DATA)

    def parts(self, problem: Problem, judge: Judge) -> tuple[Part, ...]:
        key = (problem.id, problem.tests, problem.extra.get("setup"))
        if key not in self._parts:
            self._parts[key] = assert_part(
                problem, cpu_seconds=self.cpu_seconds, keep_going=self.fraction
            )
        return (self._parts[key],)


class MbppTest(Mbpp):
    """Task `mbpp_test`: the 276 problems of the canonical test split outside MBPP+."""

    name = "mbpp_test"
    splits: Mapping[str, Any] = {"test": held_out_problems}
    confirm = True
