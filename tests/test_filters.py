import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.training.filters import (
    kept_indices,
    loss_scale,
    reward_scores,
    rollout_scores,
    threshold,
)
from rlfe.training.rewards import as_array
from tests.reference import reference

FILE = reference("ragen_filter")
ORDINARY = [c for c in FILE["cases"] if not c["name"].startswith("group_size_1")]


def options(config):
    return {
        "strategy": config["strategy"],
        "value": config["value"],
        "side": config["filter_type"],
        "include_zero": config["include_zero"],
        "eps": config["selection_eps"],
        "prob_mode": config["top_p_prob_mode"],
    }


def same_up_to_ties(score_P, kept, expected):
    """Equal sets, or sets that differ only in which of equal scores was taken (2.4)."""
    if kept.tolist() == expected:
        return True
    mine, theirs = np.sort(score_P[kept]), np.sort(score_P[np.array(expected, int)])
    return mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: case["name"])
def test_reward_cases_of_ragen(case):
    rewards = [np.array(group) for group in case["rewards"]]
    score_P = reward_scores(rewards, metric=case["config"]["metric"])
    np.testing.assert_allclose(score_P, case["scores"], rtol=1e-5, atol=2e-6)
    kept = kept_indices(score_P, **options(case["config"]))
    assert same_up_to_ties(score_P, kept, case["selected_groups_sorted"])


@pytest.mark.parametrize("case", FILE["score_cases"], ids=lambda case: case["name"])
def test_score_cases_of_ragen(case):
    score_P = np.array(case["scores"])
    if "raises" in case:
        with pytest.raises(ValueError, match="unknown"):
            kept_indices(score_P, **options(case["config"]))
        return
    kept = kept_indices(score_P, **options(case["config"]))
    assert same_up_to_ties(score_P, kept, case["selected_groups_sorted"])


def test_only_ties_differ_from_ragen_and_only_in_six_cases():
    differing = 0
    for case in [*ORDINARY, *FILE["score_cases"]]:
        if "raises" not in case:
            score_P = np.array(case["scores"], np.float64)
            if "rewards" in case:
                rewards = [np.array(group) for group in case["rewards"]]
                score_P = reward_scores(rewards, metric=case["config"]["metric"])
            kept = kept_indices(score_P, **options(case["config"]))
            differing += kept.tolist() != case["selected_groups_sorted"]
    assert len(ORDINARY) + len(FILE["score_cases"]) == 133
    assert differing == 6


@pytest.mark.parametrize("case", FILE["length_entropy_cases"], ids=lambda case: case["name"])
def test_length_and_entropy_cases_of_ragen(case):
    metric = case["config"]["metric"]
    field = "lengths" if metric == "length" else "entropy_per_rollout_constant"
    values = [np.array(group, float) for group in case[field]]
    kept = kept_indices(rollout_scores(values, metric=metric), **options(case["config"]))
    size = len(values[0])
    assert [g * size + i for g in kept for i in range(size)] == case["kept_rollouts"]


def test_a_group_of_one_rollout_has_spread_zero_where_the_source_has_nan():
    score_P = reward_scores([np.array([1.0]), np.array([0.0])], metric="reward_variance")
    assert score_P.tolist() == [0.0, 0.0]


def test_the_three_settings_of_study_1_on_16_groups():
    rewards = [np.array([1.0] * (g % 9) + [0.0] * (8 - g % 9)) for g in range(16)]
    score_P = reward_scores(rewards, metric="reward_variance")
    everything = kept_indices(score_P, strategy="top_p", value=1, include_zero=True)
    share = kept_indices(score_P, strategy="top_p", value=0.9, include_zero=False)
    quarter = kept_indices(score_P, strategy="top_k", value=0.25, include_zero=True)
    assert everything.tolist() == list(range(16))
    assert 0 not in share.tolist()
    assert 8 not in share.tolist()
    assert quarter.tolist() == [3, 4, 5, 13]  # k = 4 twice, then the lower of k = 3 and 5


def test_top_p_keeps_nothing_when_all_scores_are_zero():
    for include_zero in (True, False):
        kept = kept_indices(np.zeros(4), strategy="top_p", value=0.9, include_zero=include_zero)
        assert kept.tolist() == []


def test_top_p_keeps_nothing_when_the_share_is_below_eps():
    score_P = np.array([0.0005, 0.0003])
    assert kept_indices(score_P, strategy="top_p", value=0.9).tolist() == []
    assert kept_indices(score_P, strategy="top_p", value=0.9, eps=0.0).tolist() == [0, 1]


def test_smallest_stops_at_the_first_zero():
    score_P = np.array([0.3, 0.0, 0.2])
    assert kept_indices(score_P, strategy="top_p", value=0.5, side="smallest").tolist() == []


def test_top_k_counts_all_groups_and_keeps_at_least_one():
    assert kept_indices(np.arange(16.0), strategy="top_k", value=0.25).tolist() == [12, 13, 14, 15]
    assert kept_indices(np.arange(3.0), strategy="top_k", value=0.25).tolist() == [2]
    assert kept_indices(np.zeros(8), strategy="top_k", value=0.25).tolist() == [0, 1]
    score_P = np.array([0.5, 0, 0, 0, 0, 0, 0, 0.3])
    kept = kept_indices(score_P, strategy="top_k", value=0.5, include_zero=False)
    assert kept.tolist() == [0, 7]


def test_no_groups_give_no_groups():
    for strategy in ("none", "top_p", "top_k", "top_k_abs", "min_p"):
        assert kept_indices(np.zeros(0), strategy=strategy, value=0.5).tolist() == []


def test_among_equal_scores_the_lower_index_comes_first():
    score_P = np.array([0.5, 0.25, 0.5, 0.25, 0.5])
    assert kept_indices(score_P, strategy="top_k_abs", value=2).tolist() == [0, 2]
    assert kept_indices(score_P, strategy="top_k_abs", value=3, side="smallest").tolist() == [
        0, 1, 3,
    ]  # fmt: skip


@given(
    score_P=st.lists(st.floats(0, 1), max_size=12, unique=True).map(np.array),
    strategy=st.sampled_from(["top_p", "top_k", "top_k_abs", "min_p"]),
    side=st.sampled_from(["largest", "smallest"]),
    seed=st.integers(0, 99),
)
def test_permuting_groups_with_distinct_scores_permutes_the_result(score_P, strategy, side, seed):
    order = np.random.default_rng(seed).permutation(score_P.size)
    given_options = {"strategy": strategy, "side": side, "value": 0.5}
    kept = kept_indices(score_P, **given_options)
    permuted = kept_indices(score_P[order], **given_options)
    assert np.array_equal(permuted, np.sort(permuted))
    # The sum of a permuted row may differ in its last digit, so compare away from the threshold.
    if strategy == "top_p":
        assert abs(permuted.size - kept.size) <= 1
    else:
        assert sorted(order[permuted].tolist()) == kept.tolist()


@given(st.lists(st.floats(0, 1), max_size=12).map(np.array))
def test_top_p_of_one_with_zeros_equals_no_filter(score_P):
    everything = kept_indices(score_P, strategy="none")
    assert np.array_equal(kept_indices(score_P, strategy="top_p", value=1.0), everything)


def test_a_spread_of_1e_10_is_flat():
    score_P = reward_scores([as_array([0.1] * 7 + [0.1000000001])], metric="reward_variance")
    assert score_P.tolist() == [0.0]


def test_scores_by_metric():
    rewards = [as_array([1, 0, 0, 0]), as_array([1, None, None])]
    assert reward_scores(rewards, metric="reward_std").tolist() == [0.5, 0.0]
    assert reward_scores(rewards, metric="reward_var").tolist() == [0.25, 0.0]
    assert reward_scores(rewards, metric="mean").tolist() == [0.25, 1.0]
    assert reward_scores(rewards, metric="reward_sum").tolist() == [1.0, 1.0]
    assert reward_scores([as_array([None])], metric="reward").tolist() == [0.0]


def test_unknown_names_are_errors_and_never_a_default():
    with pytest.raises(ValueError, match="unknown reward metric"):
        reward_scores([], metric="entropy")
    with pytest.raises(ValueError, match="unknown rollout metric"):
        rollout_scores([], metric="reward")
    with pytest.raises(ValueError, match="finite"):
        kept_indices(np.array([np.nan]), strategy="top_k")


def test_loss_scale_is_the_kept_share_or_its_root():
    assert loss_scale(kept=4, groups=16) == 1.0
    assert loss_scale(kept=4, groups=16, scaling="linear") == 0.25
    assert loss_scale(kept=4, groups=16, scaling="sqrt") == 0.5


def test_the_number_that_decided_is_logged():
    score_P = np.array([0.0, 0.5, 0.25])
    setting = {"value": 0.5, "side": "largest", "include_zero": False, "eps": 0.01}
    assert threshold(score_P, strategy="top_p", **setting) == 0.5 * 0.75 - 0.01
    assert threshold(score_P, strategy="min_p", **setting) == 0.25 - 1e-10
    assert threshold(score_P, strategy="top_k", **setting) is None
    assert threshold(score_P, strategy="top_p", prob_mode="softmax", **setting) is None
    assert threshold(np.zeros(2), strategy="min_p", **setting) is None
    assert threshold(score_P, strategy="top_p", **(setting | {"value": 1.0})) is None
