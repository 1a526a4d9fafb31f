"""Gain, forgetting and stability on numbers that can be checked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.errors import RequestError
from rlfe.eval import forgetting as f


def test_gain_and_forgetting_are_signed() -> None:
    assert f.gain(0.6, 0.5) == pytest.approx(0.1)
    assert f.forgetting(0.5, 0.6) == pytest.approx(-0.1)
    assert f.mean_forgetting({"a": 0.5, "b": 0.4}, {"a": 0.3, "b": 0.4}) == pytest.approx(0.1)
    assert f.mean_forgetting({"a": 0.5}, {}) is None


def test_retention_is_a_ratio_with_an_interval_and_needs_something_to_retain() -> None:
    source = np.random.default_rng(0)
    base_P = source.beta(2, 2, 200)
    weights_BP = source.multinomial(200, np.full(200, 1 / 200), size=500).astype(float)
    kept = f.retention(base_P, 0.5 * base_P, weights_BP)
    assert kept is not None
    assert kept == pytest.approx((0.5, 0.5, 0.5))
    rare_P = np.zeros(200)
    rare_P[0] = 0.1
    assert f.retention(rare_P, rare_P, weights_BP) is None


def test_max_forgetting_is_the_fall_from_the_best_so_far() -> None:
    assert f.max_forgetting([0.5, 0.7, 0.6, 0.8]) == pytest.approx([0, 0, 0.1, 0])


def test_the_area_uses_the_real_step_spacing_and_only_what_lies_above_zero() -> None:
    assert f.area([0, 10, 30], [0.0, 0.2, 0.2]) == pytest.approx((1.0 + 4.0) / 30)
    assert f.area([0, 10], [-0.1, 0.1]) == pytest.approx(0.025)
    assert f.area([0, 10], [-0.1, -0.2]) == 0.0
    assert f.area([0], [0.1]) is None
    with pytest.raises(ValueError, match="ascend"):
        f.area([10, 0], [0.0, 0.0])


def test_forgetting_at_matched_gain_is_linear_between_checkpoints() -> None:
    gains, lost = [0.0, 0.1, 0.3], [0.0, 0.02, 0.06]
    assert f.forgetting_at_gain(gains, lost, 0.2) == pytest.approx(0.04)
    assert f.forgetting_at_gain(gains, lost, 0.1) == pytest.approx(0.02)
    assert f.forgetting_at_gain(gains, lost, 0.31) is None
    assert f.forgetting_at_gain(gains, lost, 0.0) == 0.0
    assert f.matched_gain({"a": gains, "b": [0.0, 0.25]}) == 0.25
    assert f.matched_gain({"a": gains, "b": [0.0, -0.1]}) is None


def test_the_front_keeps_who_is_beaten_by_nobody() -> None:
    points = {"a": (0.3, 0.1), "b": (0.2, 0.1), "c": (0.1, 0.0), "d": (0.3, 0.1)}
    assert f.pareto(points) == ["a", "c", "d"]


def test_transitions_count_problems_that_cross_one_half() -> None:
    found = f.transitions(np.array([8, 0, 4, 8]), np.array([0, 8, 4, 8]), 8)
    assert found == (0.25, 0.25, None, None)
    many = f.transitions(np.array([160, 80, 80]), np.array([0, 81, 80]), 160)
    assert (many.lost_tested, many.found_tested) == (1, 0)


def test_the_exact_test_equals_known_values() -> None:
    assert f.two_proportion_p(3, 3, 10) == pytest.approx(1.0)
    assert f.two_proportion_p(0, 5, 5) == pytest.approx(2 / math.comb(10, 5))
    assert f.two_proportion_p(1, 9, 10) == pytest.approx(0.001093, abs=1e-5)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_exact_test_does_not_depend_on_the_order(a: int, b: int) -> None:
    one, two = f.two_proportion_p(a, b, 40), f.two_proportion_p(b, a, 40)
    assert one == pytest.approx(two)
    assert 0 < one <= 1


def test_support_needs_the_same_n() -> None:
    found = f.support(np.array([1, 0, 2, 0]), np.array([0, 3, 1, 0]), 8, 8)
    assert found == (0.5, 0.5)
    assert f.support(np.array([0, 0]), np.array([0, 0]), 8, 8) == (None, None)
    with pytest.raises(RequestError, match="same n"):
        f.support(np.array([1]), np.array([1]), 8, 16)
    with pytest.raises(RequestError, match="base has 1 problems"):
        f.support(np.array([1]), np.array([1, 2]), 8, 8)


def series(*means: float) -> list[np.ndarray]:
    """Problems that move together: a paired error of 0."""
    return [np.full(50, mean) for mean in means]


def test_a_run_that_holds_its_level_is_stable() -> None:
    assert f.stability([0, 30, 60], series(0.4, 0.5, 0.49)) == f.Stability(kind="stable")


def test_two_low_scores_are_unstable_and_below_base_collapsed() -> None:
    found = f.stability([0, 30, 60, 90, 120], series(0.4, 0.6, 0.5, 0.5, 0.6))
    assert (found.kind, found.step, found.marked, found.at_end) == ("unstable", 60, False, False)
    found = f.stability([0, 30, 60, 90], series(0.4, 0.6, 0.3, 0.3))
    assert (found.kind, found.step, found.at_end) == ("collapsed", 60, True)


def test_one_low_point_is_a_dip_and_a_low_end_is_marked() -> None:
    found = f.stability([0, 30, 60, 90], series(0.4, 0.6, 0.5, 0.6))
    assert (found.kind, found.step, found.at_end) == ("dip", 60, False)
    found = f.stability([0, 30, 60], series(0.4, 0.6, 0.5))
    assert (found.kind, found.marked, found.at_end) == ("unstable", True, True)


def test_a_quarter_of_the_best_or_a_divergence_is_a_collapse() -> None:
    assert f.stability([0, 30], series(0.4, 0.1)).kind == "collapsed"
    found = f.stability([0, 30], series(0.4, 0.5), diverged_at=41)
    assert (found.kind, found.step) == ("collapsed", 41)


def test_a_fall_within_the_noise_is_no_fall() -> None:
    source = np.random.default_rng(0)
    noisy = [source.uniform(0, 1, 20) for _ in range(3)]
    noisy[2] = noisy[1] - source.normal(0.03, 0.3, 20)
    assert f.stability([0, 30, 60], noisy).kind in ("stable", "dip")


def test_the_limit_is_the_largest_rate_as_a_number() -> None:
    good, bad = f.Stability(kind="stable"), f.Stability(kind="unstable", at_end=True)
    assert f.stability_limit({6e-6: [bad], 3e-6: [good, good], 6e-7: [good]}) == 3e-6
    assert f.stability_limit({6e-6: [good, bad]}) is None
    assert f.stability_limit({10e-7: [good], 9e-7: [good]}) == 1e-6
