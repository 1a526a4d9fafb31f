"""The lag of the sampler behind the trainer, and proofs that it is the stated one.

What: which version a step samples from, the queue of snapshots, and the guards as functions of
numbers. Not here: taking, fingerprinting and loading snapshots (engines). docs/algorithms.md 8.

Try it: `[behavior_version(step, lag=4) for step in range(7)]` -> 0, 0, 0, 0, 0, 1, 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlfe.engines.base import Snapshot
from rlfe.errors import RlfeError

FLOAT32_LIMIT, FLOAT32_CLIP = 1e-3, 1e-3
OTHER_LIMIT, OTHER_CLIP = 5e-2, 5e-2  # bf16 vLLM against a bf16-autocast trainer: 0.034 measured


def behavior_version(step: int, *, lag: int) -> int:
    """Version that step `step` (0-based) samples from: max(0, step - lag)."""
    return max(0, step - lag)


class SnapshotQueue:
    """The snapshots of versions max(0, N-lag)..N; after a resume, `push` them again in order."""

    def __init__(self, *, lag: int) -> None:
        if lag < 0:
            raise ValueError(f"lag has to be at least 0, got {lag}")
        self.lag = lag
        self._snapshots: dict[int, Snapshot] = {}

    def push(self, snapshot: Snapshot) -> None:
        """Add the weights at the start of step `snapshot.version`; forgets what no step needs."""
        self._snapshots[snapshot.version] = snapshot
        first = behavior_version(snapshot.version, lag=self.lag)
        for version in [known for known in self._snapshots if known < first]:
            del self._snapshots[version]

    def behavior(self, step: int) -> Snapshot:
        """The snapshot that step `step` samples from."""
        version = behavior_version(step, lag=self.lag)
        if version not in self._snapshots:
            held = ", ".join(str(known) for known in self._snapshots) or "none"
            raise RlfeError(
                f"step {step + 1} needs the weights of version {version}; held: {held}",
                hint="the saved state lacks a snapshot: resume from a complete state/",
            )
        return self._snapshots[version]

    def held(self) -> list[Snapshot]:
        """All snapshots, oldest first (what a resumable state saves)."""
        return [self._snapshots[version] for version in sorted(self._snapshots)]


def check_arrival(*, sent: str, received: str, version: int) -> None:
    """Guard 1: the sampler holds exactly the weights of `version`.

    Raises:
        RlfeError: The run must end: its samples are not from the policy it says.
    """
    if sent != received:
        raise RlfeError(
            f"the sampler does not hold version {version}: fingerprint {received[:12]}, "
            f"expected {sent[:12]}",
            hint="the engine kept old weights or changed them while loading; resume to try again",
        )


def unchanged_weights(
    *, previous: str | None, current: str, version: int, updated: bool
) -> str | None:
    """Guard 2: a sentence when an applied update (gradient not 0) left the weights as they were."""
    if previous is None or not updated or previous != current:
        return None
    return (
        f"version {version} has the same weights as version {version - 1} although it was trained"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """Guards 4 and 5: what was measured, against which limit. Absent (None) without tokens."""

    mean_abs_log_ratio: float | None
    clip_raw: float | None
    limit: float
    clip_limit: float

    @property
    def ok(self) -> bool:
        near = self.mean_abs_log_ratio is None or self.mean_abs_log_ratio <= self.limit
        return near and (self.clip_raw is None or self.clip_raw < self.clip_limit)


def limits(
    *, float32: bool, fresh_limit: float | None = None, fresh_clip: float | None = None
) -> tuple[float, float]:
    """(`lag.fresh_limit`, `lag.fresh_clip`) as given, else by whether both sides are float32."""
    limit, clip = (FLOAT32_LIMIT, FLOAT32_CLIP) if float32 else (OTHER_LIMIT, OTHER_CLIP)
    return (
        limit if fresh_limit is None else fresh_limit,
        clip if fresh_clip is None else fresh_clip,
    )


def freshness(
    logp_BL: np.ndarray,
    behavior_logp_BL: np.ndarray,
    mask_BL: np.ndarray,
    *,
    limit: float,
    clip_limit: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Freshness:
    """Teacher-forced log-probabilities against those stored while sampling, masked tokens only."""
    if not logp_BL.shape == behavior_logp_BL.shape == mask_BL.shape:
        raise ValueError(
            f"shapes differ: logp {logp_BL.shape}, behavior {behavior_logp_BL.shape}, "
            f"mask {mask_BL.shape}"
        )
    difference_T = logp_BL[mask_BL].astype(np.float64) - behavior_logp_BL[mask_BL]
    if difference_T.size == 0:
        return Freshness(mean_abs_log_ratio=None, clip_raw=None, limit=limit, clip_limit=clip_limit)
    ratio_T = np.exp(np.clip(difference_T, -700, 700))
    outside = (ratio_T < 1 - clip_low) | (ratio_T > 1 + clip_high)
    return Freshness(
        mean_abs_log_ratio=float(np.abs(difference_T).mean()),
        clip_raw=float(outside.mean()),
        limit=limit,
        clip_limit=clip_limit,
    )
