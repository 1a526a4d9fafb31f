"""Rows divided over passes: every row once, within the budget, alike together, none left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.engines.microbatches import Budget, lengths, micro_batches, with_the_few
from rlfe.types import Batch
from tests.test_head import a_batch


def of_lengths(length_B: list[int]) -> Batch:
    """Rows with a prompt of two tokens and so many tokens in all."""
    batch = a_batch(rows=len(length_B), width=max([5, *length_B]))
    place_L = np.arange(batch.ids_BL.shape[1])
    return replace(batch, mask_BL=(place_L >= 2) & (place_L < np.array(length_B)[:, None]))


def plan(length_B: list[int], budget: Budget, graded_B: list[bool] | None = None) -> list:
    graded = np.ones(len(length_B), bool) if graded_B is None else np.array(graded_B)
    return [rows.tolist() for rows in micro_batches(of_lengths(length_B), graded, budget)]


def test_longest_rows_come_first_and_rows_without_a_gradient_apart() -> None:
    budget = Budget(None, 20)
    assert plan([5, 10, 6, 9, 4], budget) == [[1, 3], [2, 0, 4]]
    graded = [True, False, True, False, True]
    assert plan([5, 10, 6, 9, 4], budget, graded) == [[2, 0, 4], [1, 3]]


@pytest.mark.parametrize(
    ("length_B", "graded_B", "budget", "all_graded"),
    [
        ([5, 10, 6, 9, 4], [True, False, True, False, True], Budget(None, 20), True),
        ([5, 10, 6, 9, 4], [True, False, True, False, True], Budget(None, 19), False),  # two passes
        ([9, 8], [False, False], Budget(None, 18), False),  # nothing to stand among
        ([40] * 4 + [20] * 8, [False] * 4 + [True] * 8, Budget(4, 1), True),
        ([40] * 5 + [20] * 8, [False] * 5 + [True] * 8, Budget(4, 1), False),
    ],
)
def test_a_few_rows_without_a_gradient_are_passed_as_if_with_one(
    length_B: list[int], graded_B: list[bool], budget: Budget, all_graded: bool
) -> None:
    found_B = with_the_few(of_lengths(length_B), np.array(graded_B), budget)
    assert found_B.tolist() == ([True] * len(graded_B) if all_graded else graded_B)


def test_the_last_two_passes_have_as_many_rows() -> None:
    assert plan([8] * 9, Budget(None, 64)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert plan([8] * 17, Budget(None, 64))[1:] == [[8, 9, 10, 11, 12], [13, 14, 15, 16]]


def test_no_row_is_left_over_alone() -> None:
    assert plan([6] * 7, Budget(3, 1)) == [[0, 1, 2], [3, 4], [5, 6]]
    assert plan([6] * 5, Budget(2, 1)) == [[0, 1], [2, 3], [4]]  # two and one: none could be given
    assert plan([9, 8], Budget(None, 4)) == [[0], [1]]  # longer than the budget: alone


@given(
    st.lists(st.tuples(st.integers(3, 40), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 120),
    st.none() | st.integers(1, 7),
)
def test_every_row_is_in_one_pass_that_fits(rows: list, tokens: int, count: int | None) -> None:
    length_B, graded_B = [length for length, _ in rows], [graded for _, graded in rows]
    budget = Budget(count, tokens)
    parts = plan(length_B, budget, graded_B)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    found_B = lengths(of_lengths(length_B).mask_BL)
    for part in parts:
        assert len({graded_B[row] for row in part}) == 1
        fits = len(part) <= count if count else len(part) * found_B[part].max() <= tokens
        assert fits or len(part) == 1
