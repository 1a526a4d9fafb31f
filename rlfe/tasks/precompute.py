"""Makes the packaged expected results: `python -m rlfe.tasks.precompute [TASK | PROBLEM]...`.

What: runs the canonical programs of MBPP+ and HumanEval+ in the jail and stores every result, or
its digest, and the CPU seconds of slow calls. What not: it is never needed to judge; run it when
the data, the encoding or the comparison changes, and review the difference.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from rlfe.sandbox.encoding import canonical_digest, decode
from rlfe.sandbox.parts import Case, Part
from rlfe.sandbox.pool import Judge
from rlfe.tasks import packaged
from rlfe.tasks.oracle import PRESENCE_TASKS, SET_TASKS, is_floats
from rlfe.tasks.plus import KNOWN_SECONDS, HumanEvalPlus, MbppPlus, PlusTask
from rlfe.types import Problem, Status

KEPT_BYTES = 2048  # a longer result without tolerance is stored as a digest
_NUMBERS = frozenset({"int", "bool", "float"})
_PLAIN = frozenset({"list", "tuple", "str", "NoneType"})
_KINDS = """
def _kinds(value, seen):
    seen.add(type(value).__name__)
    if isinstance(value, (list, tuple)):
        for item in value:
            if type(item) is not str:
                _kinds(item, seen)
            else:
                seen.add("str")
    return seen
"""


def _asked(
    judge: Judge, task: PlusTask, problem: Problem, part: str, program: str, **changes: Any
) -> list[bytes]:
    """The encoded answers of a trusted program to all inputs of a part."""
    import marshal

    answers: list[bytes] = []

    def keep(index: int, data: bytes) -> bool:
        answers.append(data)
        return True

    inputs = tuple(marshal.dumps(tuple(v), 2) for v in task.inputs(problem.id, part))
    settings: dict[str, Any] = {"entry": problem.entry_point, "shape": "value", **changes}
    asked = Part(
        name=part, mode="calls", inputs=inputs, check=keep, cpu_seconds=900.0, call_seconds=900.0,
        memory_bytes=4 << 30,
        **settings,
    )  # fmt: skip
    ((_, outcome),) = judge.run([Case(key=problem.id, program=program, parts=(asked,))])
    if any(word in outcome.detail for word in ("MemoryError", "Unencodable")):
        raise MemoryError(outcome.detail)
    if outcome.status is not Status.PASSED:
        raise SystemExit(f"{problem.id} {part}: {outcome.status} {outcome.detail}")
    return answers


def part_row(judge: Judge, task: PlusTask, problem: Problem, part: str) -> dict[str, Any]:
    """Results and slow calls of one part."""
    if not task.inputs(problem.id, part):
        return {"results": [], "seconds": {}}
    exact: tuple[int, ...] = ()
    try:
        answers = _asked(judge, task, problem, part, problem.answer)
        long = [i for i, data in enumerate(answers) if _is_long(task, problem, data)]
        exact = _exact(judge, task, problem, part, long)
    except MemoryError:
        every = range(len(task.inputs(problem.id, part)))
        exact = _exact(judge, task, problem, part, every, allowed=_PLAIN | _NUMBERS)
    if exact:
        answers = _asked(judge, task, problem, part, problem.answer, exact=exact)
    times = _asked(judge, task, problem, part, problem.answer, exact=exact, shape="seconds")
    seconds = {i: round(decode(data) / judge.scale, 3) for i, data in enumerate(times)}
    return {
        "results": [_stored(task, problem, data) for data in answers],
        "seconds": {str(i): value for i, value in seconds.items() if value >= KNOWN_SECONDS},
    }


def _is_long(task: PlusTask, problem: Problem, data: bytes) -> bool:
    """Whether an answer is stored as a digest: long, and compared by equality only."""
    if data[:1] == b"D":
        return True
    return len(data) > KEPT_BYTES and not _is_special(task, problem) and not is_floats(decode(data))


def _is_special(task: PlusTask, problem: Problem) -> bool:
    own_rule = task.name == "mbpp_plus" and problem.entry_point in SET_TASKS | PRESENCE_TASKS
    return own_rule or bool(problem.extra["atol"])


def _exact(
    judge: Judge,
    task: PlusTask,
    problem: Problem,
    part: str,
    long: Sequence[int],
    allowed: frozenset[str] = _PLAIN,
) -> tuple[int, ...]:
    """Inputs whose long answer holds only texts, lists and tuples: a fast digest will do."""
    if not long:
        return ()
    wrapper = f"def _profile(*a):\n    return sorted(_kinds({problem.entry_point}(*a), set()))\n"
    program = f"{problem.answer}\n{_KINDS}\n{wrapper}"
    found = _asked(judge, task, problem, part, program, entry="_profile")
    kinds = [set(decode(data)) for data in found]
    return tuple(i for i in long if kinds[i] <= allowed)


def _stored(task: PlusTask, problem: Problem, data: bytes) -> str:
    if task.name == "mbpp_plus" and problem.entry_point in PRESENCE_TASKS:
        data = b"F" if decode(data) is None else b"T"
    elif data[:1] != b"D" and _is_long(task, problem, data):
        data = b"Dk" + data[:1] + canonical_digest(decode(data))
    return base64.b85encode(data).decode()


def write(task: PlusTask, judge: Judge, only: Sequence[str] = ()) -> None:
    """Write the task's file of expected results; with `only`, replace these problems' rows."""
    head = {"data_sha256": packaged.sha256(task.data), "probe_seconds": judge.probe_seconds}
    rows = packaged.rows(task.results) if only else [head]
    known = {row["task_id"]: row for row in rows[1:]}
    lines = [rows[0]]
    for problem in task.problems("test"):
        name = task.task_id(problem.id)
        if only and problem.id not in only:
            lines.append(known[name])
            continue
        row = {part: part_row(judge, task, problem, part) for part in ("base", "plus")}
        lines.append({"task_id": name, **row})
        slow = sum(sum(part["seconds"].values()) for part in row.values())
        print(problem.id, f"{slow:.1f} s" if slow else "", file=sys.stderr)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(text.encode())
    (packaged.FOLDER / task.results).write_bytes(packed.getvalue())
    print(task.results, len(packed.getvalue()), "bytes", file=sys.stderr)


def main() -> None:
    """Both tasks; or the task, or only the problems, named on the command line."""
    tasks: dict[str, PlusTask] = {"mbpp_plus": MbppPlus(), "humaneval_plus": HumanEvalPlus()}
    names = sys.argv[1:]
    with Judge(workers=1) as judge:
        for name, task in tasks.items():
            only = [text for text in names if text.startswith(f"{name}/")]
            if not names or name in names or only:
                write(task, judge, only)


if __name__ == "__main__":
    main()
