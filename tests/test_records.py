"""Records: a kill leaves at most one cut line, and a full disk leaves the file as it was."""

import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe import records
from rlfe.errors import RlfeError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def test_the_json_text_is_sorted_and_has_null_for_nan():
    value = {"b": math.nan, "a": [np.float32(0.5), np.int64(3), math.inf], "c": np.arange(2)}
    assert records.canonical_json(value) == '{"a":[0.5,3,null],"b":null,"c":[0,1]}'


@given(json_values)
def test_the_json_text_of_a_read_back_text_is_the_same(value):
    text = records.canonical_json(value)
    assert records.canonical_json(records.parse_lines(text.encode(), None)[0]) == text


def test_appended_records_read_back_in_order(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for step in (1, 2, 3):
        records.append_jsonl(path, {"step": step})
    assert records.read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n{"step":3}\n'


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_cut_last_line_is_dropped_in_reading_and_removed_by_the_next_append(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + b'{"step":2}'[:cut])
    whole = cut == 10  # only the line's end was lost: the record is there
    kept = [{"step": 1}, {"step": 2}] if whole else [{"step": 1}]
    assert records.read_jsonl(path) == kept
    records.append_jsonl(path, {"step": 9})
    assert records.read_jsonl(path) == [*kept, {"step": 9}]


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(RlfeError, match=r"metrics\.jsonl:2: not a JSON line"):
        records.read_jsonl(path)


def test_a_missing_file_has_no_records(tmp_path):
    assert records.read_jsonl(tmp_path / "none.jsonl") == []


def test_cutting_after_a_step_drops_later_records_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3, 4):
        records.append_jsonl(path, {"step": step})
    assert records.cut_after(path, 2) == 2
    assert records.read_jsonl(path) == [{"step": 1}, {"step": 2}]
    assert records.cut_after(tmp_path / "none.jsonl", 2) == 0


def test_compressed_records_read_back_and_damage_is_an_error(tmp_path):
    path = tmp_path / "rollouts" / "step_000030.jsonl.zst"
    records.write_jsonl_zst(path, [{"text": "é"}, {"text": "b"}])
    assert records.read_jsonl_zst(path) == [{"text": "é"}, {"text": "b"}]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RlfeError, match="damaged"):
        records.read_jsonl_zst(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    records.append_jsonl(path, {"step": 1})
    real = type(path).open

    def full(self, mode="r", **named):
        return real(self, mode, **named) if "a" not in mode else Full(real(self, mode, **named))

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def truncate(self, size):
            self.file.truncate(size)

        def write(self, data):
            self.file.write(data[:3])
            with open("/dev/full", "wb", buffering=0) as device:
                return device.write(data)

    monkeypatch.setattr(type(path), "open", full)
    with pytest.raises(RlfeError, match=r"disk full while writing .*metrics\.jsonl"):
        records.append_jsonl(path, {"step": 2})
    monkeypatch.undo()
    assert path.read_bytes() == b'{"step":1}\n'


def test_a_record_that_is_no_step_is_named_before_anything_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[1, 2]\n')
    with pytest.raises(RlfeError, match="record 2 is no step"):
        records.cut_after(path, 1)
    assert path.read_text() == '{"step": 1}\n[1, 2]\n'
