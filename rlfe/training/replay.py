"""Rollouts of the run's own past that are trained on again, and which of them a step draws.

What: the buffer (admission, capacity, eligibility, weights, draw, state) and whether its settings
can work at all. Not here: the loss (losses.py), when a step draws (loop.py). The draw depends on
buffer content, `acc`, the step and the run seed only. Definitions: docs/algorithms.md 10. The
weighted draw without replacement is that of Efraimidis and Spirakis 2006.

Try it: `ReplayBuffer(ReplaySettings(strategy="uniform", weight=0.1, rollouts=2))`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from rlfe.errors import RequestError
from rlfe.types import Finish, Group

STRATEGIES = ("none", "uniform", "hard", "hard_cooldown", "ce")
HARD_COOLDOWN_STEPS = 5  # rest of hard_cooldown where replay.cooldown_steps is not set
ARRAYS = ("prompt_ids", "completion_ids", "behavior_logp")  # saved apart: long and ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Numbers of the buffer. `ReplaySettings(strategy="hard_cooldown", weight=0.1)`

    `weight` is lambda. `cooldown_steps` None: 5 for hard_cooldown, else 0. `min_eligible` None:
    `rollouts`.
    """

    strategy: str = "none"
    weight: float = 0.1
    rollouts: int = 128
    cooldown_steps: int | None = None
    cooldown_unit: str = "rollout"
    max_per_prompt: int = 4
    per_prompt: int = 8
    max_entries: int = 4096
    max_age: int | None = None
    alpha: float = 1.0
    w_min: float = 0.05
    start_step: int = 0
    min_eligible: int | None = None
    shortage: str = "take"
    success_threshold: float = 1.0

    @property
    def active(self) -> bool:
        """False: no draw, no forward pass, no random number, no buffer at all (I-REP-1)."""
        return self.strategy != "none" and self.weight > 0

    @property
    def cooldown(self) -> int:
        if self.cooldown_steps is not None:
            return self.cooldown_steps
        return HARD_COOLDOWN_STEPS if self.strategy == "hard_cooldown" else 0

    @property
    def needed(self) -> int:
        """Drawable entries before the first draw."""
        return self.rollouts if self.min_eligible is None else self.min_eligible


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored success. `Entry(id=0, prompt_id="mbpp/11", prompt_ids=(1,), ...)`

    `nll` is the last known token mean of -log p: at admission that of -b.
    """

    id: int
    prompt_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    behavior_logp: tuple[float, ...]
    reward: float
    step_added: int
    behavior_version: int
    nll: float
    n_replayed: int = 0
    last_replayed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a step replays, in draw order. `waiting`: the first draw has not happened yet."""

    entries: tuple[Entry, ...]
    fill: float
    waiting: bool
    metrics: Mapping[str, float | int | None]


@dataclass(slots=True)
class Counters:
    """What a run counts; part of the state."""

    duplicates: int = 0
    successes: int = 0
    refused_finish: int = 0
    short_steps: int = 0  # draws in a row with fill < 1
    started: bool = False
    last_of_prompt: dict[str, int] = field(default_factory=dict)


class ReplayBuffer:
    """Entries by id, `acc` by prompt, and counters. Steps are 0-based."""

    def __init__(self, settings: ReplaySettings) -> None:
        if settings.strategy not in STRATEGIES:
            raise ValueError(f'unknown replay strategy "{settings.strategy}"')
        self.settings = settings
        self.entries: dict[int, Entry] = {}
        self.acc: dict[str, float] = {}
        self.counters = Counters()
        self._next_id = 0
        self._of_prompt: dict[str, set[int]] = {}

    # -- what is stored ------------------------------------------------------------------------

    def observe(self, prompt_id: str, *, successes: int, scored: int) -> None:
        """Remember k/N of the latest on-policy group of a prompt, also at k = 0.

        A group in which nothing could be scored says nothing and leaves `acc` as it is.
        """
        if scored:
            self.acc[prompt_id] = successes / scored

    def admit(self, groups: Sequence[Group], *, step: int) -> int:
        """Store this step's successes in (slot, index) order; returns how many came in.

        Admitted: reward at the success threshold, ended by itself (not cut), at least one token,
        no stored entry of the prompt with the same completion. Call it after the step's update.
        """
        admitted = 0
        for group in sorted(groups, key=lambda group: group.slot):
            for rollout in sorted(group.rollouts, key=lambda rollout: rollout.index):
                done = rollout.completion
                if rollout.reward is None or rollout.reward < self.settings.success_threshold:
                    continue
                self.counters.successes += 1
                if done.finish is not Finish.STOP or not done.token_ids:
                    self.counters.refused_finish += 1
                    continue
                if self._is_stored(group.problem_id, done.token_ids):
                    self.counters.duplicates += 1
                    continue
                entry = Entry(
                    id=self._next_id,
                    prompt_id=group.problem_id,
                    prompt_ids=rollout.prompt_ids,
                    completion_ids=done.token_ids,
                    behavior_logp=done.logprobs,
                    reward=rollout.reward,
                    step_added=step,
                    behavior_version=done.policy_step,
                    nll=-float(np.mean(done.logprobs)),
                )
                self._store(entry)
                admitted += 1
        return admitted

    def mark_replayed(self, ids: Sequence[int], *, step: int, nll_B: Sequence[float]) -> None:
        """After an applied optimiser step: count, date and new nll of its entries."""
        if len(ids) != len(nll_B):
            raise ValueError(f"{len(ids)} ids, {len(nll_B)} values of nll")
        for entry_id, nll in zip(ids, nll_B, strict=True):
            entry = self.entries[entry_id]
            count = entry.n_replayed + 1
            self.entries[entry_id] = replace(
                entry, n_replayed=count, last_replayed=step, nll=float(nll)
            )
            self.counters.last_of_prompt[entry.prompt_id] = step

    # -- what may be drawn ---------------------------------------------------------------------

    def eligible(self, step: int, *, cooldown: int | None = None) -> list[Entry]:
        """Entries that step `step` may draw, in (prompt_id, id) order."""
        rest = self.settings.cooldown if cooldown is None else cooldown
        found = [
            entry
            for entry in self.entries.values()
            if entry.step_added < step
            and not self._rests(entry, step, rest)
            and (self.settings.max_age is None or step - entry.step_added <= self.settings.max_age)
            and self._base_weight(entry) > 0
        ]
        return sorted(found, key=lambda entry: (entry.prompt_id, entry.id))

    def drawable(self, eligible: Sequence[Entry]) -> int:
        """D: sum over prompts of min(m, eligible entries)."""
        per_prompt = Counter(entry.prompt_id for entry in eligible)
        return sum(min(self.settings.max_per_prompt, count) for count in per_prompt.values())

    def draw(self, step: int, generator: np.random.Generator) -> Draw:
        """The entries of this step: `generator` is that of (run_seed, "replay", step)."""
        cooldown = self.settings.cooldown
        eligible = self.eligible(step)
        drawable = self.drawable(eligible)
        if not self.counters.started:
            ready = step >= self.settings.start_step and drawable >= self.settings.needed
            self.counters.started = ready and drawable > 0
        if not self.counters.started:
            metrics = self._metrics(step, eligible, drawable, ())
            return Draw(entries=(), fill=0.0, waiting=True, metrics=metrics)
        while self.settings.shortage == "relax" and drawable < self.settings.rollouts and cooldown:
            cooldown //= 2
            eligible = self.eligible(step, cooldown=cooldown)
            drawable = self.drawable(eligible)
        taken = self._taken(eligible, generator)
        fill = len(taken) / self.settings.rollouts
        self.counters.short_steps = self.counters.short_steps + 1 if fill < 1 else 0
        metrics = self._metrics(step, eligible, drawable, taken)
        return Draw(entries=taken, fill=fill, waiting=False, metrics=metrics)

    def weights(self, eligible: Sequence[Entry]) -> np.ndarray:
        """Weight of each entry, float64: the prompt's share per entry, or its nll (`ce`)."""
        per_prompt = Counter(entry.prompt_id for entry in eligible)
        shared = self.settings.strategy != "ce"
        return np.array(
            [self._base_weight(e) / (per_prompt[e.prompt_id] if shared else 1) for e in eligible],
            np.float64,
        )

    def warnings(self, *, step: int, total_steps: int) -> list[str]:
        """What a user should know now; each at most once a run for rising counts."""
        found = []
        if not self.counters.started and step == max(1, total_steps // 10):
            found.append(f"replay has drawn nothing up to step {step + 1}: too few successes yet")
        if self.counters.short_steps == 20:
            found.append("replay drew fewer rollouts than replay.rollouts for 20 steps in a row")
        refused, successes = self.counters.refused_finish, self.counters.successes
        if refused * 2 > successes and step == max(1, total_steps // 10):
            found.append(f"{refused} of {successes} successes were cut and cannot be replayed")
        return found

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(plain JSON-able values, arrays): everything but the settings."""
        names = [item.name for item in fields(Entry) if item.name not in ARRAYS]
        stored = list(self.entries.values())
        rows = [{name: getattr(entry, name) for name in names} for entry in stored]
        arrays: dict[str, np.ndarray] = {}
        for name in ARRAYS:
            kind = np.float64 if name == "behavior_logp" else np.int64
            values = [getattr(entry, name) for entry in stored]
            arrays[name] = np.array([item for value in values for item in value], kind)
            arrays[f"{name}_lengths"] = np.array([len(value) for value in values], np.int64)
        plain = {
            "entries": rows,
            "acc": dict(self.acc),
            "next_id": self._next_id,
            "counters": asdict(self.counters),
        }
        return plain, arrays

    def load_state(self, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Become the buffer that `state_dict` described."""
        columns = {name: _ragged(arrays[name], arrays[f"{name}_lengths"]) for name in ARRAYS}
        self.entries, self._of_prompt = {}, {}
        for index, row in enumerate(plain["entries"]):
            values = {**row, **{name: columns[name][index] for name in ARRAYS}}
            self._put(Entry(**values))
        self.acc = dict(plain["acc"])
        self._next_id = plain["next_id"]
        self.counters = Counters(**plain["counters"])

    # -- inside --------------------------------------------------------------------------------

    def _is_stored(self, prompt_id: str, completion_ids: tuple[int, ...]) -> bool:
        same = self._of_prompt.get(prompt_id, ())
        return any(self.entries[known].completion_ids == completion_ids for known in same)

    def _put(self, entry: Entry) -> None:
        self.entries[entry.id] = entry
        self._of_prompt.setdefault(entry.prompt_id, set()).add(entry.id)

    def _store(self, entry: Entry) -> None:
        self._put(entry)
        self._next_id += 1
        same = self._of_prompt[entry.prompt_id]
        if len(same) > self.settings.per_prompt:
            self._drop_oldest([self.entries[known] for known in same])
        if len(self.entries) > self.settings.max_entries:
            self._drop_oldest(list(self.entries.values()))

    def _drop_oldest(self, candidates: Sequence[Entry]) -> None:
        oldest = min(candidates, key=lambda entry: (entry.step_added, entry.id))
        del self.entries[oldest.id]
        self._of_prompt[oldest.prompt_id].remove(oldest.id)

    def _rests(self, entry: Entry, step: int, cooldown: int) -> bool:
        last = entry.last_replayed
        if self.settings.cooldown_unit == "prompt":
            last = self.counters.last_of_prompt.get(entry.prompt_id)
        return last is not None and step - last <= cooldown

    def _base_weight(self, entry: Entry) -> float:
        settings = self.settings
        if settings.strategy == "uniform":
            return 1.0
        if settings.strategy == "ce":
            return max(entry.nll, 0.0)
        return float(max(1.0 - self.acc[entry.prompt_id], settings.w_min) ** settings.alpha)

    def _taken(
        self, eligible: Sequence[Entry], generator: np.random.Generator
    ) -> tuple[Entry, ...]:
        """Ascending keys E/w, skipping prompts that already gave m, until B."""
        key_R = generator.standard_exponential(len(eligible)) / self.weights(eligible)
        given: Counter[str] = Counter()
        taken: list[Entry] = []
        for index in np.argsort(key_R, kind="stable"):
            entry = eligible[index]
            if len(taken) == self.settings.rollouts:
                break
            if given[entry.prompt_id] < self.settings.max_per_prompt:
                given[entry.prompt_id] += 1
                taken.append(entry)
        return tuple(taken)

    def _metrics(
        self, step: int, eligible: Sequence[Entry], drawable: int, taken: Sequence[Entry]
    ) -> dict[str, float | int | None]:
        stored = self.entries.values()
        prompts = {entry.prompt_id for entry in stored}
        ages = [step - entry.step_added for entry in taken]
        resting = sum(self._rests(entry, step, self.settings.cooldown) for entry in stored)
        weight_R = self.weights(eligible)
        return {
            "replay/lambda": self.settings.weight,
            "replay/rollouts": len(taken),
            "replay/fill": len(taken) / self.settings.rollouts,
            "replay/waiting": int(not self.counters.started),
            "replay/buffer_size": len(stored),
            "replay/prompts": len(prompts),
            "replay/eligible": len(eligible),
            "replay/drawable": drawable,
            "replay/blocked_by_cooldown": resting,
            "replay/duplicates": self.counters.duplicates,
            "replay/acc_mean": _mean([self.acc[prompt_id] for prompt_id in sorted(prompts)]),
            "replay/weight_ess": _effective_size(weight_R),
            "replay/age_mean": _mean(ages),
            "replay/age_max": max(ages, default=None),
            "replay/n_replayed_max": max((entry.n_replayed for entry in stored), default=None),
        }


def check_feasible(settings: ReplaySettings, *, problems: int) -> None:
    """Refuse settings under which a full draw every step is impossible even from a full buffer.

    Args:
        problems: Problems of the training list.

    Raises:
        RequestError: Naming the smaller number that would work.
    """
    if not settings.active:
        return
    wanted, rest = settings.rollouts, settings.cooldown + 1
    entries = min(settings.max_entries, settings.per_prompt * problems)
    per_step = min(min(settings.max_per_prompt, settings.per_prompt) * problems, entries)
    limit = per_step if settings.cooldown_unit == "prompt" else entries
    if settings.needed > per_step:
        raise RequestError(
            f"replay.min_eligible = {settings.needed} is never reached: {problems} problems can "
            f"give at most {per_step} rollouts in a step",
            hint=f"set replay.min_eligible to at most {per_step}",
        )
    if wanted > per_step:
        raise RequestError(
            f"replay.rollouts = {wanted} is more than {problems} problems can give in a step "
            f"({per_step})",
            hint=f"set replay.rollouts to at most {per_step}, or raise replay.max_per_prompt",
        )
    if wanted * rest > limit:
        longest = limit // wanted - 1
        raise RequestError(
            f"replay.cooldown_steps = {settings.cooldown} is too long: {wanted} rollouts every "
            f"step need {wanted * rest}, the largest possible buffer gives {limit}",
            hint=f"set replay.cooldown_steps to at most {longest}",
        )


def _ragged(flat: np.ndarray, lengths: np.ndarray) -> list[tuple[Any, ...]]:
    ends = np.cumsum(lengths)
    return [tuple(flat[end - size : end].tolist()) for end, size in zip(ends, lengths, strict=True)]


def _effective_size(weight_R: np.ndarray) -> float | None:
    """(sum w)^2 / sum w^2: how many entries the weights spread over; None without entries."""
    if weight_R.size == 0:
        return None
    return float(weight_R.sum() ** 2 / np.square(weight_R).sum())


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
