"""GSM8K rule `gsm8k-exact v1` (`docs/judging.md` 8): which number a reply gives, and is it right.

What: pure functions on text. What not: no floats, no percent or scale guessing, no expression
is worked out. `strict` reads the `####` marker or the last box, `flexible` also running text; both
of lm-eval's filters stand beside them for comparison (EleutherAI/lm-evaluation-harness
lm_eval/tasks/gsm8k/gsm8k.yaml). Try: `answer("so #### 1,200 clips", mode="strict")`.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from math import gcd

RULE = "gsm8k-exact v1"
MAX_DIGITS = 60
Number = Decimal | Fraction

_MARKER = re.compile(r"#{4,}([^\n]*)")
_TURN = re.compile(r"^[ \t]*(?:Question|Q):", re.MULTILINE)
_HEADING = re.compile(
    r"[ \t*_]*(?:step|part|question|problem|example|case)\b[ \t]*\d*[ \t*_]*[:.]", re.I
)
_SAYS = re.compile(r"answer (?:is|was)\b:?|answer:", re.I)
_MINUS = "-"
_UNICODE_MINUS = str.maketrans({"−": "-", "﹣": "-", "－": "-", "⁻": "-"})
_SPACES = " \u00a0\u2009\u202f\u2007"


def normalise(text: str) -> str:
    """Full-width digits and signs as ASCII; one kind of minus; LF line ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_UNICODE_MINUS)
    if text.isascii():
        return text
    return "".join(
        unicodedata.normalize("NFKC", char) if "！" <= char <= "～" else char for char in text
    )


def visible(text: str) -> str | None:
    """The part of a reply that is searched; None where a thinking part was never closed."""
    for mark in ("think", "thinking"):
        head, closed, rest = text.rpartition(f"</{mark}>")
        if closed:
            opened = head.find(f"<{mark}>")
            text = (head[:opened] if opened >= 0 else "") + rest
        if f"<{mark}>" in text:
            return None
    for turn in _TURN.finditer(text):
        if any(char.isdigit() for char in text[: turn.start()]):
            return text[: turn.start()]
    return text


def answer(reply: str, *, mode: str) -> Number | None:
    """The number the reply gives in `strict` or `flexible` mode; None is no answer."""
    text = visible(normalise(reply))
    if text is None:
        return None
    marked = _marked(text)
    if marked is None:
        marked = _boxed(text)
    if marked is not None:
        return single_number(marked)
    if mode == "strict" or _open_box(text):
        return None
    return _running(text)


def gold(reference: str) -> Number | None:
    """The data set's number: what follows its last `#### `, commas removed."""
    text = normalise(reference.rpartition("####")[2]).strip().replace(",", "")
    return single_number(text) if text else None


def is_right(found: Number | None, wanted: Number | None) -> bool:
    """Equal by value; False where either is missing."""
    return found is not None and wanted is not None and Fraction(found) == Fraction(wanted)


# -- where the number stands


def _marked(text: str) -> str | None:
    """The rest of the line after the last marker that carries an answer."""
    found = None
    for match in _MARKER.finditer(text):
        rest = match[1]
        if any(char.isdigit() for char in rest) and not _HEADING.match(rest):
            found = rest
    return found


def _boxed(text: str) -> str | None:
    """What the last closed `\\boxed{...}` holds, braces balanced; one pass over the text."""
    found, start, depth, stack = None, 0, 0, []
    at = 0
    while at < len(text):
        char = text[at]
        if text.startswith("\\boxed", at):
            brace = at + 6
            while brace < len(text) and text[brace] == " ":
                brace += 1
            if brace < len(text) and text[brace] == "{":
                depth += 1
                stack.append((depth, brace + 1))
                at = brace + 1
                continue
        if char == "\\":
            at += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            if stack and stack[-1][0] == depth:
                start = stack.pop()[1]
                found = text[start:at]
            depth = max(0, depth - 1)
        at += 1
    return found


def _open_box(text: str) -> bool:
    """Whether the text breaks off inside a box."""
    last = text.rfind("\\boxed")
    return last >= 0 and text.find("{", last) >= 0 and _boxed(text[last:]) is None


def _running(text: str) -> Number | None:
    """The number of running text: after the last "answer is", else the last one."""
    said = [match.end() for match in _SAYS.finditer(text)]
    if said:
        line = text[said[-1] :].split("\n", 1)[0]
        numbers = _numbers(line.rpartition("=")[2]) or _numbers(line)
        if numbers:
            return numbers[0]
    numbers = _numbers(text, last_only=True)
    return numbers[-1] if numbers else None


# -- reading numbers

_RUNNING = re.compile(
    r"(?:(?<![0-9A-Za-z)\].])(?P<sign>[-+]))?[ ]?(?:\\?[$€£¥₹])?(?P<sign2>(?<=[$€£¥₹])-)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)


def _numbers(text: str, last_only: bool = False) -> list[Number]:
    """The numbers of running text, in order (the last line with one is enough for `last_only`)."""
    text = _unwrapped(text)
    found: list[Number] = []
    for line in reversed(text.split("\n")) if last_only else [text]:
        for match in _RUNNING.finditer(line):
            digits = match["digits"].replace("{", "").replace("}", "").replace(",", "")
            if sum(char.isdigit() for char in digits) > MAX_DIGITS:
                continue
            negative = match["sign"] == _MINUS or bool(match["sign2"])
            found.append(Decimal(("-" if negative else "") + digits))
        if found:
            return found
    return found


_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|mbox|operatorname)[ ]*\{([^{}]*)\}")
_LATEX_SPACE = re.compile(r"\\[!,;: ]|~|\\quad|\\qquad|\\left|\\right")
_FRACTION = re.compile(
    r"([+-]?)[ ]*\\[dt]?frac[ ]*\{[ ]*([+-]?)([0-9]{1,60})[ ]*\}[ ]*\{[ ]*([0-9]{1,60})[ ]*\}"
)
_SLASH = re.compile(r"([+-]?)([0-9]{1,60})[ ]?/[ ]?([0-9]{1,60})")


def _unwrapped(text: str) -> str:
    """Without markup around numbers: bold, code, math delimiters, LaTeX text and spaces."""
    text = _WORDS.sub(r" \1 ", text)
    text = _LATEX_SPACE.sub(" ", text.replace("\\!", "").replace("{,}", ","))
    text = text.replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\\#", "#")
    return re.sub(r"\*\*|__|`", "", text)


def single_number(text: str) -> Number | None:
    """The one number of a marker's or box's text; None for none, several, or an expression."""
    text = _unwrapped(text)
    if any(char.isdigit() and not "0" <= char <= "9" for char in text):
        return None
    if _FRACTION.search(text) or _SLASH.search(text):
        return _fraction(text)
    if "\\frac" in text:
        return None
    text = _grouped_blanks(_math_dollars(text))
    spans = [match.span() for match in re.finditer(r"[0-9]", text)]
    if not spans:
        return None
    return _only(text, spans[0][0], spans[-1][1])


def _math_dollars(text: str) -> str:
    """`$58$`: a pair of dollars around the number is math, not money."""
    match = re.fullmatch(r"(.*?)\$([^$]*[0-9][^$]*)\$(.*)", text, re.DOTALL)
    return f"{match[1]} {match[2]} {match[3]}" if match else text


def _grouped_blanks(text: str) -> str:
    """`3 410` with a blank, no-break or thin space between groups of three."""
    return re.sub(
        rf"(?<![0-9.,])[0-9]{{1,3}}(?:[{_SPACES}][0-9]{{3}})+(?![0-9])",
        lambda match: re.sub(rf"[{_SPACES}]", "", match[0]),
        text,
    )


def _only(text: str, first: int, last: int) -> Number | None:
    """The number if the digits from `first` to `last` are one, with its sign and currency."""
    start = first - 1 if first and text[first - 1] == "." else first
    exponent = re.search(r"[eE][+-]?[0-9]{1,2}$", text[start:last])
    body = text[start : last if not exponent else start + exponent.start()]
    if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?|[0-9]+(\.[0-9]+)?|\.[0-9]+", body):
        return None
    if sum(char.isdigit() for char in body) > MAX_DIGITS:
        return None
    before, after = text[:start], text[last:]
    sign = re.search(r"([+-])?[ ]?\\?[$€£¥₹]?[ ]?([+-])?$", before)
    assert sign is not None
    if _glued(before[: sign.start()] if sign[1] or sign[2] else before, sign, after):
        return None
    value = Decimal(body.replace(",", "") + (exponent[0] if exponent else ""))
    return -value if "-" in (sign[1], sign[2]) else value


def _glued(before: str, sign: re.Match[str], after: str) -> bool:
    """Whether the digits belong to something else: a word, a ratio, a clock time, a sum."""
    signed = sign[1] or sign[2]
    if signed and before[-1:].isalnum():
        return True
    tail = after.lstrip()
    return re.match(r"[0-9]", tail) is not None


def _fraction(text: str) -> Number | None:
    """An exact fraction that stands alone and in lowest terms, else None."""
    match = _FRACTION.search(text)
    if match:
        signs, upper, lower = match[1] + match[2], int(match[3]), int(match[4])
    else:
        match = _SLASH.search(text)
        assert match is not None
        signs, upper, lower = match[1], int(match[2]), int(match[3])
    around = text[: match.start()] + text[match.end() :]
    if any(char.isdigit() for char in around) or lower == 0 or gcd(upper, lower) != 1 or lower == 1:
        return None
    return Fraction(-upper if signs.count("-") == 1 else upper, lower)


# -- lm-eval's two filters, for comparison


_LM_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_LM_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def lm_eval_strict(reply: str) -> str | None:
    """lm-eval `strict-match`: the first `#### number`."""
    match = _LM_STRICT.search(reply)
    return match[1] if match else None


def lm_eval_flexible(reply: str) -> str | None:
    """lm-eval `flexible-extract`: the last run of digits, points, commas and dollars."""
    found = None
    for match in _LM_FLEXIBLE.finditer(reply):
        found = match[1] or match[2]
    return found


def lm_eval_match(found: str | None, reference: str) -> bool:
    """lm-eval's exact_match with its ignored patterns: commas, dollars, `#### `, a last point."""

    def clean(text: str) -> str:
        text = re.sub(r",|\$|(?s:.*#### )|\.$", "", text)
        return text.lower()

    return found is not None and clean(found) == clean(reference)
