"""Uncertainty: sizes, coverage and error rates on simulated evaluations (fixed seeds).

The simulation is that of docs/statistics.md: 378 problems, 160 samples, rates from
Beta(0.35, 0.3), checkpoints that differ by N(0, 0.5) in logit per problem.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.errors import RequestError
from rlfe.eval.paired import (
    benjamini_hochberg,
    compare,
    crossover,
    draw_signs,
    holm,
    max_t_multiplier,
    sign_flip_p,
)
from rlfe.eval.passk import pass_at_all_k
from rlfe.eval.statistics import (
    cluster_standard_error,
    draw_weights,
    hierarchical,
    over_problems,
    over_seeds,
    sampling_only,
    standard_error,
    wilson,
)

P, N = 378, 160
KS = [1, 10, 100, 160]


def rates(source: np.random.Generator, problems: int = P) -> np.ndarray:
    return np.clip(source.beta(0.35, 0.3, problems), 1e-12, 1 - 1e-12)


def moved(source: np.random.Generator, rate_P: np.ndarray) -> np.ndarray:
    logit_P = np.log(rate_P / (1 - rate_P)) + source.normal(0, 0.5, len(rate_P))
    return 1 / (1 + np.exp(-logit_P))


def scores(source: np.random.Generator, rate_P: np.ndarray, n: int = N) -> np.ndarray:
    return pass_at_all_k(n, source.binomial(n, rate_P))


def population_mean(k: int) -> float:
    """E[1 - (1-p)^k] under Beta(a, b) = 1 - B(a, b+k)/B(a, b)."""
    a, b = 0.35, 0.3
    log = math.lgamma(b + k) + math.lgamma(a + b) - math.lgamma(a + b + k) - math.lgamma(b)
    return 1 - math.exp(log)


def test_the_bootstrap_interval_covers_the_population_93_to_97_percent() -> None:
    source = np.random.default_rng(11)
    weights_BP = draw_weights(P, 1000, source)
    truth_K = np.array([population_mean(k) for k in KS])
    hits_K = np.zeros(len(KS))
    for _ in range(600):
        p_PK = scores(source, rates(source))[:, np.array(KS) - 1]
        low_K, high_K = over_problems(p_PK, weights_BP)
        hits_K += (low_K <= truth_K) & (truth_K <= high_K)
    assert (hits_K[:3] / 600 >= 0.93).all(), hits_K
    assert (hits_K[:3] / 600 <= 0.97).all(), hits_K


def test_the_paired_test_errs_4_to_6_percent_of_the_time() -> None:
    source, trials = np.random.default_rng(5), 2500
    wrong_K = np.zeros(2)
    for _ in range(trials):
        rate_P = rates(source, 150)
        a_PK = scores(source, moved(source, rate_P), 20)[:, [0, 9]]
        b_PK = scores(source, moved(source, rate_P), 20)[:, [0, 9]]
        wrong_K += sign_flip_p(a_PK - b_PK, draw_signs(150, source, 199)) <= 0.05
    assert (wrong_K / trials >= 0.04).all(), wrong_K
    assert (wrong_K / trials <= 0.06).all(), wrong_K


TABLE_CK = pass_at_all_k(N, np.arange(N + 1))[:, np.array(KS) - 1]  # pass@k of every count


def shown_scores(source: np.random.Generator, rate_P: np.ndarray) -> np.ndarray:
    """Per-problem pass@k of a made-up checkpoint at the shown k only, [P, 4]."""
    values_PK: np.ndarray = TABLE_CK[source.binomial(N, rate_P)]
    return values_PK


@pytest.mark.slow
def test_intervals_cover_93_to_97_percent_at_full_size() -> None:
    """378 problems, 160 samples, B = 10000: a score over problems, and a paired difference.

    The truth of a difference is 0: both checkpoints move by the same law. Fifty trials at a time
    share one product with the draws.
    """
    source, rounds, size = np.random.default_rng(21), 40, 50
    weights_BP = draw_weights(P, 10_000, source)
    truth_K = np.array([population_mean(k) for k in KS])
    score_K, paired_K = np.zeros(len(KS)), np.zeros(len(KS))
    for _ in range(rounds):
        values, differences = [], []
        for _ in range(size):
            rate_P = rates(source)
            values.append(shown_scores(source, rate_P))
            a_PK, b_PK = (shown_scores(source, moved(source, rate_P)) for _ in range(2))
            differences.append(a_PK - b_PK)
        for columns, truth, hits_K in (
            (values, truth_K, score_K),
            (differences, np.zeros(len(KS)), paired_K),
        ):
            low_C, high_C = over_problems(np.concatenate(columns, axis=1), weights_BP)
            low_TK, high_TK = low_C.reshape(size, -1), high_C.reshape(size, -1)
            hits_K += ((low_TK <= truth) & (truth <= high_TK)).sum(axis=0)
    for hits_K in (score_K, paired_K):
        shares = (score_K / rounds / size, paired_K / rounds / size)
        assert (hits_K / rounds / size >= 0.93).all(), shares
        assert (hits_K / rounds / size <= 0.97).all(), shares


@pytest.mark.slow
def test_the_paired_test_errs_4_to_6_percent_of_the_time_at_full_size() -> None:
    """378 problems, 160 samples; the signs are drawn anew for every hundred trials.

    At k = n a problem counts 0 or 1 and few change, so the test is a coarse one and errs less.
    """
    source, trials = np.random.default_rng(22), 4000
    wrong_K = np.zeros(len(KS))
    for trial in range(trials):
        if trial % 100 == 0:
            signs_BP = draw_signs(P, source, 999)
        rate_P = rates(source)
        a_PK, b_PK = (shown_scores(source, moved(source, rate_P)) for _ in range(2))
        wrong_K += sign_flip_p(a_PK - b_PK, signs_BP) <= 0.05
    assert (wrong_K[:3] / trials >= 0.04).all(), wrong_K / trials
    assert (wrong_K / trials <= 0.06).all(), wrong_K / trials


def test_pairing_makes_errors_as_small_as_stated() -> None:
    source = np.random.default_rng(2)
    rate_P = rates(source)
    a_PK, b_PK = (scores(source, moved(source, rate_P)) for _ in range(2))
    se_K = 100 * standard_error(a_PK - b_PK)[[0, 9, 99, 159]]
    assert se_K == pytest.approx([0.7, 0.75, 0.9, 1.05], abs=0.3)
    assert 100 * 1.96 * standard_error(a_PK)[0] == pytest.approx(4, abs=0.5)


def test_sampling_only_error_is_that_of_repeated_sampling() -> None:
    source = np.random.default_rng(3)
    rate_P = rates(source)
    means_BK = np.array([scores(source, rate_P).mean(axis=0) for _ in range(600)])
    truth_K = means_BK.std(axis=0, ddof=1)
    found = sampling_only(N, source.binomial(N, rate_P), source, draws=300)
    for k in (1, 10, 80):
        assert found.se_K[k - 1] == pytest.approx(truth_K[k - 1], rel=0.15)
        assert found.method_K[k - 1] == "sampling only"
    assert found.method_K[80] == "sampling only, parametric bootstrap"
    assert found.se_K[119] == pytest.approx(truth_K[119], rel=0.5)


def test_sampling_only_variance_is_unbiased_for_a_small_case() -> None:
    source, n = np.random.default_rng(8), 6
    rate_P = np.array([0.1, 0.5, 0.9])
    means = np.array([scores(source, rate_P, n)[:, 1].mean() for _ in range(20000)])
    estimates = [
        sampling_only(n, source.binomial(n, rate_P), source, draws=2).se_K[1] ** 2
        for _ in range(4000)
    ]
    assert np.mean(estimates) == pytest.approx(means.var(ddof=1), rel=0.1)


def test_one_sample_has_no_unbiased_sampling_error_and_says_so() -> None:
    found = sampling_only(1, np.array([0, 1, 1]), np.random.default_rng(0))
    assert found.method_K == ("sampling only, parametric bootstrap",)
    assert found.se_K[0] > 0


def test_clusters_of_one_change_nothing_and_copies_widen_the_error() -> None:
    p_PK = scores(np.random.default_rng(1), rates(np.random.default_rng(1), 40), 8)
    single = cluster_standard_error(p_PK, [str(i) for i in range(40)])
    assert single == pytest.approx(standard_error(p_PK), rel=1e-12)
    doubled_PK = np.repeat(p_PK, 2, axis=0)
    twice = cluster_standard_error(doubled_PK, [str(i // 2) for i in range(80)])
    assert twice == pytest.approx(single, rel=1e-12)
    assert np.isnan(cluster_standard_error(p_PK, ["a"] * 40)).all()
    with pytest.raises(ValueError, match="3 cluster labels"):
        cluster_standard_error(p_PK, ["a", "b", "c"])


def pair(seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    rate_P = rates(source, 60)
    other_P = np.clip(moved(source, rate_P) + shift, 0, 1)
    return scores(source, rate_P, 16), scores(source, other_P, 16)


@given(st.integers(0, 10_000))
def test_swapping_a_and_b_flips_the_sign_and_keeps_the_p_value(seed: int) -> None:
    a_PK, b_PK = pair(seed)
    weights_BP = draw_weights(60, 200, np.random.default_rng(0))
    signs_BP = draw_signs(60, np.random.default_rng(4), 500)
    one = compare(a_PK, b_PK, weights_BP, signs_BP)
    two = compare(b_PK, a_PK, weights_BP, signs_BP)
    assert np.allclose(one.effect_K, -two.effect_K, atol=1e-15)
    assert (one.p_K == two.p_K).all()
    assert np.allclose(one.low_K, -two.high_K, atol=1e-12)
    assert one.multiplier == pytest.approx(two.multiplier, abs=1e-9)


def test_a_against_a_is_no_difference_without_a_division_by_zero() -> None:
    a_PK, _ = pair(1)
    source = np.random.default_rng(0)
    same = compare(a_PK, a_PK, draw_weights(60, 100, source), draw_signs(60, source, 100))
    assert (same.effect_K == 0).all()
    assert (same.p_K == 1).all()
    assert not any(same.differs(k) for k in range(1, 17))
    assert crossover(same) is None


def test_a_simultaneous_band_is_wider_than_a_pointwise_interval() -> None:
    source = np.random.default_rng(6)
    rate_P = rates(source)
    a_PK, b_PK = (scores(source, moved(source, rate_P)) for _ in range(2))
    found = compare(a_PK, b_PK, draw_weights(P, 2000, source), draw_signs(P, source, 99))
    assert 2.1 < found.multiplier < 2.8
    assert found.detectable_K == pytest.approx(2.8 * found.se_K)


def test_bands_miss_the_truth_somewhere_about_5_percent_of_the_time() -> None:
    source, missed = np.random.default_rng(12), 0
    weights_BP = draw_weights(200, 400, source)
    columns = [0, 3, 7, 15]
    for _ in range(300):
        rate_P = rates(source, 200)
        a_PK = scores(source, moved(source, rate_P), 16)[:, columns]
        b_PK = scores(source, moved(source, rate_P), 16)[:, columns]
        d_PK = a_PK - b_PK
        effect_K, se_K = d_PK.mean(axis=0), standard_error(d_PK)
        multiplier = max_t_multiplier(weights_BP @ d_PK / 200, effect_K, se_K)
        missed += bool((np.abs(effect_K) > multiplier * se_K).any())
    assert 0.025 <= missed / 300 <= 0.08, missed


def test_a_clear_gain_is_found_and_its_crossover_is_the_first_k() -> None:
    a_PK, b_PK = pair(3, shift=-0.3)
    source = np.random.default_rng(0)
    found = compare(b_PK, a_PK, draw_weights(60, 500, source), draw_signs(60, source))
    assert found.differs(1)
    assert found.p_K[0] < 0.001
    assert crossover(found) == 1


def test_what_is_not_paired_is_refused() -> None:
    a_PK, b_PK = pair(1)
    source = np.random.default_rng(0)
    weights_BP, signs_BP = draw_weights(60, 10, source), draw_signs(60, source, 10)
    with pytest.raises(RequestError, match="different problems"):
        compare(a_PK, b_PK, weights_BP, signs_BP, problems=(["a"], ["b"]))
    with pytest.raises(RequestError, match="not paired"):
        compare(a_PK, b_PK[:, :8], weights_BP, signs_BP)
    with pytest.raises(RequestError, match="two problems"):
        compare(a_PK[:1], b_PK[:1], weights_BP[:, :1], signs_BP)


def test_holm_and_benjamini_hochberg_on_known_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert benjamini_hochberg([0.01, 0.02, 0.03, 0.9]) == [True, True, True, False]
    assert benjamini_hochberg([0.04, 0.6]) == [False, False]


def test_seeds_get_a_t_interval_and_one_seed_gets_none() -> None:
    two = over_seeds([0.5, 0.6])
    assert two.mean == pytest.approx(0.55)
    assert (two.low, two.high) == pytest.approx((0.55 - 12.7062 * 0.05, 0.55 + 12.7062 * 0.05))
    assert two.range == pytest.approx(0.1)
    assert over_seeds([0.5]) == (0.5, None, None, 0.0, 1)
    with pytest.raises(ValueError, match="no seeds"):
        over_seeds([])
    assert over_seeds([0.1] * 40).low == pytest.approx(0.1)


def test_the_hierarchical_interval_contains_seed_noise() -> None:
    source = np.random.default_rng(9)
    rate_P = rates(source, 100)
    runs = [np.clip(rate_P + shift, 0, 1) for shift in (-0.1, 0.0, 0.1)]
    p_SPK = np.stack([scores(source, rate_P_s, 8) for rate_P_s in runs])
    wide = hierarchical(p_SPK, source, draws=800)
    narrow = hierarchical(p_SPK[1:2], source, draws=800)
    assert (wide.high_K - wide.low_K)[0] > 1.2 * (narrow.high_K - narrow.low_K)[0]


def test_wilson_stays_inside_0_and_1() -> None:
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(1, 2) == pytest.approx((0.0945, 0.9055), abs=1e-4)
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)
