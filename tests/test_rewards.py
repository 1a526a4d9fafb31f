import numpy as np
import pytest

from rlfe.training.rewards import (
    as_array,
    flat_share,
    is_flat,
    reward,
    shaped,
    successes,
    unparsed,
)
from rlfe.types import Status, Verdict


def verdict(status, detail="", **facts):
    return Verdict(status=status, detail=detail, facts=facts)


def test_a_passed_verdict_is_worth_one_and_every_failure_nothing():
    assert reward(verdict(Status.PASSED)) == 1.0
    for status in (Status.FAILED, Status.TIMEOUT, Status.CRASHED, Status.TRUNCATED):
        assert reward(verdict(status)) == 0.0


def test_what_could_not_be_scored_has_no_reward():
    assert reward(verdict(Status.INFRASTRUCTURE)) is None
    assert reward(verdict(Status.INFRASTRUCTURE), kind="fraction") is None


def test_fraction_is_the_share_of_tests_passed():
    partly = verdict(Status.FAILED, right=3, total=4)
    assert reward(partly, kind="fraction") == 0.75
    assert reward(verdict(Status.SYNTAX_ERROR), kind="fraction") == 0.0
    assert reward(verdict(Status.PASSED), kind="fraction") == 1.0


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown reward"):
        reward(verdict(Status.PASSED), kind="graded")


def test_a_cut_reply_is_unparsed_by_the_status_beneath():
    assert unparsed(verdict(Status.NO_ANSWER))
    assert unparsed(verdict(Status.TRUNCATED, detail="no_answer"))
    assert unparsed(verdict(Status.TRUNCATED, detail="syntax_error: line 3"))
    assert not unparsed(verdict(Status.TRUNCATED, detail="failed"))
    assert not unparsed(verdict(Status.FAILED))


def test_successes_come_from_the_reward_as_judged():
    reward_G = as_array([1, 0.5, None, True, 0])
    assert successes(reward_G) == 2
    assert successes(reward_G, threshold=0.5) == 3


def test_the_penalty_shapes_and_none_stays_none():
    value_G = shaped(
        as_array([1, 0, 0, None]),
        unparsed_G=np.array([False, False, True, True]),
        format_penalty=-0.1,
    )
    assert value_G[:3].tolist() == [1.0, 0.0, -0.1]
    assert np.isnan(value_G[3])


def test_normalisations_of_a_group():
    reward_G = as_array([1, 0, 0, 0])
    assert shaped(reward_G, normalization="mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    np.testing.assert_allclose(
        shaped(reward_G, normalization="mean_std"), [1.499997, -0.499999, -0.499999, -0.499999]
    )


@pytest.mark.parametrize("normalization", ["mean", "mean_std"])
def test_a_flat_group_normalises_to_zeros(normalization):
    assert shaped(as_array([0.1] * 8), normalization=normalization).tolist() == [0.0] * 8
    assert shaped(as_array([]), normalization=normalization).tolist() == []
    assert np.isnan(shaped(as_array([None, None]), normalization=normalization)).all()


def test_flat_is_decided_at_a_spread_of_1e_8():
    assert is_flat(as_array([0.5, 0.5 + 1e-10]))
    assert is_flat(as_array([0.7, None]))
    assert not is_flat(as_array([0.5, 0.5 + 1e-7]))


def test_the_expected_share_of_flat_groups():
    assert flat_share(np.array([0.5, 0.0]), group_size=2) == 0.75
    assert flat_share(np.array([]), group_size=8) == 0.0


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(ValueError, match=r"\(1,\).*\(2,\)"):
        shaped(as_array([1, 0]), unparsed_G=np.array([True]), format_penalty=1.0)
