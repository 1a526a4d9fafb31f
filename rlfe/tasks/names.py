"""Which names a program binds at its top level, and which it uses. Pure functions on a tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs in the module's own scope."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _top_level(child)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement at any depth: few nodes beside all expressions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):  # the body of a lambda is an expression
                waiting += inner


def bound_names(tree: ast.Module) -> set[str]:
    """Names bound by def, class, assignment, import, loop, `with`, `except`, match, `global`."""
    names: set[str] = set()
    try:
        for node in _top_level(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                names.add(node.name)
        names.update(
            name
            for node in _statements(tree)
            if isinstance(node, ast.Global)
            for name in node.names
        )
    except RecursionError:
        return names
    return names


def used_names(tree: ast.Module) -> set[str]:
    """Names read anywhere in the program."""
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


_DYNAMIC = frozenset({"exec", "globals", "vars", "locals", "setattr", "__import__"})


def may_define(tree: ast.Module) -> bool:
    """Whether names may be bound in ways that only running it shows."""
    return bool(used_names(tree) & _DYNAMIC) or any(
        isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        for node in ast.walk(tree)
    )
