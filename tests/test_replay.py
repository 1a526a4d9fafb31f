import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfe.errors import RequestError
from rlfe.randomness import generator
from rlfe.training.replay import ReplayBuffer, ReplaySettings, check_feasible
from rlfe.types import Completion, Finish, Group, Rollout, Status, Verdict


def rollout(prompt, index, tokens, *, reward=1.0, finish=Finish.STOP, version=0):
    return Rollout(
        problem_id=prompt,
        index=index,
        prompt_ids=(1, 2),
        completion=Completion(
            token_ids=tuple(tokens),
            logprobs=(-0.5,) * len(tokens),
            text="",
            finish=finish,
            policy_step=version,
        ),
        verdict=Verdict(status=Status.PASSED),
        reward=reward,
    )


def group(prompt, slot, rollouts):
    return Group(problem_id=prompt, step=0, slot=slot, rollouts=tuple(rollouts))


def successes_of(prompt, slot, count, *, start=0):
    return group(prompt, slot, [rollout(prompt, i, (start + i, 99)) for i in range(count)])


def filled(prompts, entries, *, acc=0.5, step=0, **numbers):
    """A buffer with `entries` successes of each prompt, admitted after `step`."""
    numbers = {"strategy": "uniform", "rollouts": 4, "min_eligible": 1, **numbers}
    buffer = ReplayBuffer(ReplaySettings(**numbers))
    for prompt in prompts:
        value = acc[prompt] if isinstance(acc, dict) else acc
        buffer.observe(prompt, successes=round(value * 10), scored=10)
    buffer.admit([successes_of(p, slot, entries) for slot, p in enumerate(prompts)], step=step)
    return buffer


def drawn(buffer, step, seed=0):
    return buffer.draw(step, generator(seed, "replay", step)).entries


def replay(buffer, step, seed=0):
    entries = drawn(buffer, step, seed)
    buffer.mark_replayed([entry.id for entry in entries], step=step, nll_B=[0.1] * len(entries))
    return entries


def test_only_finished_successes_come_in_and_duplicates_are_counted():
    buffer = ReplayBuffer(ReplaySettings(strategy="uniform"))
    rollouts = [
        rollout("a", 0, (5, 6), version=3),
        rollout("a", 1, (5, 6)),
        rollout("a", 2, (5, 7), finish=Finish.LENGTH),
        rollout("a", 3, (), finish=Finish.STOP),
        rollout("a", 4, (5, 8), reward=0.5),
        rollout("a", 5, (5, 9), reward=None),
        rollout("a", 6, (5, 9)),
    ]
    assert buffer.admit([group("a", 0, rollouts)], step=3) == 2
    assert [entry.completion_ids for entry in buffer.entries.values()] == [(5, 6), (5, 9)]
    first = buffer.entries[0]
    assert (first.nll, first.step_added, first.behavior_version) == (0.5, 3, 3)
    assert (first.n_replayed, first.last_replayed) == (0, None)
    assert (buffer.counters.duplicates, buffer.counters.refused_finish) == (1, 2)


def test_the_same_completion_of_another_prompt_is_no_duplicate():
    buffer = ReplayBuffer(ReplaySettings(strategy="uniform"))
    groups = [successes_of("a", 0, 1), successes_of("b", 1, 1)]
    assert buffer.admit(groups, step=0) == 2


def test_admission_is_in_slot_and_index_order():
    buffer = ReplayBuffer(ReplaySettings(strategy="uniform"))
    late = group("b", 1, [rollout("b", 1, (2,)), rollout("b", 0, (1,))])
    buffer.admit([late, successes_of("a", 0, 1)], step=0)
    order = [(entry.prompt_id, entry.completion_ids) for entry in buffer.entries.values()]
    assert order == [("a", (0, 99)), ("b", (1,)), ("b", (2,))]


def test_the_oldest_entry_leaves_a_full_prompt_and_a_full_buffer():
    buffer = ReplayBuffer(ReplaySettings(strategy="uniform", per_prompt=2, max_entries=3))
    buffer.admit([successes_of("a", 0, 2)], step=0)
    buffer.admit([successes_of("a", 0, 1, start=50)], step=1)
    assert sorted(buffer.entries) == [1, 2]
    buffer.admit([successes_of("b", 0, 2)], step=2)
    assert sorted(buffer.entries) == [2, 3, 4]


def test_acc_is_that_of_the_latest_group_also_at_k_0():
    buffer = ReplayBuffer(ReplaySettings(strategy="hard"))
    buffer.observe("a", successes=6, scored=8)
    assert buffer.acc["a"] == 0.75
    buffer.observe("a", successes=0, scored=7)
    assert buffer.acc["a"] == 0.0
    buffer.observe("a", successes=0, scored=0)
    assert buffer.acc["a"] == 0.0


def test_nothing_is_drawn_in_the_step_that_made_it():
    buffer = filled(["a"], 4, step=3)
    assert buffer.eligible(3) == []
    assert len(buffer.eligible(4)) == 4


@pytest.mark.parametrize(("cooldown", "back_at"), [(0, 11), (1, 12), (5, 16)])
def test_what_was_replayed_rests_for_c_steps(cooldown, back_at):
    buffer = filled(["a"], 1, cooldown_steps=cooldown)
    buffer.mark_replayed([0], step=10, nll_B=[0.1])
    assert [bool(buffer.eligible(t)) for t in range(11, back_at)] == [False] * (back_at - 11)
    assert buffer.eligible(back_at)


def test_hard_cooldown_rests_five_steps_by_default():
    assert ReplaySettings(strategy="hard_cooldown").cooldown == 5
    assert ReplaySettings(strategy="hard").cooldown == 0
    assert ReplaySettings(strategy="hard", cooldown_steps=2).cooldown == 2


def test_the_unit_prompt_rests_all_entries_of_a_prompt():
    by_rollout = filled(["a", "b"], 2, cooldown_steps=3)
    by_prompt = filled(["a", "b"], 2, cooldown_steps=3, cooldown_unit="prompt")
    for buffer in (by_rollout, by_prompt):
        buffer.mark_replayed([0], step=5, nll_B=[0.1])
    assert [entry.id for entry in by_rollout.eligible(6)] == [1, 2, 3]
    assert [entry.id for entry in by_prompt.eligible(6)] == [2, 3]
    assert [entry.id for entry in by_prompt.eligible(9)] == [0, 1, 2, 3]


def test_entries_beyond_max_age_are_not_drawn():
    buffer = filled(["a"], 1, max_age=3)
    assert [bool(buffer.eligible(t)) for t in (1, 3, 4)] == [True, True, False]


def test_weights_of_hard_are_spread_over_the_prompts_entries():
    buffer = filled(["a", "b"], 2, acc={"a": 0.9, "b": 0.5}, strategy="hard")
    np.testing.assert_allclose(buffer.weights(buffer.eligible(1)), [0.05, 0.05, 0.25, 0.25])
    squared = filled(["b"], 1, acc=0.5, strategy="hard", alpha=2.0)
    assert squared.weights(squared.eligible(1)).tolist() == [0.25]


def test_a_floor_of_zero_retires_solved_prompts():
    numbers = {"acc": {"a": 1.0, "b": 0.5}, "strategy": "hard"}
    assert len(filled(["a", "b"], 1, w_min=0.05, **numbers).eligible(1)) == 2
    retired = filled(["a", "b"], 1, w_min=0.0, **numbers)
    assert [entry.prompt_id for entry in retired.eligible(1)] == ["b"]


def test_ce_weighs_by_the_last_known_nll():
    buffer = filled(["a"], 2, strategy="ce")
    buffer.mark_replayed([1], step=1, nll_B=[2.0])
    assert buffer.weights(buffer.eligible(2)).tolist() == [0.5, 2.0]
    buffer.mark_replayed([0], step=2, nll_B=[0.0])
    assert [entry.id for entry in buffer.eligible(3)] == [1]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    prompts=st.integers(1, 8),
    m=st.integers(1, 4),
    cooldown=st.integers(0, 3),
    unit=st.sampled_from(["rollout", "prompt"]),
    strategy=st.sampled_from(["uniform", "hard", "hard_cooldown", "ce"]),
)
def test_no_repeat_no_early_return_and_no_more_than_m_of_a_prompt(
    seed, prompts, m, cooldown, unit, strategy
):
    names = [f"p{i}" for i in range(prompts)]
    buffer = filled(
        names,
        4,
        strategy=strategy,
        rollouts=6,
        max_per_prompt=m,
        cooldown_steps=cooldown,
        cooldown_unit=unit,
    )
    last: dict[int, int] = {}
    for step in range(1, 8):
        drawable = buffer.drawable(buffer.eligible(step))
        entries = replay(buffer, step, seed)
        assert len(entries) == min(6, drawable)
        assert len({entry.id for entry in entries}) == len(entries)
        assert max(Counter(e.prompt_id for e in entries).values(), default=0) <= m
        for entry in entries:
            assert entry.step_added < step
            assert step - last.get(entry.id, -100) > cooldown
            last[entry.id] = step


def test_the_draw_does_not_depend_on_insertion_history():
    buffer = filled(["a", "b", "c"], 4, strategy="hard")
    plain, arrays = buffer.state_dict()
    turned = {**plain, "entries": plain["entries"][::-1]}
    columns = {}
    for name in ("prompt_ids", "completion_ids", "behavior_logp"):
        pieces = np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
        columns[name] = np.concatenate(pieces[::-1])
        columns[f"{name}_lengths"] = arrays[f"{name}_lengths"][::-1]
    other = ReplayBuffer(buffer.settings)
    other.load_state(turned, columns)
    assert list(other.entries) == list(buffer.entries)[::-1]
    assert [e.id for e in drawn(other, 7)] == [e.id for e in drawn(buffer, 7)]


def test_the_draw_depends_on_step_and_seed():
    buffer = filled(["a", "b", "c"], 4)
    draws = {tuple(e.id for e in drawn(buffer, t, seed)) for t in (1, 2) for seed in (0, 1)}
    assert len(draws) == 4


def test_equal_weights_draw_all_prompts_equally_often():
    buffer = filled([f"p{i}" for i in range(8)], 2, rollouts=4)
    counts: Counter[str] = Counter()
    for step in range(1, 2001):
        counts.update(entry.prompt_id for entry in drawn(buffer, step))
    assert min(counts.values()) > 0.92 * 1000
    assert max(counts.values()) < 1.08 * 1000


@pytest.mark.parametrize("easy_entries", [1, 4])
def test_the_first_entry_is_of_the_hard_prompt_nine_to_one(easy_entries):
    buffer = filled(
        ["hard", "easy"], 2, acc={"hard": 0.1, "easy": 0.9}, strategy="hard", rollouts=1
    )
    buffer.admit([successes_of("easy", 0, easy_entries, start=50)], step=0)
    first = Counter(drawn(buffer, step)[0].prompt_id for step in range(1, 4001))
    assert first["hard"] / 4000 == pytest.approx(0.9, abs=0.02)


def test_a_full_draw_holds_more_of_the_hard_prompt():
    buffer = filled(
        ["hard", "easy"], 8, acc={"hard": 0.1, "easy": 0.9}, strategy="hard", rollouts=5
    )
    counts: Counter[str] = Counter()
    for step in range(1, 201):
        counts.update(entry.prompt_id for entry in drawn(buffer, step))
    assert counts["hard"] > 1.5 * counts["easy"]


def test_shortage_takes_what_there_is():
    buffer = filled(["a"], 3, rollouts=8)
    draw = buffer.draw(1, generator(0, "replay", 1))
    assert (len(draw.entries), draw.fill) == (3, 3 / 8)
    assert draw.metrics["replay/fill"] == 3 / 8
    empty = buffer.draw(0, generator(0, "replay", 0))
    assert empty.entries == ()


def test_shortage_relax_halves_the_rest_for_this_step():
    take = filled(["a", "b"], 2, rollouts=4, cooldown_steps=4)
    relax = filled(["a", "b"], 2, rollouts=4, cooldown_steps=4, shortage="relax")
    for buffer in (take, relax):
        replay(buffer, 1)
    assert len(drawn(take, 3)) == 0
    assert len(drawn(relax, 3)) == 4  # 4 -> 2 -> 1: what was replayed at step 1 may come at 3


def test_the_first_draw_waits_for_enough_entries():
    buffer = filled(["a"], 2, rollouts=4, min_eligible=None)
    waiting = buffer.draw(1, generator(0, "replay", 1))
    assert waiting.waiting
    assert (waiting.entries, waiting.metrics["replay/waiting"]) == ((), 1)
    buffer.admit([successes_of("a", 0, 2, start=50)], step=1)
    started = buffer.draw(2, generator(0, "replay", 2))
    assert not started.waiting
    assert len(started.entries) == 4
    late = filled(["a"], 4, rollouts=4, start_step=5)
    assert [late.draw(t, generator(0, "replay", t)).waiting for t in (4, 5)] == [True, False]


def test_after_the_start_a_short_step_does_not_wait_again():
    buffer = filled(["a"], 4, rollouts=4, min_eligible=4, cooldown_steps=3)
    assert len(replay(buffer, 1)) == 4
    draw = buffer.draw(2, generator(0, "replay", 2))
    assert (len(draw.entries), draw.waiting) == (0, False)


def test_warnings_name_what_is_wrong():
    waiting = filled(["a"], 1, rollouts=4, min_eligible=4)
    waiting.draw(10, generator(0, "replay", 10))
    assert "drawn nothing" in waiting.warnings(step=10, total_steps=100)[0]
    assert waiting.warnings(step=11, total_steps=100) == []
    short = filled(["a"], 1, rollouts=4)
    for step in range(1, 21):
        short.draw(step, generator(0, "replay", step))
    assert "20 steps in a row" in short.warnings(step=20, total_steps=1000)[0]
    cut = ReplayBuffer(ReplaySettings(strategy="uniform"))
    cut.admit([group("a", 0, [rollout("a", 0, (1,), finish=Finish.LENGTH)])], step=0)
    cut.counters.started = True
    assert cut.warnings(step=1, total_steps=10) == [
        "1 of 1 successes were cut and cannot be replayed"
    ]


def test_state_survives_json_and_draws_the_same():
    buffer = filled(["a", "b", "c"], 3, strategy="hard_cooldown", rollouts=3)
    for step in range(1, 4):
        replay(buffer, step)
    plain, arrays = buffer.state_dict()
    restored = ReplayBuffer(buffer.settings)
    restored.load_state(json.loads(json.dumps(plain)), arrays)
    assert restored.entries == buffer.entries
    assert (restored.acc, restored.counters) == (buffer.acc, buffer.counters)
    for step in range(4, 9):
        assert replay(restored, step) == replay(buffer, step)
    fresh = [successes_of("a", 0, 1, start=70)]
    assert restored.admit(fresh, step=9) == buffer.admit(fresh, step=9) == 1
    assert restored.entries == buffer.entries


def test_an_empty_buffer_can_be_saved():
    buffer = ReplayBuffer(ReplaySettings(strategy="uniform"))
    restored = ReplayBuffer(ReplaySettings(strategy="uniform"))
    restored.load_state(*buffer.state_dict())
    assert restored.entries == {}


def test_metrics_of_a_draw():
    buffer = filled(["a", "b"], 2, acc={"a": 0.2, "b": 0.6}, rollouts=2, cooldown_steps=2)
    replay(buffer, 1)
    draw = buffer.draw(2, generator(0, "replay", 2))
    metrics = draw.metrics
    assert metrics["replay/buffer_size"] == 4
    assert metrics["replay/prompts"] == 2
    assert metrics["replay/blocked_by_cooldown"] == 2
    assert metrics["replay/eligible"] == metrics["replay/drawable"] == 2
    assert metrics["replay/acc_mean"] == pytest.approx(0.4)
    assert metrics["replay/age_mean"] == metrics["replay/age_max"] == 2
    assert metrics["replay/n_replayed_max"] == 1


def test_only_a_strategy_with_a_weight_is_active():
    assert ReplaySettings(strategy="hard", weight=0.1).active
    assert not ReplaySettings(strategy="hard", weight=0.0).active
    assert not ReplaySettings(strategy="none", weight=0.1).active
    with pytest.raises(ValueError, match="unknown replay strategy"):
        ReplayBuffer(ReplaySettings(strategy="soft"))


def refused(problems, **numbers):
    try:
        check_feasible(ReplaySettings(strategy="uniform", **numbers), problems=problems)
    except RequestError as error:
        return error.what
    return None


def test_longest_rest_that_128_rollouts_allow():
    assert refused(320, cooldown_steps=19) is None
    assert "too long" in refused(320, cooldown_steps=20)
    assert refused(512, cooldown_steps=31) is None
    assert "too long" in refused(512, cooldown_steps=32)


def test_longest_rest_of_whole_prompts():
    by_prompt = {"cooldown_unit": "prompt"}
    assert refused(320, cooldown_steps=1, max_per_prompt=1, **by_prompt) is None
    assert "too long" in refused(320, cooldown_steps=2, max_per_prompt=1, **by_prompt)
    assert refused(320, cooldown_steps=9, max_per_prompt=4, **by_prompt) is None
    assert "too long" in refused(320, cooldown_steps=10, max_per_prompt=4, **by_prompt)


def test_more_than_the_problems_can_give_is_refused():
    assert "replay.min_eligible = 128 is never reached" in refused(8)
    assert "replay.rollouts = 128 is more than 8 problems" in refused(8, min_eligible=4)
    assert refused(8, rollouts=32) is None
    check_feasible(ReplaySettings(strategy="none"), problems=1)


def test_marking_needs_one_nll_per_entry():
    with pytest.raises(ValueError, match="1 ids, 2 values"):
        filled(["a"], 1).mark_replayed([0], step=1, nll_B=[1.0, 2.0])
