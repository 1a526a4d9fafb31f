"""The units that an evaluation over many samplers consists of, and which sampler gets which.

A unit is a range of blocks of one job, about a minute of work: what is lost with a sampler. A
sampler first gets work of the checkpoint that it holds, then a checkpoint that nobody holds, then
part of the largest rest; towards the end units become smaller, so that all end together. What not:
running them (`worker.py`), where samplers come from (`fleet.py`).
Try: `unit_size(remaining=1000, samplers=8, batch=8, seconds_per_block=0.5, last=False)`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from rlfe.eval.jobs import Job
from rlfe.eval.store import BlockKey, Sample, Store

UNIT_SECONDS = 60.0
FIRST_BATCHES = 4  # engine batches of a unit while nobody knows how long one takes
SHARE = 2  # towards the end, each sampler gets this part of its share of what is left

Missing = tuple[int, int, int]  # index of the problem, block, samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Blocks of one job to draw and judge, and blocks that are drawn but not judged.

    `Unit(number=3, job=0, missing=((7, 0, 8), (7, 1, 8)))`; `weights` is the hash of the
    checkpoint where it is known already, `losses` how many samplers died while they had it.
    """

    number: int
    job: int
    missing: tuple[Missing, ...] = ()
    unjudged: tuple[tuple[BlockKey, tuple[Sample, ...]], ...] = ()
    weights: str | None = None
    losses: int = 0

    @property
    def blocks(self) -> int:
        return len(self.missing) + len(self.unjudged)


def unit_size(
    *, remaining: int, samplers: int, batch: int, seconds_per_block: float | None, last: bool
) -> int:
    """Blocks of the next unit: about a minute, at least one engine batch, at most what is left.

    Args:
        remaining: Blocks that are left.
        batch: Blocks that the engine draws at a time.
        seconds_per_block: Measured so far; None: not yet.
        last: Nothing but these is left, so the rest is shared among all samplers.

    >>> unit_size(remaining=1000, samplers=8, batch=8, seconds_per_block=0.5, last=False)
    120
    >>> unit_size(remaining=100, samplers=8, batch=4, seconds_per_block=0.5, last=True)
    7
    """
    if seconds_per_block is None:
        size = FIRST_BATCHES * batch
    else:
        size = int(UNIT_SECONDS / max(seconds_per_block, 1e-6))
    if last:
        size = min(size, math.ceil(remaining / (SHARE * samplers)))
    return min(remaining, max(batch, size))


def cut(missing: Sequence[Missing], size: int) -> int:
    """How many of the first blocks make a unit: whole problems where `size` holds one.

    Answers of a problem are judged together once, so its blocks had better stay together.

    >>> cut([(0, 0, 8), (0, 1, 8), (1, 0, 8), (1, 1, 8)], 3)
    2
    """
    if size >= len(missing):
        return len(missing)
    borders = [n for n in range(1, size + 1) if missing[n - 1][0] != missing[n][0]]
    return borders[-1] if borders else size


@dataclass(slots=True)
class Open:
    """A job that is being worked on: what nobody has been given yet, and what is out."""

    number: int
    target: str
    missing: list[Missing]
    unjudged: list[tuple[BlockKey, tuple[Sample, ...]]]
    weights: str | None = None
    out: set[int] = field(default_factory=set)

    @property
    def remaining(self) -> int:
        return len(self.missing) + len(self.unjudged)


class Plan:
    """What is left of all jobs, and the next unit for a sampler.

    Args:
        jobs: In the order in which they are begun.
        samplers: How many share the work.
        batch: Blocks that the engine draws at a time.
    """

    def __init__(self, jobs: Sequence[Job], *, samplers: int, batch: int) -> None:
        self.jobs, self.samplers, self.batch = jobs, samplers, batch
        self.waiting = list(range(len(jobs)))
        self.open: dict[int, Open] = {}
        self.lost: list[Unit] = []
        self._seconds: dict[str, float] = {}
        self._units = 0

    def begin(self, number: int, store: Store, weights: str | None) -> Open:
        """Open a job with what its store lacks."""
        job = self.jobs[number]
        known = [key for key in store.unjudged() if key[0] in job.ids]
        unjudged = [(key, tuple(store.blocks[key])) for key in known]
        opened = Open(number, job.target.text, job.missing(store), unjudged, weights)
        self.waiting.remove(number)
        self.open[number] = opened
        return opened

    def choose(self, holds: str | None, held: Collection[str]) -> int | None:
        """The job that a sampler should work on next; None: nothing is left to give out.

        Args:
            holds: Target that the sampler has loaded.
            held: Targets that others have loaded or are about to.
        """
        left = [one for one in self.open.values() if one.remaining]
        mine = [one.number for one in left if one.target == holds]
        mine += [n for n in self.waiting if self.jobs[n].target.text == holds]
        free = [one.number for one in left if one.target not in held]
        free += [n for n in self.waiting if self.jobs[n].target.text not in held]
        largest = sorted(left, key=lambda one: -one.remaining)
        order = [*mine, *free, *self.waiting, *(one.number for one in largest)]
        return order[0] if order else None

    def next_unit(self, opened: Open) -> Unit:
        """The next part of an open job, given out from now on."""
        task = self.jobs[opened.number].task.name
        size = unit_size(
            remaining=opened.remaining if self.waiting else self._left(),
            samplers=self.samplers,
            batch=self.batch,
            seconds_per_block=self._seconds.get(task),
            last=not self.waiting,
        )
        unjudged, opened.unjudged = opened.unjudged[:size], opened.unjudged[size:]
        count = cut(opened.missing, size - len(unjudged))
        missing, opened.missing = opened.missing[:count], opened.missing[count:]
        self._units += 1
        unit = Unit(
            number=self._units,
            job=opened.number,
            missing=tuple(missing),
            unjudged=tuple(unjudged),
            weights=opened.weights,
        )
        opened.out.add(unit.number)
        return unit

    def _left(self) -> int:
        return sum(one.remaining for one in self.open.values())

    def again(self, unit: Unit) -> Unit:
        """The unit as it is given out once more."""
        return replace(unit, weights=self.open[unit.job].weights)

    def learn(self, unit: Unit, seconds: float) -> None:
        """Remember how long a block of this task takes."""
        if unit.missing:
            self._seconds[self.jobs[unit.job].task.name] = seconds / len(unit.missing)

    def finished(self, opened: Open) -> bool:
        """Whether all of a job has come back."""
        return not opened.remaining and not opened.out

    @property
    def done(self) -> bool:
        return not self.waiting and not self.open
