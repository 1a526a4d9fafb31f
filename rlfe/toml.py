"""TOML both ways: reading with line numbers, and writing.

The standard library reads TOML without telling where a key stood and does not write it. The line
finder is for messages only: where it finds nothing (inside an inline table) the caller names the
nearest line above. Try: `key_lines("[optim]\\nlr = 1e-6\\n")`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from rlfe.errors import RequestError

HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
ENTRY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
BARE = re.compile(r"[A-Za-z0-9_-]+")
EXPONENT = re.compile(r"e([+-])0+")  # Python writes 6e-06, people 6e-6
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")  # a text that --set takes without quotes
PLACE = re.compile(r"\s*\(at line (\d+), column \d+\)")


def read_toml(text: str, shown: str) -> dict[str, Any]:
    """Parse; `shown` is the file's name for the message.

    Raises:
        RequestError: `tiny.toml:3: not TOML: ...`.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = PLACE.search(str(error))
        line = place[1] if place else str(text.count("\n") + 1)
        reason = PLACE.sub("", str(error))
        twice = "Cannot overwrite" in reason or "twice" in reason
        raise RequestError(
            f"{shown}:{line}: {'a key is given twice' if twice else f'not TOML: {reason}'}",
            hint="Remove one of the two."
            if twice
            else "Texts need quotes; numbers look like 6e-6.",
        ) from None


def parse_key(text: str) -> tuple[str, ...]:
    """The parts of a dotted key: `parse_key('matrix."optim.lr"') == ("matrix", "optim.lr")`."""
    return tuple(part.strip("\"'") for part in PART.findall(text)) or (text,)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Key parts -> line number (from 1), for tables and for keys at the start of a line."""
    lines: dict[tuple[str, ...], int] = {}
    prefix: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header, entry = HEADER.match(line), ENTRY.match(line)
        if header:
            prefix = parse_key(header[1])
            lines.setdefault(prefix, number)
        elif entry:
            lines.setdefault((*prefix, *parse_key(entry[1])), number)
    return lines


def dumps(table: Mapping[str, Any]) -> str:
    """A table of tables as TOML; None is left out (absent means none), empty tables too."""
    return "\n".join(_table(table, ())).strip() + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {name: item for name, item in table.items() if not isinstance(item, Mapping)}
    lines = [f"{_key(name)} = {value(item)}" for name, item in plain.items() if item is not None]
    if lines and path:
        lines = ["", f"[{'.'.join(_key(part) for part in path)}]", *lines]
    for name, item in table.items():
        if isinstance(item, Mapping):
            lines += _table(item, (*path, name))
    return lines


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else _text(name)


def value(item: Any) -> str:
    """One value as TOML: `value(6e-6) == "6e-6"`."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int | float):
        return EXPONENT.sub(r"e\1", repr(item))
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, Mapping):
        inner = (f"{_key(name)} = {value(entry)}" for name, entry in item.items())
        return "{ " + ", ".join(inner) + " }"
    if isinstance(item, list | tuple):
        return "[" + ", ".join(value(entry) for entry in item) + "]"
    raise TypeError(f"{type(item).__name__} has no TOML form here")


def word(item: Any) -> str:
    """One value as it may stand after `--set KEY=`: simple texts without quotes."""
    plain = isinstance(item, str) and WORD.fullmatch(item)
    return item if plain and item not in ("true", "false", "inf", "nan") else value(item)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
