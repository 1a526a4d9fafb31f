from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.randomness import generator
from rlfe.training.batching import (
    REPLAY,
    Row,
    fresh_rows,
    joined,
    mini_batches,
    padded,
    select,
    split_evenly,
)
from rlfe.types import Completion, Finish, Group, Rollout, Status, Verdict


def group(slot, *, size=2, finish=Finish.STOP):
    rollouts = tuple(
        Rollout(
            problem_id=f"p{slot}",
            index=index,
            prompt_ids=(1,) * (slot + 1),
            completion=Completion(
                token_ids=(7, index + 8),
                logprobs=(-0.5, -0.25),
                text="x",
                finish=finish if index == 0 else Finish.STOP,
            ),
            verdict=Verdict(status=Status.PASSED),
            reward=1.0,
        )
        for index in range(size)
    )
    return Group(problem_id=f"p{slot}", step=0, slot=slot, rollouts=rollouts)


def test_kept_groups_stay_whole_in_order_and_all_fields_are_cut_alike():
    rows = fresh_rows([group(1), group(3)], [np.array([0.5, -0.5]), np.array([1.5, -1.5])], [1, 2])
    batch = padded(rows, pad_id=0)
    assert batch.group_B.tolist() == [1, 1, 3, 3]
    assert batch.advantage_B.tolist() == [0.5, -0.5, 1.5, -1.5]
    assert batch.successes_B.tolist() == [1, 1, 2, 2]
    assert batch.ids_BL.tolist() == [
        [1, 1, 7, 8, 0, 0],
        [1, 1, 7, 9, 0, 0],
        [1, 1, 1, 1, 7, 8],
        [1, 1, 1, 1, 7, 9],
    ]
    assert batch.mask_BL.sum(axis=1).tolist() == [2, 2, 2, 2]
    np.testing.assert_array_equal(batch.behavior_logp_BL[0], [0, 0, -0.5, -0.25, 0, 0])


def test_cut_rollouts_leave_the_mask_only_when_asked():
    cut = [group(0, finish=Finish.LENGTH)]
    kept = padded(fresh_rows(cut, [np.zeros(2)], [2]), pad_id=0)
    masked = padded(fresh_rows(cut, [np.zeros(2)], [2], mask_truncated=True), pad_id=0)
    assert kept.mask_BL.sum(axis=1).tolist() == [2, 2]
    assert masked.mask_BL.sum(axis=1).tolist() == [0, 2]


def test_no_rows_give_an_empty_batch():
    batch = padded([], pad_id=0)
    assert batch.ids_BL.shape == (0, 1)


def test_mismatched_lengths_are_refused():
    with pytest.raises(ValueError, match="2 completion tokens and 1 log-prob"):
        padded([Row(prompt_ids=(), completion_ids=(1, 2), behavior_logp=(-1.0,))], pad_id=0)
    with pytest.raises(ValueError, match="1 groups, 0 advantages"):
        fresh_rows([group(0)], [], [1])


def step_sizes(count, size, remainder="short"):
    parts = mini_batches(
        count,
        size=size,
        shuffle=generator(0, "shuffle", 0, 0),
        remainder=remainder,
        pad=generator(0, "pad", 0),
    )
    return [part.size for part in parts]


def test_optimiser_steps_of_study_1():
    assert step_sizes(128, 32) == [32, 32, 32, 32]
    assert step_sizes(32, 32) == [32]
    assert step_sizes(0, 32) == []


def test_what_becomes_of_an_incomplete_mini_batch():
    assert step_sizes(80, 32) == [32, 32, 16]
    assert step_sizes(80, 32, "copy") == [32, 32, 32]
    assert step_sizes(80, 32, "drop") == [32, 32]
    assert step_sizes(8, 32, "drop") == []
    assert step_sizes(8, 32, "copy") == [32]


def test_one_mini_batch_keeps_batch_order_and_takes_no_random_number():
    shuffle = generator(0, "shuffle", 0, 0)
    parts = mini_batches(6, size=None, shuffle=shuffle)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4, 5]]
    assert shuffle.random() == generator(0, "shuffle", 0, 0).random()


@given(st.integers(0, 40), st.integers(1, 12), st.sampled_from(["short", "copy", "drop"]))
def test_every_row_is_trained_once_unless_copied_or_dropped(count, size, remainder):
    parts = mini_batches(
        count,
        size=size,
        shuffle=np.random.default_rng(1),
        remainder=remainder,
        pad=np.random.default_rng(2),
    )
    rows = np.concatenate([*parts, np.zeros(0, np.int64)])
    assert set(rows.tolist()) <= set(range(count))
    assert all(0 < part.size <= size for part in parts)
    if remainder == "short":
        assert sorted(rows.tolist()) == list(range(count))
    if remainder == "copy":
        assert set(rows.tolist()) == set(range(count))
        assert rows.size % size == 0
    if remainder == "drop":
        assert rows.size == count // size * size == len(set(rows.tolist()))


@given(st.integers(0, 200), st.integers(1, 12))
def test_replay_rows_are_split_in_order_with_sizes_that_differ_by_at_most_one(count, parts):
    slices = split_evenly(count, parts)
    sizes = [piece.stop - piece.start for piece in slices]
    assert [index for piece in slices for index in range(count)[piece]] == list(range(count))
    assert len(slices) == parts
    assert max(sizes) - min(sizes) <= 1


def test_splits_and_slices():
    assert split_evenly(5, 2) == [slice(0, 3), slice(3, 5)]
    for bad in (lambda: split_evenly(3, 0), lambda: mini_batches(3, size=0, shuffle=None)):
        with pytest.raises(ValueError, match="at least 1"):
            bad()
    with pytest.raises(ValueError, match="unknown remainder"):
        mini_batches(3, size=2, shuffle=np.random.default_rng(0), remainder="pad")


def test_replay_rows_come_after_fresh_ones_at_the_wider_width():
    fresh = padded(fresh_rows([group(0)], [np.array([1.0, -1.0])], [1]), pad_id=9)
    entry = Row(
        prompt_ids=(1, 1),
        completion_ids=(5, 6, 7),
        behavior_logp=(-1.0, -2.0, -3.0),
        source=REPLAY,
    )
    both = joined(fresh, padded([entry], pad_id=9), pad_id=9)
    assert both.source_B.tolist() == [0, 0, 1]
    assert both.successes_B.tolist() == [1, 1, -1]
    assert both.ids_BL[0].tolist() == [1, 7, 8, 9, 9]
    assert both.ids_BL[2].tolist() == [1, 1, 5, 6, 7]
    assert both.mask_BL[2].tolist() == [False, False, True, True, True]
    assert both.old_logp_BL is None


def test_an_optional_field_of_one_side_is_zero_on_the_other():
    fresh = padded(fresh_rows([group(0)], [np.zeros(2)], [1]), pad_id=0)
    fresh = replace(fresh, old_logp_BL=np.full(fresh.ids_BL.shape, -1.0, np.float32))
    entry = Row(prompt_ids=(1,) * 4, completion_ids=(5,), behavior_logp=(-1.0,), source=REPLAY)
    both = joined(fresh, padded([entry], pad_id=0), pad_id=0)
    assert both.old_logp_BL.tolist() == [[-1, -1, -1, 0, 0]] * 2 + [[0.0] * 5]
    assert both.reference_logp_BL is None
    assert select(both, np.array([2, 0, 0])).old_logp_BL[:, 0].tolist() == [0, -1, -1]
