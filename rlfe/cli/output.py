"""The only place that prints. Data goes to stdout, words to stderr.

Not here: what is said. A bar moves on a terminal only; elsewhere a label once, then a plain line
every 30 seconds. Try: `rlfe runs --json | head`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlfe.errors import RlfeError

PLAIN_SECONDS = 30.0  # between two progress lines where there is no terminal


class ReaderGoneError(Exception):
    """Whoever read stdout (head, less) has enough; `cli/main.py` ends quietly with 0."""


@dataclass(slots=True)
class _Talk:
    quiet: bool = False
    verbose: bool = False
    color: bool = True
    mute: bool = False


_talk = _Talk()


def configure(
    *,
    quiet: bool | None = None,
    verbose: bool | None = None,
    color: bool | None = None,
    mute: bool | None = None,
) -> None:
    """Set by `cli/main.py` and by -q and -v: quiet silences notes, hints and progress.

    `mute` silences everything: another process speaks. None leaves a setting as it is.
    """
    _talk.mute = _talk.mute if mute is None else mute
    _talk.quiet = _talk.quiet if quiet is None else quiet
    _talk.verbose = _talk.verbose if verbose is None else verbose
    _talk.color = _talk.color if color is None else color


def flags() -> list[str]:
    """The options of a command that talks as this one does."""
    return [flag for flag, on in (("-q", _talk.quiet), ("-v", _talk.verbose)) if on]


def result(text: str) -> None:
    """The command's result, to stdout."""
    if _talk.mute:
        return
    try:
        print(text, file=sys.stdout, flush=True)
    except BrokenPipeError as problem:
        raise ReaderGoneError from problem


def document(obj: Any) -> None:
    """One JSON document to stdout; NaN and infinity become null."""
    from rlfe.records import plain

    result(json.dumps(plain(obj), indent=2, ensure_ascii=False, allow_nan=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any] | Mapping[str, Any]]) -> None:
    """An aligned table to stdout; numbers to the right. Rows are sequences, or maps by column."""
    result(table_text(columns, rows))


def table_text(columns: Sequence[str], rows: Sequence[Sequence[Any] | Mapping[str, Any]]) -> str:
    """The lines of `table`."""
    cells = [[_cell(item) for item in _items(columns, row)] for row in rows]
    raw = [_items(columns, row) for row in rows]
    right = [
        any(_is_number(row[place]) for row in raw)
        and all(row[place] is None or _is_number(row[place]) for row in raw)
        for place in range(len(columns))
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [list(columns), *cells]
    ]
    return "\n".join(lines)


def _items(columns: Sequence[str], row: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    return [row.get(name) for name in columns] if isinstance(row, Mapping) else list(row)


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def _cell(item: Any) -> str:
    if item is None:
        return "-"
    if isinstance(item, bool):
        return "yes" if item else "no"
    return f"{item:.4g}" if isinstance(item, float) else str(item)


def note(text: str) -> None:
    """Words about what goes on, to stderr."""
    if not _talk.quiet and not _talk.mute:
        print(text, file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """Words that only -v shows, to stderr."""
    if _talk.verbose and not _talk.mute:
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A warning, to stderr; -q does not silence it."""
    if not _talk.mute:
        print(_paint("33", f"warning: {text}"), file=sys.stderr, flush=True)


def hint(text: str) -> None:
    """The next command or step, to stderr: `hint("Next: rlfe eval --ckpt-glob 'runs/x/*'")`."""
    if not _talk.quiet and not _talk.mute:
        print(_paint("2", text), file=sys.stderr, flush=True)


def error(problem: RlfeError) -> None:
    """What went wrong and what to do, to stderr."""
    if _talk.mute:
        return
    print(_paint("31", f"error: {problem.what}"), file=sys.stderr, flush=True)
    if problem.hint:
        print(problem.hint, file=sys.stderr, flush=True)


def _paint(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if _talk.color and sys.stderr.isatty() else text


class Progress(Protocol):
    """What `progress` yields."""

    def advance(self, n: int = 1, text: str | None = None) -> None:
        """`n` more are done; `text` is shown beside the count."""
        ...


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Progress]:
    """A bar on a terminal; else the label once and a plain line every 30 s. On stderr."""
    if _talk.quiet or _talk.mute:
        yield _Silent()
    elif sys.stderr.isatty():
        with _bar(label, total) as bar:
            yield bar
    else:
        print(f"{label}: 0/{total}", file=sys.stderr, flush=True)
        yield _Plain(label, total)


class _Silent:
    def advance(self, n: int = 1, text: str | None = None) -> None:
        return None


class _Plain:
    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.start = self.said = time.monotonic()

    def advance(self, n: int = 1, text: str | None = None) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.said < PLAIN_SECONDS:
            return
        self.said = now
        spent, more = now - self.start, f" {text}" if text else ""
        line = f"{self.label}: {self.done}/{self.total} after {spent:.0f} s{more}"
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(label: str, total: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True, no_color=not _talk.color)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with RichProgress(*columns, console=console) as bar:
        task = bar.add_task(label, total=total, text="")

        class Bar:
            def advance(self, n: int = 1, text: str | None = None) -> None:
                if text is not None:
                    bar.update(task, text=text)
                bar.advance(task, n)

        yield Bar()
