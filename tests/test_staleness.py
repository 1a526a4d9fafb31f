import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.engines.base import Snapshot
from rlfe.errors import RlfeError
from rlfe.training.staleness import (
    SnapshotQueue,
    behavior_version,
    check_arrival,
    freshness,
    limits,
    unchanged_weights,
)


def snapshot(version):
    return Snapshot(version=version, fingerprint=f"{version:064x}", weights={"v": version})


def test_effective_lags_rise_to_four_and_stay():
    lags = [t - behavior_version(t, lag=4) for t in range(8)]
    assert lags == [0, 1, 2, 3, 4, 4, 4, 4]


@given(lag=st.integers(0, 6), steps=st.integers(1, 30))
def test_step_t_uses_version_t_minus_lag(lag, steps):
    queue = SnapshotQueue(lag=lag)
    for t in range(steps):
        queue.push(snapshot(t))
        assert queue.behavior(t).version == max(0, t - lag)
        assert len(queue.held()) <= lag + 1


@given(lag=st.integers(0, 6), seam=st.integers(0, 20))
def test_a_resumed_run_uses_the_same_versions(lag, seam):
    queue = SnapshotQueue(lag=lag)
    for t in range(seam + 1):
        queue.push(snapshot(t))
    assert [s.version for s in queue.held()] == list(range(max(0, seam - lag), seam + 1))
    resumed = SnapshotQueue(lag=lag)
    for saved in queue.held():
        resumed.push(saved)
    for t in range(seam, seam + 8):
        resumed.push(snapshot(t))
        assert resumed.behavior(t).version == max(0, t - lag)


def test_a_missing_snapshot_is_an_error_and_not_a_fresh_start():
    queue = SnapshotQueue(lag=4)
    queue.push(snapshot(30))
    with pytest.raises(RlfeError, match="needs the weights of version 26; held: 30"):
        queue.behavior(30)


def test_a_sampler_that_keeps_old_weights_is_caught():
    check_arrival(sent="a" * 64, received="a" * 64, version=3)
    with pytest.raises(RlfeError, match="does not hold version 3"):
        check_arrival(sent="a" * 64, received="b" * 64, version=3)


def test_equal_consecutive_versions_are_said_only_after_an_update():
    assert unchanged_weights(previous="a", current="a", version=2, updated=False) is None
    assert unchanged_weights(previous="a", current="b", version=2, updated=True) is None
    assert unchanged_weights(previous=None, current="a", version=0, updated=True) is None
    said = unchanged_weights(previous="a", current="a", version=2, updated=True)
    assert said is not None
    assert "version 2 has the same weights as version 1" in said


def test_limits_depend_on_float32_unless_given():
    assert limits(float32=True) == (1e-3, 1e-3)
    assert limits(float32=False) == (5e-2, 5e-2)
    assert limits(float32=False, fresh_limit=0.2, fresh_clip=0.3) == (0.2, 0.3)


def measured(shift):
    behavior = np.full((2, 3), -1.0, np.float32)
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
    return freshness(behavior + shift, behavior, mask, limit=1e-3, clip_limit=1e-3)


def test_the_same_weights_are_fresh():
    found = measured(0.0)
    assert (found.mean_abs_log_ratio, found.clip_raw, found.ok) == (0.0, 0.0, True)


def test_other_weights_are_not_fresh():
    assert not measured(0.01).ok
    far = measured(0.5)
    assert far.mean_abs_log_ratio == pytest.approx(0.5, abs=1e-6)
    assert far.clip_raw == 1.0


def test_no_tokens_say_nothing():
    nothing = freshness(
        np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1), bool), limit=1e-3, clip_limit=1e-3
    )
    assert nothing.mean_abs_log_ratio is None
    assert nothing.ok


def test_shapes_and_lags_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        freshness(np.zeros(2), np.zeros(3), np.zeros(2, bool), limit=1, clip_limit=1)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        SnapshotQueue(lag=-1)
