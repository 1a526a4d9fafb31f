"""DeepCoder: programs judged by stdin or function tests, in the four row shapes of the data set.

What: rows of agentica-org/DeepCoder-Preview-Dataset (primeintellect, taco, lcbv5, codeforces), or
of a file in these shapes, to problems; prompts with answer tags; verdicts. What not: the data
itself (`data.source`). Arguments are literals (JSON, then Python), never evaluated. Outputs
compare by lines without trailing blanks and with equal line counts; a comparison that zips lines
accepts a cut output.
"""

from __future__ import annotations

import ast
import functools
import json
import marshal
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfe.errors import RequestError
from rlfe.sandbox.encoding import decode, equal
from rlfe.sandbox.parts import Case, Part
from rlfe.sandbox.pool import Judge
from rlfe.schema import Data
from rlfe.tasks import sources
from rlfe.tasks.base import Reply
from rlfe.tasks.coding import CodingTask, check_style
from rlfe.tasks.extract import Extraction, extract
from rlfe.types import Message, Problem, Prompt

SAMPLE = "deepcoder_format_sample.jsonl"
CPU_SECONDS = 0.8
MOST_CALLS = 10  # of which a program may use the whole time
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_TAGS = "<answer> your program in a fenced Python block </answer>"
_THINKING_TAGS = f"<think> your thoughts </think> {_TAGS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test. Script: `given` is stdin and `wanted` stdout; function: arguments and result."""

    given: Any
    wanted: Any
    function: str = ""  # "" is a script


def literal(text: Any) -> Any:
    """A value that is given as text: JSON, else a Python literal, else the text itself."""
    if not isinstance(text, str):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def read_tests(raw: Any, metadata: Mapping[str, Any]) -> tuple[Test, ...]:
    """The tests of a row in any of the four shapes; raises RequestError for another one."""
    shape = json.loads(raw) if isinstance(raw, str) else raw
    if isinstance(shape, dict) and {"inputs", "outputs"} <= set(shape):
        name = shape.get("fn_name") or ""
        pairs = zip(shape["inputs"], shape["outputs"], strict=True)
        return tuple(_taco(given, wanted, name) for given, wanted in pairs)
    if isinstance(shape, list) and shape and all(isinstance(test, dict) for test in shape):
        return tuple(_listed(test, metadata) for test in shape)
    raise RequestError(f"tests of an unknown shape: {str(raw)[:120]}")


def _taco(given: Any, wanted: Any, name: str) -> Test:
    if not name:
        return Test(given=_lines(given), wanted=_lines(wanted))
    return Test(given=literal(given), wanted=literal(wanted), function=name)


def _listed(test: Mapping[str, Any], metadata: Mapping[str, Any]) -> Test:
    """primeintellect by `type`, lcbv5 by `testtype`, codeforces by neither."""
    given, wanted = test.get("input", ""), test.get("output", "")
    if test.get("type") == "function_call":
        name = test.get("fn_name") or metadata.get("func_name") or ""
        return Test(given=literal(given), wanted=literal(wanted), function=_named(name))
    if test.get("testtype") == "functional":
        arguments = [literal(line) for line in str(given).split("\n") if line.strip()]
        name = metadata.get("func_name") or test.get("fn_name") or ""
        return Test(given=arguments, wanted=literal(wanted), function=_named(name))
    return Test(given=_lines(given), wanted=_lines(wanted))


def _named(name: str) -> str:
    if not name:
        raise RequestError("a function test without a function name (fn_name or func_name)")
    return name


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(found: str, wanted: str) -> bool:
    """Equal lines without trailing blanks, and equally many; empty lines at the end are none."""
    left, right = ([x.rstrip() for x in text.rstrip().split("\n")] for text in (found, wanted))
    return left == right


def same_result(found: Any, wanted: Any) -> bool:
    """Equal values, tuples as lists (JSON has none); the data wraps a single result in a list."""
    value = _as_lists(found)
    if equal(value, wanted):
        return True
    return isinstance(wanted, list) and len(wanted) == 1 and equal(value, wanted[0])


def _as_lists(value: Any) -> Any:
    return list(map(_as_lists, value)) if isinstance(value, list | tuple) else value


class DeepCoder(CodingTask):
    """Task `deepcoder`. `thinking` opens the reply with `<think>` and asks for that tag too."""

    name = "deepcoder"
    version = "deepcoder-tests v1"
    SETTINGS = ("cpu_seconds", "fraction", "data", "thinking")

    def __init__(
        self,
        *,
        data: Data | None = None,
        cpu_seconds: float = CPU_SECONDS,
        fraction: bool = False,
        thinking: bool = False,
    ) -> None:
        if data is None or data.source is None:
            raise RequestError(
                "task deepcoder needs data.source",
                hint='Such as data.source = "agentica-org/DeepCoder-Preview-Dataset", or a file.',
            )
        self.data, self.cpu_seconds = data, cpu_seconds
        self.fraction, self.thinking = fraction, thinking
        self.notes: list[str] = []  # what the reading left out
        self._loaded: dict[str, tuple[Problem, ...]] = {}

    def problems(self, split: str) -> tuple[Problem, ...]:
        if split not in self._loaded:
            self._loaded[split] = self._read(split)
        return self._loaded[split]

    def _read(self, split: str) -> tuple[Problem, ...]:
        found = []
        for number, row in enumerate(sources.rows(self.data, split, self.notes)):
            name = f"deepcoder/{row.get('subset') or 'rows'}/{number}"
            name = sources.problem_id(self.data, split, name)
            found.append(_problem(row, number, split, name))
        return tuple(found)

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        check_style(style, self.name)
        if examples:
            raise RequestError(
                "task deepcoder shows no examples", hint="Leave prompt.examples out."
            )
        text = _request(problem, _THINKING_TAGS if self.thinking else _TAGS)
        opening = "<think>" if self.thinking else ""
        form = f"deepcoder-{style}-{'think' if self.thinking else 'answer'}-v1"
        stop = ("</answer>",)
        if style == "base":
            return Prompt(format=form, text=f"{text}\n{opening}", stop=stop)
        return Prompt(
            format=form, messages=(Message(role="user", text=text),), text=opening, stop=stop
        )

    def data_sha256(self) -> str:
        """Digest of the problems read so far (all splits)."""
        rows = [
            {"split": split, "id": p.id, "prompt": p.prompt, "tests": str(p.extra["tests"])}
            for split, problems in sorted(self._loaded.items())
            for p in problems
        ]
        return sources.digest(rows)

    def extraction(self, reply: Reply) -> Extraction:
        text = reply.text
        if reply.prompt.text.endswith("<think>") and "</think>" not in text:
            return Extraction(program="")  # never got to its answer
        text = text.rpartition("</think>")[2]
        tagged = _ANSWER.findall(text)
        text = tagged[-1] if tagged else text
        for entry in _entries(reply.problem):
            found = extract(text, entry_point=entry)
            if found.program:
                return found
        return Extraction(program="")

    def parts(self, problem: Problem, judge: Judge) -> tuple[Part, ...]:
        tests: tuple[Test, ...] = problem.extra["tests"]
        if tests[0].function:
            return (self._calls(tests),)
        return tuple(self._script(number, test) for number, test in enumerate(tests))

    def _calls(self, tests: Sequence[Test]) -> Part:
        def check(index: int, data: bytes) -> bool:
            return same_result(decode(data), tests[index].wanted)

        return Part(
            name="calls",
            mode="calls",
            entry=tests[0].function,
            method=True,
            inputs=tuple(marshal.dumps(_arguments(test.given), 2) for test in tests),
            check=check,
            keep_going=self.fraction,
            cpu_seconds=self.cpu_seconds * min(len(tests), MOST_CALLS),
            call_seconds=self.cpu_seconds,
        )

    def _script(self, number: int, test: Test) -> Part:
        def check(index: int, data: bytes) -> bool:
            found = decode(data)
            return isinstance(found, bytes) and same_output(
                found.decode("utf-8", "replace"), test.wanted
            )

        return Part(
            name=f"test {number}",
            mode="stdin",
            inputs=("",),
            stdin=test.given,
            check=check,
            cpu_seconds=self.cpu_seconds,
            call_seconds=self.cpu_seconds,
        )

    def case(self, problem: Problem, program: str, judge: Judge) -> Case:
        return Case(
            key=(problem.id, program),
            program=program,
            parts=self.parts(problem, judge),
            run_all=self.fraction,
        )


def _arguments(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list) else (given,)


def _problem(row: Mapping[str, Any], number: int, split: str, name: str) -> Problem:
    try:
        metadata = row.get("metadata") or {}
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        tests = read_tests(row["tests"], metadata)
    except KeyError:
        raise RequestError(
            f"row {number} has no column tests", hint=f"It has {', '.join(row)}; set data.columns."
        ) from None
    except (RequestError, ValueError) as error:
        raise RequestError(f"row {number}: {error}") from error
    solutions = row.get("solutions") or ()
    return Problem(
        id=name,
        task="deepcoder",
        split=split,
        prompt=str(row.get("problem", row.get("prompt", ""))),
        answer=str(solutions[0]) if solutions else "",
        entry_point=tests[0].function,
        extra={"tests": tests, "starter_code": row.get("starter_code") or ""},
    )


def _request(problem: Problem, tags: str) -> str:
    starter = problem.extra["starter_code"].rstrip()
    if problem.entry_point:
        form = f"Write a Python function {problem.entry_point}."
        form += f" Start from:\n```python\n{starter}\n```" if starter else ""
    else:
        form = "Write a Python program that reads from stdin and prints to stdout."
    return f"{problem.prompt.strip()}\n\n{form}\n\nAnswer in this form: {tags}"


@functools.lru_cache(maxsize=4096)
def _entry_names(function: str, starter: str) -> tuple[str, ...]:
    if not function:
        return ("",)
    return ("Solution", function) if "class Solution" in starter else (function, "Solution")


def _entries(problem: Problem) -> tuple[str, ...]:
    """Names that the program may define: the function, or the class that holds it."""
    return _entry_names(problem.entry_point, problem.extra["starter_code"])
