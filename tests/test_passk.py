"""pass@k: exact values, exact refusals."""

import time
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.errors import PartialError, RequestError
from rlfe.eval.passk import benchmark_pass_at_k, pass_at_all_k, pass_at_k, shown_ks


def exact(n: int, c: int, k: int) -> float:
    return float(1 - Fraction(comb(n - c, k), comb(n, k)))


def test_known_values() -> None:
    assert pass_at_k(160, 1, 128) == pytest.approx(0.8, abs=1e-12)
    assert pass_at_k(160, 3, 10) == pytest.approx(0.177066, abs=1e-6)
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(200, 1, 1) == pytest.approx(0.005, abs=1e-15)
    assert pass_at_k(1_000_000, 1, 1) == pytest.approx(1e-6, rel=1e-12)
    assert pass_at_k(2000, 1000, 500) == 1.0


@pytest.mark.parametrize("n", [1, 2, 7, 8, 40, 160, 200])
def test_every_value_equals_the_rational_one(n: int) -> None:
    correct_P = np.arange(n + 1)
    got_PK = pass_at_all_k(n, correct_P)
    for c in range(n + 1):
        want = [exact(n, c, k) for k in range(1, n + 1)]
        assert np.abs(got_PK[c] - want).max() < 1e-12
        assert max(abs(pass_at_k(n, c, k) - want[k - 1]) for k in range(1, n + 1)) < 1e-12


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_grows_with_k_and_with_right_samples(n_c: tuple[int, int]) -> None:
    n, c = n_c
    p_PK = pass_at_all_k(n, np.array([c, c + 1]))
    assert (np.diff(p_PK, axis=1) >= 0).all()
    assert (p_PK[1] >= p_PK[0]).all()
    assert p_PK[0, 0] == pytest.approx(c / n, abs=1e-15)
    assert p_PK[1, -1] == 1.0


@pytest.mark.parametrize(
    ("n", "c", "k"), [(2, 0, 5), (16, 16, 64), (8, 9, 1), (8, -1, 1), (0, 0, 1), (8, 1, 0)]
)
def test_nonsense_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(RequestError):
        pass_at_k(n, c, k)


def test_a_matrix_with_an_impossible_count_is_refused() -> None:
    with pytest.raises(RequestError, match=r"0\.\.8"):
        pass_at_all_k(8, np.array([3, 9]))
    with pytest.raises(RequestError, match="n=0"):
        pass_at_all_k(0, np.array([0]))


def test_no_problems_give_an_empty_matrix() -> None:
    assert pass_at_all_k(8, np.array([], dtype=int)).shape == (0, 8)


def test_a_missing_problem_never_leaves_the_mean() -> None:
    assert benchmark_pass_at_k([(160, 0), (160, 160), (160, 80)], problems=3, k=1) == 0.5
    with pytest.raises(PartialError, match="1 of 4 problems have no samples"):
        benchmark_pass_at_k([(8, 0), (8, 8), (8, 4)], problems=4, k=1)
    with pytest.raises(PartialError, match="between 8 and 16"):
        benchmark_pass_at_k([(8, 0), (16, 8)], problems=2, k=1)
    with pytest.raises(PartialError, match="k=10"):
        benchmark_pass_at_k([(1, 1)], problems=1, k=10)
    with pytest.raises(PartialError):
        benchmark_pass_at_k([], problems=378, k=1)


def test_shown_ks_stop_at_n() -> None:
    assert shown_ks(8) == (1, 5, 8)
    assert shown_ks(160) == (1, 5, 10, 50, 100, 160)
    assert shown_ks(160, (128, 8)) == (8, 128)
    with pytest.raises(RequestError, match="k=64"):
        shown_ks(16, (1, 64))


def test_all_k_of_a_checkpoint_take_milliseconds() -> None:
    counts_P = np.random.default_rng(0).integers(0, 161, 378)
    spent = []
    for _ in range(5):
        start = time.process_time()
        assert pass_at_all_k(160, counts_P).shape == (378, 160)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.05
