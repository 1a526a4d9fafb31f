"""Pieces of text for a card that cannot break its tables, headings or the reader's trust.

Try: `one_line("a | b") == "a \\\\| b"`.
"""

from __future__ import annotations

import re
from typing import Any

from rlfe.hub.cardfacts import rate_text


def one_line(text: str) -> str:
    """Text that cannot break a table or a heading."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{one_line(text)}`"


def count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def without_folders(text: str) -> str:
    """The text with absolute paths cut to their last part: a card names no machine's folders."""
    return re.sub(r"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:[/\\][\w .@+-]+)*[/\\]([\w.@+-]+)", r"\1", text)


def value_text(value: Any) -> str:
    if isinstance(value, float):
        return rate_text(value) if 0 < value < 1 else f"{value:g}"
    if value is None:
        return "-"
    return one_line("/".join(map(str, value)) if isinstance(value, tuple) else str(value))
