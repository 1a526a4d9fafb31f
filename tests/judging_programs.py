"""Programs to compare judges on: canonical ones, MBPP originals, and mutants of both.

What: a deterministic list of (evalplus task id, program) of honest programs, some right, some
wrong. What not: hostile ones, or slow tasks. Try: `len(parity_programs())`.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator

from rlfe.tasks import packaged
from rlfe.tasks.plus import HumanEvalPlus, MbppPlus

SLOW = frozenset((123, 255, 271, 300, 389, 392, 583, 589, 592, 599, 603, 630, 84, 138, 780, 290))
_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Div,
    ast.Div: ast.FloorDiv, ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def _mutations(tree: ast.Module) -> Iterator[ast.Module]:
    """Copies of the tree with one operator, constant or return changed."""
    count = sum(1 for _ in ast.walk(tree))
    for place in range(count):
        changed = copy.deepcopy(tree)
        node = list(ast.walk(changed))[place]
        if _change(node):
            yield ast.fix_missing_locations(changed)


def _change(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPS:
        node.op = _SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        node.ops[0] = _SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.Return) and node.value is not None:
        node.value = ast.Call(
            func=ast.Name("list" if isinstance(node.value, ast.Tuple) else "tuple", ast.Load()),
            args=[node.value],
            keywords=[],
        )
    else:
        return False
    return True


def _unended(program: str) -> bool:
    """Mutants of programs with `while` or recursion may never end: left to other tests."""
    return "while" in program


def mutants(program: str, wanted: int) -> list[str]:
    """Up to `wanted` mutants, spread over the program by a digest of their text."""
    if _unended(program):
        return []
    found = {ast.unparse(tree) for tree in _mutations(ast.parse(program))}
    return sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())[:wanted]


def parity_programs(per_task: int = 2) -> list[tuple[str, str]]:
    """At least 1,000 programs of MBPP+: canonical, MBPP's own reference, mutants."""
    task = MbppPlus()
    own = {
        row["task_id"]: row["code"].replace("\r\n", "\n") for row in packaged.rows("mbpp.jsonl.gz")
    }
    found: list[tuple[str, str]] = []
    for problem in task.problems("test"):
        number = int(problem.id.split("/")[1])
        if number in SLOW:
            continue
        name = task.task_id(problem.id)
        programs = [problem.answer, own[number], *mutants(problem.answer, per_task)]
        found += [(name, program) for program in programs]
    return found


def humaneval_programs() -> list[tuple[str, str]]:
    """Canonical programs of HumanEval+ that are quick, and a mutant of each."""
    task, found = HumanEvalPlus(), []
    for problem in task.problems("test"):
        if problem.id.split("/")[1] in ("15", "36", "59", "83", "100", "130", "139", "94", "25"):
            continue
        name = task.task_id(problem.id)
        found += [(name, p) for p in (problem.answer, *mutants(problem.answer, 1))]
    return found


def program_key(task_id: str, program: str) -> str:
    """Short digest under which the verdict on a program is recorded."""
    return hashlib.sha256(f"{task_id}\0{program}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
