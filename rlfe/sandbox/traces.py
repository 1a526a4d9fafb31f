"""Whether a part of a program can have left something behind in its process.

What: a look at the program's source. The parts of a case run in one process; where an earlier one
may have changed something there, a later one that failed is run again by itself
(`pool.py`). Not a protection: a program that hides what it does harms its own verdict only.
Try: `leaves_nothing("def f(x):\\n    return x\\n")`.
"""

from __future__ import annotations

import ast
import re
import warnings

NAME = "<judged program>"
# Modules whose functions change nothing but what they are given.
HARMLESS = frozenset({
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "re",
    "string", "typing",
})  # fmt: skip
# Ways to a module's or a class's insides, to files, and to code that cannot be read here.
REACHING = frozenset({
    "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "input", "locals",
    "open", "setattr", "vars",
})  # fmt: skip


def leaves_nothing(program: str) -> bool:
    """Whether all that the program can change is its own namespace; False if in doubt."""
    try:
        nodes = ast.walk(ast.parse(program, NAME))
        return not any(_reaches(node) for node in nodes)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def keep_quiet() -> None:
    """Let nobody be warned of a judged program's odd escapes; once, before threads look at one."""
    warnings.filterwarnings("ignore", module=re.escape(NAME))


def _reaches(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(_root(alias.name) not in HARMLESS for alias in names)
        case ast.ImportFrom(module=module):
            return _root(module or "") not in HARMLESS
        case ast.Attribute(attr=name, ctx=use):
            return name.startswith("_") or not isinstance(use, ast.Load)
        case ast.Name(id=name):
            return name in REACHING or name.startswith("__")
        case ast.ExceptHandler():  # it can answer to memory that an earlier part has not freed
            return True
    return False


def _root(module: str) -> str:
    return module.partition(".")[0]
