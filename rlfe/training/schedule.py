"""The learning rate of a step: a pure function, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def learning_rate(
    *, step: int, total_steps: int, lr: float, schedule: str = "constant", warmup_steps: int = 0
) -> float:
    """Rate of training step `step` (0-based), for all its optimiser steps.

    Warm-up: lr * (step + 1) / warmup_steps. Then `constant`, or from lr at the end of warm-up
    towards 0 at `total_steps` (never reached): `linear`, `cosine`.
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f'unknown schedule "{schedule}"; known: constant, linear, cosine')
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return lr * (1 - done) if schedule == "linear" else lr * 0.5 * (1 + math.cos(math.pi * done))
