"""The typed encoding of results (`docs/judging.md` 6.3): plain values to bytes, and their digest.

What: the encoder of the jail, and the constants that the parent's strict decoder
(`rlfe.sandbox.encoding`) shares. What not: no pickle, no repr, no decoding, no method of a
program's own classes: values of subclasses are read through the slots of the built-in type.
Try: `encode([1, 2.5, "x"])`.
"""

from __future__ import annotations

import marshal
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import hashlib

VERSION = 1  # of the encoding and the digests; part of every key under which verdicts are kept
MAX_DEPTH = 100  # containers inside containers
MAX_ITEMS = 4_000_000  # elements of one result, all levels together
PLAIN_BYTES = 1 << 20  # a longer encoding travels as a digest
MAX_INT_BITS = 1 << 24
_PIECE = 4096  # elements written at a time
COUNT = struct.Struct(">I")
DOUBLE = struct.Struct(">d")
_PAIR = struct.Struct(">dd")


class Listed(list[Any]):
    """The elements of a value that is no list itself."""


class Unencodable(Exception):
    """The value has no encoding: a cycle, too deep, too many elements."""


def _sized(tag: bytes, data: bytes) -> bytes:
    return tag + COUNT.pack(len(data)) + data


def _int(value: int) -> bytes:
    bits = int.bit_length(value)
    if bits > MAX_INT_BITS:
        raise Unencodable("an integer is too long")
    return _sized(b"i", int.to_bytes(value, bits // 8 + 1, "big", signed=True))


_SMALL = {number: _int(number) for number in range(-256, 2048)}
_CONSTANT = {None: b"N", True: b"T", False: b"F"}


def _text(value: str) -> bytes:
    return _sized(b"s", str.encode(value, "utf-8", "surrogatepass"))


class _Texts(dict[str, bytes]):
    """The encodings of short texts that came before: lists of combinations repeat theirs."""

    def __missing__(self, value: str) -> bytes:
        data = _text(value)
        if len(self) < 4096:
            self[value] = data
        return data


_KNOWN = _Texts()


class _Encoder:
    """Writes one value; `canonical` writes equal values alike (digest only)."""

    def __init__(self, canonical: bool) -> None:
        self.parts: list[bytes] = []
        self.items = 0
        self.canonical = canonical

    def put(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is int:
            small = _SMALL.get(value)
            self.parts.append(small if small is not None else _int(value))
        elif kind is str:
            self.parts.append(_KNOWN[value] if len(value) < 64 else _text(value))
        elif value is None or value is True or value is False:
            self._constant(value)
        elif kind is float:
            self._float(value)
        elif kind is list or kind is tuple:
            self._sequence(b"l" if kind is list else b"t", value, depth)
        else:
            writer = _WRITERS.get(kind)
            if writer is not None:
                writer(self, value, depth)
            else:
                self._foreign(kind, value, depth)

    def _constant(self, value: Any) -> None:
        if self.canonical and value is not None:
            self.parts.append(_SMALL[1 if value else 0])
        else:
            self.parts.append(_CONSTANT[value])

    def _float(self, value: float) -> None:
        if self.canonical and value == value and value not in _INFINITE and value.is_integer():
            self.parts.append(_int(int(value)))
        else:
            self.parts.append(b"f" + DOUBLE.pack(value))

    def _complex(self, value: complex, depth: int) -> None:
        if self.canonical and value.imag == 0:
            self._float(value.real)
        else:
            self.parts.append(b"c" + _PAIR.pack(value.real, value.imag))

    def _bytes(self, value: bytes, depth: int) -> None:
        self.parts.append(_sized(b"b", value))

    def _enter(self, count: int, depth: int) -> None:
        self.items += count
        if depth > MAX_DEPTH or self.items > MAX_ITEMS:
            raise Unencodable("too deep or too many elements")

    def _sequence(self, tag: bytes, value: Any, depth: int) -> None:
        count = len(value)
        self._enter(count, depth)
        self.parts.append(tag + COUNT.pack(count))
        put = self.put
        depth += 1
        for item in value:
            put(item, depth)

    def _set(self, value: Any, depth: int) -> None:
        tag = b"Z" if type(value) is frozenset and not self.canonical else b"S"
        items = list(set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value))
        self._unordered(tag, [(item,) for item in items], depth)

    def _dict(self, value: Any, depth: int) -> None:
        self._unordered(b"d", list(dict.items(value)), depth)

    def _unordered(self, tag: bytes, rows: list[Any], depth: int) -> None:
        self._enter(len(rows), depth)
        self.parts.append(tag + COUNT.pack(len(rows)))
        if not self.canonical:
            for row in rows:
                for item in row:
                    self.put(item, depth + 1)
            return
        written = []
        for row in rows:
            start = len(self.parts)
            for item in row:
                self.put(item, depth + 1)
            written.append(b"".join(self.parts[start:]))
            del self.parts[start:]
        self.parts.extend(sorted(written))

    def tagged(self, name: str, value: Any, depth: int) -> None:
        self._enter(1, depth)
        self.parts.append(b"x" + _text(name))
        self.put(value, depth + 1)

    def marked(self, kind: type, value: Any, depth: int) -> None:
        """A subclass or a numpy scalar, as its base value; the class name follows the mark."""
        if not self.canonical:
            self.parts.append(b"u" + _text(class_name(kind)))
        self._enter(1, depth)
        self.put(value, depth + 1)

    def _foreign(self, kind: type, value: Any, depth: int) -> None:
        for base, plain in _BASES:
            if issubclass(kind, base):
                return self.marked(kind, plain(value), depth)
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, numpy.generic):
            return self.marked(kind, numpy.generic.item(value), depth)
        if numpy is not None and issubclass(kind, numpy.ndarray) and value.size == 1:
            return self.tagged("array1", [list(value.shape), value.reshape(-1).tolist()], depth)
        if _is_from("decimal", "Decimal", kind):
            return self.tagged("Decimal", str(value), depth)
        if _is_from("fractions", "Fraction", kind):
            return self.tagged("Fraction", [value.numerator, value.denominator], depth)
        self.parts.append(b"o" + _text(class_name(kind)))


def _is_from(module: str, name: str, kind: type) -> bool:
    """Whether a class is that one, if its module is loaded: loading it makes every fork dearer."""
    return getattr(sys.modules.get(module), name, None) is kind


def class_name(kind: type) -> str:
    name = type.__dict__["__name__"].__get__(kind)
    return str.__str__(name)[:80]


_INFINITE = (float("inf"), float("-inf"))

_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda value: int.__add__(value, 0)),
    (float, lambda value: float.__pos__(value)),
    (complex, lambda value: complex.__pos__(value)),
    (str, lambda value: str.__getitem__(value, slice(None))),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (list, lambda value: list(list.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
)

_WRITERS: dict[type, Callable[[_Encoder, Any, int], None]] = {
    complex: _Encoder._complex,
    bytes: _Encoder._bytes,
    set: _Encoder._set,
    frozenset: _Encoder._set,
    dict: _Encoder._dict,
    OrderedDict: lambda coder, value, depth: coder.tagged(
        "OrderedDict", [list(row) for row in dict.items(value)], depth
    ),
    defaultdict: lambda coder, value, depth: coder.marked(
        defaultdict, dict(dict.items(value)), depth
    ),
    Counter: lambda coder, value, depth: coder.tagged("Counter", dict(dict.items(value)), depth),
    Listed: lambda coder, value, depth: coder.tagged("elements", list(value), depth),
    bytearray: lambda coder, value, depth: coder.tagged("bytearray", bytes(value), depth),
    range: lambda coder, value, depth: coder.tagged(
        "range", [value.start, value.stop, value.step], depth
    ),
    deque: lambda coder, value, depth: coder.tagged("deque", list(value), depth),
    type({}.keys()): lambda coder, value, depth: coder.tagged("dict_keys", list(value), depth),
    type({}.items()): lambda coder, value, depth: coder.tagged("dict_items", list(value), depth),
}


def encode(value: Any, *, canonical: bool = False) -> bytes:
    """The encoding of a value; raises Unencodable (also for a value that recurses)."""
    coder = _Encoder(canonical)
    try:
        coder.put(value, 0)
    except RecursionError:
        raise Unencodable("too deep") from None
    return b"".join(coder.parts)


# The short way for most answers; a class that pretends to be one of these fails in the writer.
_PLAIN: dict[type, Callable[[Any], bytes]] = {
    int: lambda value: _SMALL.get(value) or _int(value),
    bool: _CONSTANT.__getitem__,
    type(None): _CONSTANT.__getitem__,
    str: _text,
    float: lambda value: b"f" + DOUBLE.pack(value),
}


def _sha256(data: bytes) -> hashlib._Hash:
    import hashlib  # when needed: its libraries make every fork dearer

    return hashlib.sha256(data)


def canonical_digest(value: Any) -> bytes:
    """sha256 that equal values share: sets and dicts sorted, 1 and 1.0 and True alike."""
    return _sha256(encode(value, canonical=True)).digest()


def exact_digest(value: Any) -> bytes:
    """sha256 of the marshal bytes, long lists in pieces: many times faster.

    Format version 2 has no references and no interning, so equal texts are written alike. Equal
    numbers of different types are not.
    """
    try:
        if type(value) is not list and type(value) is not tuple:
            return _sha256(marshal.dumps(value, 2)).digest()
        digest = _sha256(COUNT.pack(len(value)))
        for start in range(0, len(value), _PIECE):
            digest.update(marshal.dumps(value[start : start + _PIECE], 2))
    except ValueError:  # not a plain value
        return b""
    return digest.digest()


def result(value: Any, *, exact: bool = False, digest_only: bool = False) -> bytes:
    """What the child sends for a value: its encoding, or a digest where that is over 1 MiB.

    A digest reads `D`, kind of digest (`m` exact, `k` canonical), top tag, sha256. `exact` and
    `digest_only` ask for one whatever the length, where a long answer is expected.
    """
    plain = _PLAIN.get(type(value))
    if plain is not None and not exact and not digest_only:
        data = plain(value)
        if len(data) <= PLAIN_BYTES:
            return data
    if exact:
        digest = exact_digest(value)
        if digest:
            return b"Dm" + (b"l" if type(value) is list else b"t") + digest
    if digest_only:
        return b"Dk" + (b"l" if type(value) is list else b"t") + canonical_digest(value)
    encoded = encode(value)
    if len(encoded) <= PLAIN_BYTES:
        return encoded
    return b"D" + b"k" + encoded[:1] + canonical_digest(value)
