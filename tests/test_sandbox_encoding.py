"""The typed encoding: what is written comes back plain, what is forged is refused."""

from __future__ import annotations

import collections
import decimal
import fractions
import math
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.sandbox.encoding import Digest, Malformed, Opaque, canonical_digest, decode, type_name
from rlfe.sandbox.inside import wire
from rlfe.sandbox.inside.wire import Unencodable, encode

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
KEYS = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
        st.sets(KEYS, max_size=5),
        st.frozensets(KEYS, max_size=5),
    ),
    max_leaves=20,
)


class Pair(NamedTuple):
    left: int
    right: int


class Lying(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


@given(VALUES)
def test_equal_values_share_the_canonical_digest(value: Any) -> None:
    assert canonical_digest(value) == canonical_digest(decode(encode(value)))


def test_numbers_that_are_equal_are_written_alike_in_the_digest_only() -> None:
    assert canonical_digest([1, {2: 0}]) == canonical_digest([1.0, {2.0: False}])
    assert canonical_digest({1, 2, 3}) == canonical_digest(frozenset((3, 2, 1)))
    assert canonical_digest([1]) != canonical_digest((1,))
    assert encode(1) != encode(1.0)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (collections.Counter("aab"), collections.Counter("aab")),
        (collections.defaultdict(int, {1: 2}), {1: 2}),
        (collections.OrderedDict([(2, 1), (1, 2)]), {1: 2, 2: 1}),
        (collections.deque([1, 2]), collections.deque([1, 2])),
        (Pair(1, 2), (1, 2)),
        (fractions.Fraction(1, 3), fractions.Fraction(1, 3)),
        (decimal.Decimal("0.10"), decimal.Decimal("0.1")),
        (range(1, 9, 2), range(1, 9, 2)),
        ({"a": 1}.keys(), {"a"}),
        (bytearray(b"xy"), b"xy"),
        ("\ud800", "\ud800"),
        (1 << 7000, 1 << 7000),
    ],
)
def test_honest_values_of_the_library_compare_as_they_do(value: Any, plain: Any) -> None:
    assert decode(encode(value)) == plain


def test_a_subclass_is_read_as_its_base_and_marked() -> None:
    assert decode(encode(Lying(7))) == 7
    assert decode(encode(Lying(7))) != 8
    assert type_name(encode(Lying(7))) != type_name(encode(7))
    assert type_name(encode(Pair(1, 2))) != type_name(encode((1, 2)))


def test_numpy_numbers_are_read_as_python_numbers_and_marked() -> None:
    import numpy as np

    assert decode(encode(np.int64(5))) == 5
    assert decode(encode([np.float64(0.5)])) == [0.5]
    assert type_name(encode(np.float64(0.5))) != type_name(encode(0.5))
    assert decode(encode(np.array([3]))) == [3]
    assert isinstance(decode(encode(np.array([3, 4]))), Opaque)


def test_other_objects_are_opaque_and_equal_to_nothing() -> None:
    found = decode(encode(object()))
    assert isinstance(found, Opaque)
    assert found != decode(encode(object()))


@given(st.binary(max_size=60))
def test_forged_bytes_are_a_value_or_malformed_never_another_exception(data: bytes) -> None:
    try:
        decode(data)
    except Malformed:
        return


@given(VALUES, st.integers(min_value=1, max_value=5))
def test_cut_or_longer_bytes_are_refused(value: Any, count: int) -> None:
    data = encode(value)
    for changed in (data[:-count] if len(data) > count else b"", data + b"N" * count):
        with pytest.raises(Malformed):
            decode(changed)


@pytest.mark.parametrize(
    "data",
    [
        b"l\xff\xff\xff\xff",  # more elements than bytes
        b"i\x00\x00\x00\x02\x00\x05",  # an integer in long form
        b"d\x00\x00\x00\x02NNNN",  # a key twice
        b"S\x00\x00\x00\x01l\x00\x00\x00\x00",  # an element that cannot be hashed
        b"x\x01",
        b"D" + b"z" * 34,
        b"s\x00\x00\x00\x01\xff",
        encode("Fraction").join([b"x", b""]) + encode([1, 0]),
        encode("Decimal").join([b"x", b""]) + encode("1e9999999999"),
        encode("range").join([b"x", b""]) + encode([1, 2, 0]),
        b"l\x00\x00\x00\x01" * 5000 + b"N",  # too deep
    ],
)
def test_known_forgeries_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode(data)


def test_colliding_hashes_are_refused_in_no_time() -> None:
    prime = (1 << 61) - 1
    items = b"".join(encode(prime * i) for i in range(1, 30_000))
    data = b"S" + wire.COUNT.pack(29_999) + items
    started = time.process_time()
    with pytest.raises(Malformed, match="equal hashes"):
        decode(data)
    assert time.process_time() - started < 2


def test_cycles_depth_and_size_are_refused_by_the_encoder() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    for value in (cycle, deep, [[None] * 3_000_000] * 2, 1 << (1 << 25)):
        with pytest.raises(Unencodable):
            encode(value)


def test_a_long_answer_travels_as_a_digest() -> None:
    long = ["x" * 1000] * 2000
    found = decode(wire.result(long))
    assert isinstance(found, Digest)
    assert (found.kind, found.sha256) == ("k", canonical_digest(long))
    exact = decode(wire.result([("a", "b")] * 3, exact=True))
    assert isinstance(exact, Digest)
    assert exact.kind == "m"
    assert exact.sha256 == wire.exact_digest([("a", "b")] * 3)
    assert exact.sha256 != wire.exact_digest([("a", "c")] * 3)


def test_infinities_and_zeros_keep_their_bits() -> None:
    assert decode(encode(-math.inf)) == -math.inf
    assert math.copysign(1, decode(encode(-0.0))) == -1
    assert math.isnan(decode(encode(math.nan)))
