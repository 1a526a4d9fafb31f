from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.randomness import derive, epoch_of_step, generator, problems_of_step


def test_derive_gives_the_documented_check_values():
    assert derive(0, "data", 0) == 13182660425791531
    assert derive(0, "sample", 0, 0) == 3961493867943574920
    assert derive(1, "sample", 0, 0) == 2259320236037166322
    assert derive(0, "replay", 7) == 1614651200321912416


def test_parts_do_not_run_into_each_other():
    assert derive(0, "eval", "a", "bc") != derive(0, "eval", "ab", "c")
    assert derive(0, "eval", 1, 11) != derive(0, "eval", 11, 1)


@given(st.integers(0, 2**40), st.text(max_size=5), st.integers(0, 10**6))
def test_a_seed_fits_signed_64_bits(run_seed, label, part):
    assert 0 <= derive(run_seed, label, part) < 2**62


def test_two_evaluation_seeds_share_no_stream():
    blocks = [
        derive(seed, "eval", "cell/global_step_30", "mbpp_plus", problem, block)
        for seed in range(4)
        for problem in ("mbpp_plus/2", "mbpp_plus/3")
        for block in range(20)
    ]
    starts = sorted(blocks)
    # vLLM numbers the samples of a request base + i: blocks of 8 must not overlap either.
    gaps = [after - before for before, after in pairwise(starts)]
    assert len(set(blocks)) == 160
    assert min(gaps) >= 8


def test_five_steps_of_64_read_320_problems_once():
    steps = [problems_of_step(run_seed=3, step=t, prompts_per_step=64, count=320) for t in range(5)]
    assert sorted(np.concatenate(steps).tolist()) == list(range(320))
    assert epoch_of_step(step=4, prompts_per_step=64, count=320) == 1.0


@given(
    seed=st.integers(0, 100),
    prompts=st.integers(1, 9),
    count=st.integers(1, 7),
    steps=st.integers(1, 12),
)
def test_nothing_is_dropped_at_the_end_of_an_epoch(seed, prompts, count, steps):
    row = np.concatenate(
        [
            problems_of_step(run_seed=seed, step=t, prompts_per_step=prompts, count=count)
            for t in range(steps)
        ]
    )
    whole = row[: row.size // count * count].reshape(-1, count)
    assert row.size == prompts * steps
    assert all(sorted(epoch.tolist()) == list(range(count)) for epoch in whole)


def test_a_step_does_not_depend_on_how_many_numbers_earlier_steps_used():
    asked_alone = problems_of_step(run_seed=0, step=7, prompts_per_step=4, count=10)
    first = generator(0, "data", 0)
    first.random(1000)
    assert problems_of_step(run_seed=0, step=7, prompts_per_step=4, count=10).tolist() == (
        asked_alone.tolist()
    )


def test_resetting_the_global_generator_changes_nothing():
    before = generator(0, "replay", 3).random(4).tolist()
    np.random.seed(0)
    assert generator(0, "replay", 3).random(4).tolist() == before


def test_with_replacement_draws_each_slot_for_itself():
    wide = problems_of_step(
        run_seed=0, step=2, prompts_per_step=50, count=5, order="with_replacement"
    )
    narrow = problems_of_step(
        run_seed=0, step=2, prompts_per_step=10, count=5, order="with_replacement"
    )
    assert wide[:10].tolist() == narrow.tolist()
    assert set(wide.tolist()) == set(range(5))


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="unknown data order"):
        problems_of_step(run_seed=0, step=0, prompts_per_step=1, count=1, order="sorted")
