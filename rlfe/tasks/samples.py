"""Samples in files: evalplus' JSON lines and ours, read strictly and written back.

What: a line becomes a `Sample` that a task can judge, or a RequestError that names the line. What
not: judging. A `solution` is a program as it is; a `completion` continues the problem's prompt; a
`response` is a whole reply from which the program or number is taken.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfe.errors import NotFoundError, RequestError
from rlfe.tasks.base import Reply, Task
from rlfe.tasks.coding import CodingTask
from rlfe.types import Finish, Problem, Verdict

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge

FIELDS = ("solution", "completion", "response")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line. `Sample(line=1, problem=problem, kind="solution", text="def f(): ...")`"""

    line: int
    problem: Problem
    kind: str
    text: str

    def program(self) -> str:
        """The program as evalplus builds it: a completion follows the problem's prompt."""
        return self.problem.prompt + self.text if self.kind == "completion" else self.text


def read(path: Path, task: Task) -> list[Sample]:
    """The samples of a file, in order; raises RequestError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist", hint="Give --samples a JSONL file.") from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is no text in UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}",
            hint="Give --samples a JSONL file, unpacked.",
        ) from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    known = _by_name(task)
    found = [
        _sample(path, number, line, known, task)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise RequestError(f"{path} has no samples")
    return found


def _by_name(task: Task) -> dict[str, Problem]:
    """Problems by every name that sample files use: ours, evalplus', the bare number."""
    known: dict[str, Problem] = {}
    splits = {"gsm8k": ("train", "test"), "mbpp": ("train", "test")}.get(task.name, ("test",))
    for split in splits:
        for problem in task.problems(split):
            known[problem.id] = problem
            if "task_id" in problem.extra:
                known[problem.extra["task_id"]] = problem
            elif problem.id.startswith("mbpp/"):
                known[f"Mbpp/{problem.id[5:]}"] = known[problem.id[5:]] = problem
    return known


def _sample(path: Path, number: int, line: str, known: Mapping[str, Problem], task: Task) -> Sample:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise RequestError(f"{path}:{number}: not a JSON object: {error}") from None
    kinds = [kind for kind in FIELDS if isinstance(row.get(kind), str)]
    if len(kinds) != 1:
        raise RequestError(
            f"{path}:{number}: needs exactly one of the text fields {', '.join(FIELDS)}",
            hint=f"It has {', '.join(row) or 'nothing'}.",
        )
    return Sample(
        line=number,
        problem=_problem(path, number, row, known, task),
        kind=kinds[0],
        text=row[kinds[0]],
    )


def _problem(
    path: Path, number: int, row: Mapping[str, Any], known: Mapping[str, Problem], task: Task
) -> Problem:
    name = str(row.get("problem_id", row.get("task_id", "")))
    if name in known:
        return known[name]
    if task.name == "gsm8k" and "gold" in row:
        gold = f"#### {row['gold']}"
        return Problem(
            id=name or f"line {number}", task="gsm8k", split="test", prompt="", answer=gold
        )
    first = next(iter(known))
    raise RequestError(
        f"{path}:{number}: {name or 'no task_id'!r} is no problem of {task.name}",
        hint=f"Its problems are named like {first}.",
    )


def verdicts(
    task: Task, samples: Sequence[Sample], judge: Judge | None
) -> Iterator[tuple[int, Verdict]]:
    """(place in `samples`, verdict), as they end; a `solution` is judged as it is."""
    replies = [
        _reply(sample, task, str(place))
        for place, sample in enumerate(samples)
        if sample.kind != "solution" or not task.runs_programs
    ]
    programs = [
        (str(place), sample.problem, sample.text)
        for place, sample in enumerate(samples)
        if sample.kind == "solution" and task.runs_programs
    ]
    if programs:
        assert isinstance(task, CodingTask), task.name
        assert judge is not None
        direct = task.judge_programs(programs, judge)
    else:
        direct = iter(())
    for key, verdict in itertools.chain(task.judge(replies, judge), direct):
        yield int(key), verdict


def _reply(sample: Sample, task: Task, key: str) -> Reply:
    """The sample as a reply: a completion after the base prompt, or a chat reply."""
    style = "base" if sample.kind == "completion" else "chat"
    prompt = task.prompt(sample.problem, style)
    if sample.kind == "response":
        prompt = replace(prompt, continues_code=False)
    return Reply(
        key=key, problem=sample.problem, prompt=prompt, text=sample.text, finish=Finish.STOP
    )


def evalplus_rows(programs: Sequence[tuple[str, str]]) -> str:
    """JSON lines that evalplus' own command reads, from (task id, program)."""
    rows = [{"task_id": name, "solution": program} for name, program in programs]
    return "".join(json.dumps(row) + "\n" for row in rows)
