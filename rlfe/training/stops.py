"""Rules that end a run early: rewards below a floor, empty steps, non-finite gradients.

What: counters and the sentence that ends a run (exit 3). Not here: what the loop does then (it
saves an endpoint, or for a diverged run keeps the last good checkpoint). docs/algorithms.md 2.6,
12. All rules but the last are off unless asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Limits. `StopRules(reward_below=0.05, window=20)`; None and 0 mean off."""

    reward_below: float | None = None
    window: int = 20
    empty_stop_steps: int = 0
    max_nonfinite: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a run ends. `status` is what its record says: collapsed, empty or diverged."""

    status: str
    reason: str


class StopCounters:
    """What the rules have seen so far; call `observe` once per finished step."""

    def __init__(self, rules: StopRules) -> None:
        self.rules = rules
        self.empty = 0
        self.consecutive_empty = 0
        self.nonfinite = 0
        self.consecutive_nonfinite = 0
        self._rewards: deque[float] = deque(maxlen=rules.window)

    def observe(
        self,
        *,
        step: int,
        reward_mean: float | None,
        empty: bool,
        optim_steps: int = 0,
        skipped: int = 0,
    ) -> Stop | None:
        """Count a finished step (1-based number) and say whether the run ends.

        Args:
            reward_mean: Over all sampled rollouts of the step; None when none was scored.
            empty: The filter kept nothing.
            optim_steps, skipped: Optimiser steps tried, and skipped as non-finite, in order of
                the step; a step counts as non-finite if any was skipped.
        """
        self.empty += empty
        self.consecutive_empty = self.consecutive_empty + 1 if empty else 0
        self.nonfinite += skipped
        if skipped:
            self.consecutive_nonfinite += 1
        elif optim_steps:
            self.consecutive_nonfinite = 0
        if reward_mean is not None:
            self._rewards.append(reward_mean)
        return self.standing(step)

    def standing(self, step: int) -> Stop | None:
        """The rule that has ended the run after `step` steps: also of a run that is resumed."""
        return self._diverged(step) or self._starved(step) or self._collapsed(step)

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` restores it."""
        return {
            "empty": self.empty,
            "consecutive_empty": self.consecutive_empty,
            "nonfinite": self.nonfinite,
            "consecutive_nonfinite": self.consecutive_nonfinite,
            "rewards": list(self._rewards),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.empty = state["empty"]
        self.consecutive_empty = state["consecutive_empty"]
        self.nonfinite = state["nonfinite"]
        self.consecutive_nonfinite = state["consecutive_nonfinite"]
        self._rewards = deque(state["rewards"], maxlen=self.rules.window)

    def metrics(self) -> dict[str, int]:
        return {
            "filter/consecutive_empty": self.consecutive_empty,
            "filter/empty_total": self.empty,
            "train/nonfinite": self.nonfinite,
        }

    def _diverged(self, step: int) -> Stop | None:
        if self.consecutive_nonfinite < self.rules.max_nonfinite:
            return None
        return Stop(
            status="diverged",
            reason=f"{self.consecutive_nonfinite} steps in a row up to step {step} had a "
            "non-finite loss or gradient (train.max_nonfinite)",
        )

    def _starved(self, step: int) -> Stop | None:
        limit = self.rules.empty_stop_steps
        if limit == 0 or self.consecutive_empty < limit:
            return None
        return Stop(
            status="empty",
            reason=f"the filter kept nothing for {self.consecutive_empty} steps in a row up to "
            f"step {step} (filter.empty_stop_steps)",
        )

    def _collapsed(self, step: int) -> Stop | None:
        floor = self.rules.reward_below
        if floor is None or len(self._rewards) < self.rules.window:
            return None
        mean = sum(self._rewards) / len(self._rewards)
        if mean >= floor:
            return None
        return Stop(
            status="collapsed",
            reason=f"the mean reward of the last {self.rules.window} steps up to step {step} is "
            f"{mean:.4f}, below stop.reward_below = {floor:g}",
        )
