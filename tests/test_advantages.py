import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlfe.errors import RequestError
from rlfe.training.advantages import BY_NAME, advantages
from rlfe.training.rewards import as_array
from tests.reference import ATOL, RTOL, reference

GRADED = [name for name in BY_NAME if name != "maxrl"]
binary = st.lists(st.sampled_from([0.0, 1.0]), max_size=16).map(np.array)
graded = st.lists(st.floats(-100, 100, width=32), max_size=16).map(np.array)
# our name, options -> the peers' columns that are the same estimator (reference/README.md)
SAME = [
    ("grpo", {}, ["study3.grpo", "verl.grpo", "verl.grpo_vectorized", "ragen.grpo", "skyrl.grpo"]),
    ("grpo", {"eps": 1e-4}, ["trl_1.16.scale_rewards=group"]),
    ("grpo", {"eps": 1e-9}, ["openrlhf.group_norm"]),
    (
        "grpo",
        {"ddof": 0, "eps": 1e-8},
        ["tailrl.grpo", "open_instruct.standard", "trl_1.16.async_grpo"],
    ),
    (
        "centered",
        {},
        [
            "tinker_cookbook.centered",
            "open_instruct.centered",
            "prime_rl.grpo",
            "ragen.grpo_no_std",
        ],
    ),
    ("dr_grpo", {}, ["tinker_cookbook.centered", "trl_1.16.scale_rewards=none(dr_grpo)"]),
    ("rloo", {}, ["tailrl.rloo", "verl.rloo", "verl.rloo_vectorized", "skyrl.rloo"]),
    ("maxrl", {}, ["study3.maxrl", "prime_rl.max_rl", "tailrl.binary_maxrl"]),
    ("tailrl", {}, ["tailrl.tailrl"]),
]
# Where rlfe differs on purpose: float32 residue of a flat group, N = 1, 5 % error in float32.
ON_PURPOSE = {"all_equal_nonbinary", "N1_success", "N1_failure", "near_equal"}


@pytest.mark.parametrize(
    ("name", "options", "column"),
    [(name, options, column) for name, options, columns in SAME for column in columns],
)
def test_agrees_with_the_numbers_of_the_peers(name, options, column):
    compared = 0
    for case in reference("advantages")["cases"]:
        reward_G = np.array(case["rewards"])
        if case["name"] in ON_PURPOSE or column not in case["out"]:
            continue
        if name == "maxrl" and not np.isin(reward_G, [0, 1]).all():
            continue
        expected = np.array(case["out"][column], np.float64)
        # Float32 sources lose digits of (r - mean) where rewards are large.
        scale = max(1.0, float(np.abs(reward_G).max()))
        np.testing.assert_allclose(
            advantages(name, reward_G, **options),
            expected,
            rtol=RTOL,
            atol=ATOL * scale,
            err_msg=case["name"],
        )
        compared += 1
    assert compared >= 13


def test_agrees_with_groups_of_a_token_level_batch():
    column_of = {"verl.grpo": "grpo", "verl.grpo_vectorized": "grpo", "verl.rloo": "rloo"}
    compared = 0
    for case in reference("advantages")["multi_group_cases"]:
        name = column_of.get(case["name"])
        if name is None:
            continue
        reward_B = np.sum(case["token_level_rewards"], axis=1)
        group_B = np.array(case["group_ids"])
        for group in np.unique(group_B):
            rows = np.nonzero(group_B == group)[0]
            if rows.size > 1:
                first_B = np.array(case["advantages"], np.float64)[rows, 0]
                np.testing.assert_allclose(
                    advantages(name, reward_B[rows]), first_B, rtol=RTOL, atol=ATOL
                )
                compared += 1
    assert compared == 9


def test_agrees_with_a_whole_step_of_trl_with_unscored_rollouts():
    run = reference("trl_trainer_run")
    rewards = np.array([as_array(run["rewards"])]).reshape(8, 8)
    scaled = np.concatenate([advantages("grpo", reward_G, eps=1e-4) for reward_G in rewards])
    plain = np.concatenate([advantages("centered", reward_G) for reward_G in rewards])
    expected = run["advantages_by_scale_rewards"]
    np.testing.assert_allclose(scaled, expected["group"], rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(plain, expected["none"], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    ("k", "right", "wrong"),
    [
        (1, 2.474867, -0.353552),
        (2, 1.620182, -0.540061),
        (3, 1.207612, -0.724567),
        (4, 0.935413, -0.935413),
        (5, 0.724567, -1.207612),
        (6, 0.540061, -1.620182),
        (7, 0.353552, -2.474867),
    ],
)
def test_grpo_for_k_successes_of_eight(k, right, wrong):
    advantage_G = advantages("grpo", np.array([1.0] * k + [0.0] * (8 - k)))
    np.testing.assert_allclose(advantage_G, [right] * k + [wrong] * (8 - k), atol=5e-7)


def test_maxrl_for_k_successes_of_eight():
    masses = []
    for k in range(1, 8):
        advantage_G = advantages("maxrl", np.array([1] * k + [0] * (8 - k)))
        np.testing.assert_allclose(advantage_G, [8 / k - 1] * k + [-1] * (8 - k))
        masses.append(np.abs(advantage_G).sum())
    np.testing.assert_allclose(masses, [14, 12, 10, 8, 6, 4, 2])


def test_maxrl_refuses_other_rewards_than_0_and_1():
    with pytest.raises(RequestError, match="rewards 0 and 1"):
        advantages("maxrl", np.array([0.5, 1, 0, 0]))
    with pytest.raises(RequestError, match=r"has 0\.5"):
        advantages("maxrl", np.array([0.5, 0.5]))


def test_tailrl_of_the_worked_example():
    # gaps 0 (leaves with the mean), 1, 2 times 3/3, 3/2, 3/1: 0, 1.5, 7.5 before centring
    np.testing.assert_allclose(advantages("tailrl", np.array([0.0, 1.0, 3.0])), [-3.0, -1.5, 4.5])


def test_near_equal_rewards_keep_every_digit():
    advantage_G = advantages("grpo", np.array([0.5] * 7 + [0.500001]))
    np.testing.assert_allclose(advantage_G[:7], -0.092350, atol=5e-7)


@pytest.mark.parametrize("name", BY_NAME)
def test_degenerate_groups_give_exact_zeros(name):
    for value in (0.0, 1.0):
        assert advantages(name, np.array([value] * 8)).tolist() == [0.0] * 8
        assert advantages(name, np.array([value])).tolist() == [0.0]
    assert advantages(name, np.array([])).tolist() == []
    assert advantages(name, as_array([None, None])).tolist() == [0.0, 0.0]
    assert advantages(name, as_array([1.0, None, None])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", GRADED)
@pytest.mark.parametrize("value", [0.1, 0.7])
def test_flat_float32_groups_give_exact_zeros(name, value):
    assert advantages(name, np.full(8, value, np.float32)).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", GRADED)
@given(reward_G=graded)
def test_advantages_are_finite_and_sum_to_zero(name, reward_G):
    advantage_G = advantages(name, reward_G)
    size = max(1.0, float(np.abs(advantage_G).max(initial=0)))
    assert np.isfinite(advantage_G).all()
    assert abs(advantage_G.sum()) <= 1e-6 * max(1, reward_G.size) * size


@pytest.mark.parametrize("name", BY_NAME)
@given(reward_G=binary, seed=st.integers(0, 99))
def test_permuting_rollouts_permutes_advantages(name, reward_G, seed):
    order = np.random.default_rng(seed).permutation(reward_G.size)
    np.testing.assert_allclose(
        advantages(name, reward_G[order]), advantages(name, reward_G)[order], atol=1e-12
    )


@given(reward_G=binary)
def test_tailrl_is_maxrl_on_binary_rewards(reward_G):
    np.testing.assert_allclose(
        advantages("tailrl", reward_G), advantages("maxrl", reward_G), atol=1e-12
    )


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_tailrl_is_rloo_for_two_rollouts(first, second):
    pair_G = np.array([first, second])
    np.testing.assert_allclose(advantages("tailrl", pair_G), advantages("rloo", pair_G), atol=1e-9)


@given(reward_G=binary, ddof=st.sampled_from([0, 1]))
def test_maxrl_is_grpo_times_spread_over_mean(reward_G, ddof):
    assume(0 < reward_G.sum() < reward_G.size)
    factor = reward_G.std(ddof=ddof) / reward_G.mean()
    grpo = advantages("grpo", reward_G, ddof=ddof, eps=0.0)
    np.testing.assert_allclose(advantages("maxrl", reward_G), grpo * factor, atol=1e-12)


def test_grpo_does_not_see_a_large_offset():
    reward_G = np.array([1.0, 0, 0.25, 0.5])
    np.testing.assert_allclose(
        advantages("grpo", reward_G + 1e6), advantages("grpo", reward_G), atol=1e-6
    )


@given(reward_G=graded, factor=st.floats(0.125, 8), shift=st.floats(-4, 4))
def test_tailrl_is_homogeneous_and_shift_invariant(reward_G, factor, shift):
    assume(reward_G.size == 0 or np.ptp(reward_G) > 1e-3)
    base = advantages("tailrl", reward_G)
    size = 1e-9 * max(1.0, float(np.abs(base).max(initial=0)))
    scaled = advantages("tailrl", reward_G * factor)
    np.testing.assert_allclose(scaled, base * factor, atol=size * 10)
    np.testing.assert_allclose(advantages("tailrl", reward_G + shift), base, atol=size)


def test_unscored_rollouts_do_not_count():
    with_none = advantages("grpo", as_array([1, None, 0, 0, None, 0]))
    np.testing.assert_allclose(
        with_none[[0, 2, 3, 5]], advantages("grpo", np.array([1.0, 0, 0, 0]))
    )
    assert with_none[[1, 4]].tolist() == [0.0, 0.0]


def test_an_unknown_estimator_and_a_matrix_are_refused():
    with pytest.raises(ValueError, match="unknown advantage"):
        advantages("gae", np.zeros(2))
    with pytest.raises(ValueError, match="one group at a time"):
        advantages("grpo", np.zeros((2, 2)))
