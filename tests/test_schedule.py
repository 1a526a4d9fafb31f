import pytest

from rlfe.training.schedule import learning_rate


def rates(schedule, warmup_steps=0):
    return [
        learning_rate(step=t, total_steps=4, lr=8.0, schedule=schedule, warmup_steps=warmup_steps)
        for t in range(4)
    ]


def test_constant_is_constant():
    assert rates("constant") == [8.0] * 4


def test_linear_falls_towards_zero_at_the_end():
    assert rates("linear") == [8.0, 6.0, 4.0, 2.0]


def test_cosine_is_half_way_in_the_middle():
    assert rates("cosine")[0] == 8.0
    assert rates("cosine")[2] == pytest.approx(4.0)


def test_warm_up_rises_to_the_rate():
    assert rates("constant", warmup_steps=4) == [2.0, 4.0, 6.0, 8.0]
    assert rates("linear", warmup_steps=2) == [4.0, 8.0, 8.0, 4.0]


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="unknown schedule"):
        learning_rate(step=0, total_steps=1, lr=1.0, schedule="step")
