"""The table of docs/scale.md is what its script computes, and the formulas are right."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import Known, Study, markdown, storage, table, tokens_per_second

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def test_the_page_shows_the_computed_table() -> None:
    assert markdown(table(Study(), Known())) in PAGE.read_text(encoding="utf-8")


def test_a_checkpoint_of_two_bytes_a_parameter() -> None:
    values = {row.part: row.value for row in storage(Study(parameters=1.7e9), Known())}
    assert values["a checkpoint"] == "3.4 GB"  # docs/hub.md says the same of a 1.7B model
    assert values["private storage at the Hub is full at"] == "checkpoint 30"
    assert values["commits of the study"] == "30 of 128 an hour"


def test_decoding_is_bound_by_the_bytes_that_are_read() -> None:
    known = Known(gpu_bandwidth=1e12, decode_rows=1, decode_efficiency=1.0)
    study = Study(parameters=1e9)
    assert tokens_per_second(study, known, context=0) == pytest.approx(500.0)
    many = replace(known, decode_rows=100)
    kept = 2 * 28 * 4 * 128 * 2 * 1000 * 100
    assert tokens_per_second(study, many) == pytest.approx(100 * 1e12 / (2e9 + kept))


def test_every_row_says_how_its_value_is_known() -> None:
    for row in table(Study(), Known()):
        assert row.how.split()[0].rstrip(":") in ("measured", "documented", "computed")
        assert row.formula
