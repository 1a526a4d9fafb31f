import json

from rlfe.training.stops import StopCounters, StopRules


def run(rules, steps):
    """The first stop over (reward, empty, skipped) steps, and the counters after it."""
    counters = StopCounters(rules)
    for number, (reward, empty, skipped) in enumerate(steps, start=1):
        stop = counters.observe(
            step=number,
            reward_mean=reward,
            empty=empty,
            optim_steps=0 if empty else 1,
            skipped=skipped,
        )
        if stop:
            return number, stop, counters
    return None, None, counters


GOOD, EMPTY, BROKEN = (0.5, False, 0), (0.5, True, 0), (0.5, False, 1)


def test_no_rule_but_divergence_is_on_by_default():
    number, _, counters = run(StopRules(), [(0.0, True, 0)] * 100)
    assert number is None
    assert counters.metrics() == {
        "filter/consecutive_empty": 100,
        "filter/empty_total": 100,
        "train/nonfinite": 0,
    }


def test_five_non_finite_steps_in_a_row_end_the_run():
    number, stop, _ = run(StopRules(), [BROKEN] * 4 + [GOOD] + [BROKEN] * 5)
    assert number == 10
    assert stop.status == "diverged"
    assert "up to step 10" in stop.reason


def test_an_empty_step_between_non_finite_ones_does_not_clear_them():
    assert run(StopRules(max_nonfinite=2), [BROKEN, EMPTY, BROKEN])[0] == 3


def test_empty_steps_in_a_row_end_the_run_when_asked():
    rules = StopRules(empty_stop_steps=3)
    number, stop, _ = run(rules, [EMPTY, EMPTY, GOOD, EMPTY, EMPTY, EMPTY])
    assert (number, stop.status) == (6, "empty")


def test_a_reward_below_the_floor_over_a_full_window_ends_the_run():
    rules = StopRules(reward_below=0.1, window=3)
    low = (0.05, False, 0)
    number, stop, _ = run(rules, [low, low, low])
    assert (number, stop.status) == (3, "collapsed")
    assert run(rules, [low, low])[0] is None
    assert run(rules, [(0.1, False, 0)] * 10)[0] is None


def test_unscored_steps_do_not_count_as_zero():
    rules = StopRules(reward_below=0.1, window=2)
    assert run(rules, [(0.5, False, 0)] + [(None, False, 0)] * 5)[0] is None


def test_counters_survive_json():
    rules = StopRules(reward_below=0.3, window=3, empty_stop_steps=4)
    _, _, counters = run(rules, [(0.2, True, 0), (0.2, True, 0), (0.9, False, 1)])
    restored = StopCounters(rules)
    restored.load(json.loads(json.dumps(counters.state())))
    assert restored.state() == counters.state()
    for _ in range(2):
        step = {"step": 4, "reward_mean": 0.1, "empty": False, "optim_steps": 1}
        assert restored.observe(**step) == counters.observe(**step)
