"""The lag of the sampler behind the trainer, and proofs that it is the stated one.

What: which version a step samples from, the queue of snapshots, the fingerprint of weights, and
the guards as functions of numbers. Not here: taking and loading snapshots (engines). Definitions:
docs/algorithms.md 8.

Try it: `[behavior_version(step, lag=4) for step in range(7)]` -> 0, 0, 0, 0, 0, 1, 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfe.engines.base import Snapshot
from rlfe.errors import RlfeError

CHUNK = 1 << 24  # elements summed at a time: bounds the int64 copy of a large embedding
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


def fingerprint(tensors: Mapping[str, Any]) -> str:
    """SHA-256 over all tensors in name order, exact on any device and for torch and numpy alike.

    Per tensor: name, dtype, shape, sum of bit patterns, sum of pattern x position (row-major, from
    0), both wrapping int64; a pattern is the element's bits as a signed integer of its width.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = "x".join(str(size) for size in tensor.shape)
        plain, weighted = _sums(tensor)
        digest.update("\x1f".join([name, dtype, shape, str(plain), str(weighted)]).encode())
        digest.update(b"\n")
    return digest.hexdigest()


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


def _sums(tensor: Any) -> tuple[int, int]:
    pieces = _numpy_pieces(tensor) if isinstance(tensor, np.ndarray) else _torch_pieces(tensor)
    plain = weighted = 0
    for piece_plain, piece_weighted in pieces:
        plain, weighted = plain + piece_plain, weighted + piece_weighted
    return _wrapped(plain), _wrapped(weighted)


def _numpy_pieces(array: np.ndarray) -> Iterable[tuple[int, int]]:
    flat = np.ascontiguousarray(array).reshape(-1).view(f"i{array.dtype.itemsize}")
    for start in range(0, flat.size, CHUNK):
        pattern = flat[start : start + CHUNK].astype(np.int64)
        position = np.arange(start, start + pattern.size, dtype=np.int64)
        yield int(pattern.sum()), int((pattern * position).sum())


def _torch_pieces(tensor: Any) -> Iterable[tuple[int, int]]:
    import torch

    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().reshape(-1).view(integer[tensor.element_size()])
    for start in range(0, flat.numel(), CHUNK):
        pattern = flat[start : start + CHUNK].to(torch.int64)
        position = torch.arange(start, start + pattern.numel(), device=pattern.device)
        yield int(pattern.sum().item()), int((pattern * position).sum().item())


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
