"""From a reply to the program that is run (`docs/judging.md` 3).

What: total and pure; any text gives a program or none, never an exception, with a bounded number
of parses. What not: nothing is renamed, reordered or repaired; only prose around the code, the
model's own top-level asserts and a cut-off end are left out.
Try: `extract("Sure!\\n```python\\ndef f(): return 1\\n```", entry_point="f").program`.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

from rlfe.tasks.names import bound_names, may_define, used_names

MAX_PARSES = 10  # of one piece of text, while looking for its longest parsing prefix
MAX_BLOCKS = 60
MAX_STARTS = 4  # places tried where code may begin after prose
_LANGUAGE = re.compile(r"[A-Za-z0-9_+#.\-]*")
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^\n]*)")
_PYTHON = frozenset({"", "python", "py", "python3", "py3", "python2", "ipython", "sage"})
_START = re.compile(
    r"(?:async\s+def|def|class|import|from|@)\s*[\w.]|[A-Za-z_][\w.\[\]'\", ]*\s*=[^=]"
)
_THINK = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """What was found. `program` is "" where the reply holds none."""

    program: str
    had_fence: bool = False
    was_cut: bool = False  # to the longest prefix that parses


@dataclass(frozen=True)
class _Block:
    """A piece of text that may be code: its text as kept, and its tree if it parses."""

    text: str
    tree: ast.Module | None
    language: str = ""
    was_cut: bool = False

    @cached_property
    def names(self) -> set[str]:
        return set() if self.tree is None else bound_names(self.tree)

    def defines(self, name: str) -> bool:
        return name in self.names


NOTHING = _Block("", None)


def extract(
    text: str,
    *,
    entry_point: str,
    continues_code: bool = False,
    prefix: str = "",
    stop: Sequence[str] = (),
) -> Extraction:
    """The program in a reply.

    Args:
        text: The reply, without the prompt.
        entry_point: Name that the tests call; "" if the program is a script.
        continues_code: The prompt ended inside code (an open fence, or a completion prompt).
        prefix: Code of the prompt that belongs in front of the program.
        stop: Stop strings of the prompt format; text from one on is not code.
    """
    text = normalise(text)
    visible = without_thinking(text)
    if visible is None:
        return Extraction(program="")
    found = None
    if continues_code and not _FENCE.match(visible.lstrip("\n")):
        found = _continued(visible, entry_point, prefix, stop)
    if found is None:
        found = _replied(visible, entry_point, prefix, stop)
    return replace(found, had_fence=_has_fence(visible))


def normalise(text: str) -> str:
    """Line ends as LF, no byte-order mark."""
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")


def without_thinking(text: str) -> str | None:
    """The text without closed thinking parts; None if one was never closed."""
    for mark in ("think", "thinking"):
        opened, closed = f"<{mark}>", f"</{mark}>"
        if closed in text and opened not in text.split(closed)[0]:
            text = text.split(closed, 1)[1]  # the chat template opened it
    if "<think" not in text:
        return text
    text = _THINK.sub("", text)
    return None if re.match(r"\s*<think(?:ing)?>", text) else text


def _has_fence(text: str) -> bool:
    return any(_FENCE.match(line) for line in text.split("\n"))


def _continued(text: str, entry: str, prefix: str, stop: Sequence[str]) -> Extraction | None:
    """The text starts as code and ends at its first fence line; None if that gives no program."""
    lines = _cut_at_stops(text, stop).split("\n")
    fence = next((i for i, line in enumerate(lines) if _is_fence(line)), len(lines))
    code = "\n".join(lines[:fence])
    whole = _longest(prefix + code, floor=prefix.count("\n"))
    if whole.defines(entry) or (not entry and whole.tree):
        return _finish(whole)
    if fence < len(lines):
        return None  # prose and fences after all
    plain = _plain(text, entry, stop)
    if plain.defines(entry):
        return _finish(plain)
    return _finish(whole if whole.tree is not None else _Block(prefix + code, None), entry)


def _replied(text: str, entry: str, prefix: str, stop: Sequence[str]) -> Extraction:
    """A reply with or without fences."""
    blocks = _blocks(text)
    if not blocks:
        return _finish(_plain(text, entry, stop), entry)
    if not entry:
        return _finish(next((b for b in reversed(blocks) if _is_python(b)), NOTHING))
    last = next((i for i in reversed(range(len(blocks))) if blocks[i].defines(entry)), None)
    if last is not None:
        return _finish(_with_helpers(blocks, last, entry))
    before = _plain(text[: _first_fence(text)], entry, stop)
    if before.defines(entry):
        return _finish(before)
    broken = next(
        (b for b in reversed(blocks) if b.tree is None and _mentions(b.text, entry)), None
    )
    if broken is not None:
        return Extraction(program=broken.text)
    joined = "\n".join(block.text for block in blocks if _is_python(block))
    return _finish(_parsed(joined), entry)


def _finish(block: _Block, entry: str = "") -> Extraction:
    """Without the model's own asserts; no program where the entry point is defined by no means."""
    if block.tree is None:
        keeps = block.text.strip() and (not entry or _mentions(block.text, entry))
        return Extraction(program=block.text if keeps else "")
    if entry and not block.defines(entry) and not may_define(block.tree):
        return Extraction(program="")
    return Extraction(program=_without_asserts(block.text, block.tree), was_cut=block.was_cut)


def _mentions(text: str, entry: str) -> bool:
    name = re.escape(entry)
    return (
        re.search(rf"(?m)^\s*(?:(?:async\s+)?def|class)\s+{name}\b|^{name}\s*=", text) is not None
    )


def _is_python(block: _Block) -> bool:
    return block.tree is not None and block.language.lower() in _PYTHON


# -- fences


def _is_fence(line: str) -> bool:
    match = _FENCE.fullmatch(line)
    return match is not None and match[2][0] not in match[3]


def _first_fence(text: str) -> int:
    position = 0
    for line in text.split("\n"):
        if _is_fence(line):
            return position
        position += len(line) + 1
    return position


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks in order, each cut to what parses."""
    lines, at = text.split("\n"), 0
    bare = _bare_fences(lines)
    blocks: list[_Block] = []
    while at < len(lines) and len(blocks) < MAX_BLOCKS:
        if not _is_fence(lines[at]):
            at += 1
            continue
        block, at = _block(lines, bare, at)
        blocks.append(block)
    return blocks


def _bare_fences(lines: list[str]) -> list[tuple[int, re.Match[str]]]:
    """The lines that may close a block, with their match; looked for once for all blocks."""
    matches = ((index, _FENCE.fullmatch(line)) for index, line in enumerate(lines))
    return [(index, match) for index, match in matches if match and not match[3].strip()]


def _block(
    lines: list[str], bare: list[tuple[int, re.Match[str]]], opener: int
) -> tuple[_Block, int]:
    """The block that a fence line opens, and the line after it."""
    match = _FENCE.fullmatch(lines[opener])
    assert match is not None
    rest = match[3].strip()
    is_word = _LANGUAGE.fullmatch(rest) is not None or ("=" not in rest and "{" in rest)
    head = [] if is_word or not rest else [rest]
    language = rest.split("{")[0].strip() if is_word else ""
    ends = _closings(bare, opener + 1, match) or [len(lines)]
    for end in ends[:4]:
        body = _dedented(head + lines[opener + 1 : end], len(match[1]))
        found = _parsed(body)
        if found.tree is not None:
            return replace(found, language=language), end + 1
    end = ends[0]
    inner = next((i for i in range(opener + 1, end) if _opens(lines[i])), None)
    if inner is not None:  # a block that was never closed before the next one
        end = inner - 1
    body = _dedented(head + lines[opener + 1 : end + (inner is not None)], len(match[1]))
    return replace(_longest(body), language=language), end + 1


def _closings(
    bare: list[tuple[int, re.Match[str]]], start: int, opener: re.Match[str]
) -> list[int]:
    """Up to four lines that may close the block, nearest first."""
    found = []
    for index, match in bare[bisect_left(bare, start, key=itemgetter(0)) :]:
        closes = match[2][0] == opener[2][0] and len(match[2]) >= len(opener[2])
        if closes and len(match[1]) <= len(opener[1]):
            found.append(index)
            if len(found) == 4:
                break
    return found


def _opens(line: str) -> bool:
    match = _FENCE.fullmatch(line)
    return match is not None and match[3].strip().lower() in _PYTHON - {""}


def _dedented(lines: list[str], indent: int) -> str:
    if indent:
        lines = [line[min(indent, len(line) - len(line.lstrip())) :] for line in lines]
    return "\n".join(lines)


def _with_helpers(blocks: list[_Block], last: int, entry: str) -> _Block:
    """The block, with earlier ones in front that define names it uses."""
    if last == 0:
        return blocks[0]
    chosen = [blocks[last]]
    tree = blocks[last].tree
    assert tree is not None
    missing = used_names(tree) - blocks[last].names
    for block in reversed(blocks[:last]):
        if block.tree is None or block.defines(entry):
            continue
        offered = block.names
        if offered & missing:
            missing = (missing | used_names(block.tree)) - offered
            chosen.insert(0, block)
    if len(chosen) == 1:
        return blocks[last]
    joined = _parsed("\n\n".join(block.text for block in chosen))
    return joined if joined.tree is not None else blocks[last]


# -- text without fences


def _plain(text: str, entry: str, stop: Sequence[str]) -> _Block:
    """The longest parsing prefix that defines the entry point, from the start or after prose."""
    text = _cut_at_stops(text, (*stop, "[DONE]"))
    text = re.sub(r"^\s*\[BEGIN\][ \t]*\n?", "", text)
    first = _longest(text)
    if first.defines(entry) or (not entry and first.tree is not None and first.text.strip()):
        return first
    lines = text.split("\n") if entry in text else []
    starts = [i for i, line in enumerate(lines) if _START.match(line)]
    named = [i for i in starts if _mentions(lines[i], entry)] if entry else []
    for start in dict.fromkeys([*starts[:MAX_STARTS], *named[:1], *named[-1:]]):
        block = _longest("\n".join(lines[start:]))
        if block.defines(entry) or (not entry and block.text.strip()):
            return replace(block, was_cut=True)
    if first.tree is not None and first.text.strip() and may_define(first.tree):
        return first
    return _Block("\n".join(lines[named[0] :]) if named else "", None)


def _cut_at_stops(text: str, stop: Sequence[str]) -> str:
    for mark in stop:
        place = text.find(mark)
        if place >= 0:
            text = text[:place]
    return text


# -- parsing


def parse(text: str) -> tuple[ast.Module | None, int]:
    """(tree, 0), or (None, number of the line that does not parse; 0 if no line is to blame)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text), 0
    except SyntaxError as error:
        return None, error.lineno or 0
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return None, 0


def _parsed(text: str) -> _Block:
    return _Block(text, parse(text)[0])


def _longest(text: str, floor: int = 0) -> _Block:
    """The longest prefix by lines that parses, found by jumping to the line of the error."""
    lines = text.split("\n")
    end = len(lines)
    for _ in range(MAX_PARSES):
        body = "\n".join(lines[:end])
        tree, line = parse(body)
        if tree is not None:
            return _Block(body, tree, was_cut=end < len(lines))
        if line == 0:
            break
        end = min(line, end) - 1
        while end > floor and not lines[end - 1].strip():
            end -= 1
        if end <= floor:
            break
    return _by_statements(lines, end, floor)


def _by_statements(lines: list[str], end: int, floor: int) -> _Block:
    """The last resort of bounded work: cut before the last lines that start a statement."""
    tops = [i for i in range(max(floor, 1), min(end, len(lines))) if lines[i][:1].strip()]
    for cut in tops[:-4:-1]:
        block = _parsed("\n".join(lines[:cut]))
        if block.tree is not None:
            return replace(block, was_cut=True)
    return _Block("\n".join(lines), None)


def _without_asserts(text: str, tree: ast.Module) -> str:
    """The text with top-level asserts blanked out; every other character stays."""
    if not any(isinstance(node, ast.Assert) for node in tree.body):
        return text
    lines = [line.encode("utf-8", "surrogatepass") for line in text.split("\n")]
    for node in reversed(tree.body):
        if isinstance(node, ast.Assert):
            _blank(lines, node)
    return b"\n".join(lines).decode("utf-8", "surrogatepass")


def _blank(lines: list[bytes], node: ast.Assert) -> None:
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset or 0 :]
    alone = not before.strip() and not after.strip().strip(b";")
    lines[first : last + 1] = [b"" if alone else before + b"pass" + after] + [b""] * (last - first)
