"""The parent's side of the typed encoding: a strict decoder and equality on plain values.

What: bytes that a program may have forged become plain Python values or a `Malformed`. What not:
no object of the program's own making survives, so no method of it can run here. Building a set
or dict of hostile numbers could take quadratic time, so hash collisions are refused.
Try: `decode(encode([1, 2.5, "x"]))`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from rlfe.sandbox.inside.wire import COUNT, DOUBLE, MAX_DEPTH, canonical_digest, encode

__all__ = ["Digest", "Malformed", "Opaque", "canonical_digest", "decode", "encode"]
MAX_SAME_HASH = 64
_DECIMAL = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})(E[+-]?\d{1,6})?|[+-]?Infinity")


class Malformed(ValueError):
    """The bytes are no encoding: wrong tag, cut, trailing bytes, too deep."""


class Opaque:
    """A value that has no plain form; equal to nothing, itself excepted."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True)
class Digest:
    """An answer over 1 MiB: `kind` is m (exact) or k (canonical), `top` the outermost tag."""

    kind: str
    top: str
    sha256: bytes


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise Malformed("cut short")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def count(self) -> int:
        number: int = COUNT.unpack(self.take(4))[0]
        return number

    def items(self) -> int:
        number = self.count()
        if number > len(self.data) - self.at:  # every element takes a byte at least
            raise Malformed("more elements than bytes")
        return number

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH + 8:
            raise Malformed("too deep")
        tag = self.take(1)
        reader = _READERS.get(tag)
        if reader is None:
            raise Malformed("unknown tag")
        return reader(self, depth)

    def text(self) -> str:
        try:
            return self.take(self.count()).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Malformed("not a text") from None

    def name(self) -> str:
        if self.take(1) != b"s":
            raise Malformed("a name was expected")
        return self.text()

    def sequence(self, depth: int) -> list[Any]:
        value = self.value
        depth += 1
        return [value(depth) for _ in range(self.items())]

    def integer(self, depth: int) -> int:
        data = self.take(self.count())
        number = int.from_bytes(data, "big", signed=True)
        if len(data) != number.bit_length() // 8 + 1:
            raise Malformed("an integer in long form")
        return number

    def mapping(self, depth: int) -> dict[Any, Any]:
        pairs = [(self.value(depth + 1), self.value(depth + 1)) for _ in range(self.items())]
        _check_hashes([key for key, _ in pairs])
        built = dict(pairs)
        if len(built) != len(pairs):
            raise Malformed("a key stands twice")
        return built

    def elements(self, depth: int) -> set[Any]:
        items = self.sequence(depth)
        _check_hashes(items)
        return set(items)

    def marked(self, depth: int) -> Any:
        self.name()
        return self.value(depth + 1)

    def tagged(self, depth: int) -> Any:
        name = self.name()
        if name not in _TAGGED:
            raise Malformed("unknown tag name")
        try:
            return _TAGGED[name](self.value(depth + 1))
        except (TypeError, ValueError, ArithmeticError, InvalidOperation) as error:
            raise Malformed(f"not a {name}") from error


def _check_hashes(items: list[Any]) -> None:
    try:
        hashes = sorted(map(hash, items))
    except TypeError:
        raise Malformed("an element that cannot be hashed") from None
    for first, later in zip(hashes, hashes[MAX_SAME_HASH:], strict=False):
        if first == later:
            raise Malformed("too many equal hashes")


def _decimal(text: Any) -> Decimal:
    if not isinstance(text, str) or (text != "NaN" and not _DECIMAL.fullmatch(text)):
        raise Malformed("not a Decimal")
    return Decimal(text)


def _array1(parts: Any) -> Any:
    """An array of one element compares through it: `bool(array == expected)`."""
    _, values = parts
    return [values[0]] if len(parts[0]) else values[0]


def _pairs(rows: Any) -> list[tuple[Any, Any]]:
    _check_hashes([row[0] for row in rows])
    return [(key, value) for key, value in rows]


def _distinct(items: Any) -> dict[Any, None]:
    _check_hashes(items)
    return dict.fromkeys(items)


_TAGGED: Mapping[str, Callable[[Any], Any]] = {
    "OrderedDict": lambda rows: OrderedDict(_pairs(rows)),
    "Counter": lambda rows: Counter(dict(rows)),
    "bytearray": lambda data: bytearray(memoryview(data)),
    "range": lambda parts: range(*parts),
    "deque": lambda items: deque(list(items)),
    "Fraction": lambda parts: Fraction(*parts),
    "Decimal": _decimal,
    "elements": list,
    "dict_keys": lambda items: _distinct(items).keys(),
    "dict_items": lambda rows: dict(_pairs(rows)).items(),
    "array1": _array1,
}

_READERS: Mapping[bytes, Callable[[_Decoder, int], Any]] = {
    b"N": lambda coder, depth: None,
    b"T": lambda coder, depth: True,
    b"F": lambda coder, depth: False,
    b"i": _Decoder.integer,
    b"f": lambda coder, depth: DOUBLE.unpack(coder.take(8))[0],
    b"c": lambda coder, depth: complex(
        DOUBLE.unpack(coder.take(8))[0], DOUBLE.unpack(coder.take(8))[0]
    ),
    b"s": lambda coder, depth: coder.text(),
    b"b": lambda coder, depth: coder.take(coder.count()),
    b"l": _Decoder.sequence,
    b"t": lambda coder, depth: tuple(coder.sequence(depth)),
    b"S": _Decoder.elements,
    b"Z": lambda coder, depth: frozenset(coder.elements(depth)),
    b"d": _Decoder.mapping,
    b"u": _Decoder.marked,
    b"x": _Decoder.tagged,
    b"o": lambda coder, depth: Opaque(coder.name()),
}


def decode(data: bytes) -> Any:
    """The plain value, or a `Digest`; raises Malformed."""
    if data[:1] == b"D":
        if len(data) != 35 or data[1:2] not in (b"m", b"k"):
            raise Malformed("not a digest")
        return Digest(data[1:2].decode(), data[2:3].decode("latin-1"), data[3:])
    coder = _Decoder(data)
    try:
        value = coder.value(0)
    except RecursionError:
        raise Malformed("too deep") from None
    if coder.at != len(data):
        raise Malformed("trailing bytes")
    return value


def type_name(data: bytes) -> str:
    """What `type(value)` was, as a name that equals only for the same class."""
    if data[:1] in (b"u", b"x", b"o"):
        coder = _Decoder(data)
        coder.take(1)
        return f"{data[:1].decode()} {coder.name()}"
    return "TF" if data[:1] in (b"T", b"F") else data[:1].decode("latin-1")


def equal(left: Any, right: Any) -> bool:
    """`left == right` of plain values, False where the comparison itself fails."""
    try:
        return bool(left == right)
    except (RecursionError, ArithmeticError, ValueError, TypeError):
        return False
