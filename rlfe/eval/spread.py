"""An evaluation over many samplers: give out units, store what comes back, retry what is lost.

This process is the only one that writes results, into the same files as a call of one process; so
the two continue each other, and on an exact engine their tables are the same bytes. A lost sampler
costs the units that it had: they are given to others, each a bounded number of times. What not:
drawing and judging (`worker.py`), Ray (`fleet.py`). Try: tests/test_eval_spread.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlfe.errors import RequestError, RlfeError
from rlfe.eval.fleet import Answered, Event, Fleet, Joined, Lost
from rlfe.eval.jobs import Job
from rlfe.eval.judging import Report
from rlfe.eval.places import Places
from rlfe.eval.runner import Watch, header_of, write_settings
from rlfe.eval.settings import BLOCK
from rlfe.eval.store import Store, check_same
from rlfe.eval.units import Open, Plan, Unit
from rlfe.eval.worker import Failed, Refused, Result

MAX_LOSSES = 3  # of one unit; then it is left out and named
MAX_FAILURES = 6  # for each sampler, in a row: nothing works here
IN_FLIGHT = 2


class SpreadWatch(Watch):
    """What an evaluation over many samplers tells beside what `run_jobs` does."""

    def joined(self, name: str) -> None:
        """A sampler is ready."""

    def lost(self, name: str, why: str, units: int) -> None:
        """A sampler is gone, or failed; so many units are done again elsewhere."""


@dataclass(slots=True)
class _Sampler:
    """What a sampler has: `_Sampler(holds="x/global_step_30", units=1)`."""

    holds: str | None = None
    units: int = 0
    careful: bool = False  # has a unit that was lost before: nothing else goes with it


class Spread:
    """One evaluation over a fleet.

    Args:
        jobs: In the order in which they are begun; jobs of one checkpoint stand together.
        samplers: How many there will be.
        batch: Sequences that the engine draws at a time.
        places: Knows hashes of weights that were computed before.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        fleet: Fleet,
        places: Places,
        watch: SpreadWatch,
        *,
        samplers: int,
        batch: int,
    ) -> None:
        self.report, self.tier = Report(), dict[str, object]()
        self._jobs, self._fleet, self._places, self._watch = jobs, fleet, places, watch
        self._plan = Plan(jobs, samplers=samplers, batch=max(1, batch // BLOCK))
        self._members: dict[str, _Sampler] = {}
        self._again: list[Unit] = []
        self._stores: dict[int, Store] = {}
        self._weights: dict[str, str] = {}
        self._failures: list[str] = []  # since a unit came back

    def run(self) -> Report:
        """Bring every job to n judged samples per problem.

        Raises:
            RequestError: A store holds samples of other weights, or a node does not see a
                checkpoint. Everything that came back is kept.
            RlfeError: No sampler is left.
        """
        try:
            self._skip_done()
            while not self._plan.done:
                for event in self._fleet.wait():
                    self._handle(event)
                self._feed()
                self._give_up_where_all_fail()
        finally:
            for store in self._stores.values():
                store.close()
        return self.report

    def _give_up_where_all_fail(self) -> None:
        all_fail = len(self._failures) >= MAX_FAILURES * self._plan.samplers
        if not self._plan.done and (all_fail or not self._fleet.alive):
            what = "every sampler fails" if self._fleet.alive else "no sampler is left"
            why = "; ".join(dict.fromkeys(self._failures[-MAX_LOSSES:]))
            raise RlfeError(f"{what}: {why}", hint="Finished samples are kept; run it again.")

    def _skip_done(self) -> None:
        """Jobs of which everything is there need no sampler."""
        for number, job in enumerate(self._jobs):
            if job.store_path.exists() or job.beside:
                with self._open_store(number, self._places.weights(job.target)) as store:
                    unjudged = any(key[0] in job.ids for key in store.unjudged())
                    if not job.missing(store) and not unjudged:
                        self._plan.waiting.remove(number)
                        self._watch.started(job, 0)
                        self._watch.finished(job, store)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._members[event.name] = _Sampler()
            self._watch.joined(event.name)
        elif isinstance(event, Lost):
            self._members.pop(event.name, None)
            self._gone(event.name, event.units, event.why)
        elif isinstance(event.outcome, Refused):
            raise event.outcome.error
        else:
            self._answered(event)

    def _answered(self, event: Answered) -> None:
        sampler, outcome = self._members[event.name], event.outcome
        sampler.units -= 1
        sampler.careful = False
        if isinstance(outcome, Failed):  # its engine or device may be broken for good
            del self._members[event.name]
            self._again += self._fleet.replace(event.name)
            self._gone(event.name, [event.unit], outcome.why)
        elif isinstance(outcome, Result):
            self._failures = []
            self._take(event.name, event.unit, outcome)

    def _gone(self, name: str, units: Sequence[Unit], why: str) -> None:
        """Give lost units out again, or leave them out after the last try."""
        self.report.lost_units += len(units)
        self._watch.lost(name, why, len(units))
        self._failures.append(why)
        for unit in units:
            if unit.losses + 1 < MAX_LOSSES:
                self._again.append(replace(unit, losses=unit.losses + 1))
            else:
                text = self._jobs[unit.job].target.text
                self.report.faults.append(f"{text}: {MAX_LOSSES} samplers failed, the last: {why}")
                self._close(unit)

    def _take(self, name: str, unit: Unit, result: Result) -> None:
        """Store what came back, the first time after checking whose it is."""
        job, opened = self._jobs[unit.job], self._plan.open[unit.job]
        if job.target.text not in self._weights:
            own = result.weights if result.same_files else self._places.weights(job.target)
            self._weights[job.target.text] = own
        known = self._weights[job.target.text]
        header = header_of(job, known)
        there = {"weights": result.weights, "tokenizer": result.tokenizer}
        check_seen(name, job, there, header)
        self._places.note(job.target, known)
        opened.weights = known
        if unit.job not in self._stores:
            self._stores[unit.job] = self._open_store(unit.job, known)
        store = self._stores[unit.job]
        for block in result.blocks:
            store.add_block(*block.key, block.samples)
        store.add_verdicts({b.key: b.verdicts for b in result.blocks if b.verdicts is not None})
        self._add(result)
        self._plan.learn(unit, result.report.sample_seconds)
        self._watch.sampled(job, result.report.sampled)
        self._close(unit)

    def _add(self, result: Result) -> None:
        """Counts of a unit into those of the evaluation."""
        mine, its = self.report, result.report
        for name in (
            "sampled", "judged", "shortened", "no_room", "unscored", "tokens", "sample_seconds",
            "wait_seconds", "loads", "engines",
        ):  # fmt: skip
            setattr(mine, name, getattr(mine, name) + getattr(its, name))
        mine.faults += its.faults
        self.tier.update(result.tier)

    def _close(self, unit: Unit) -> None:
        """A unit is over; so may be its job, and its checkpoint."""
        opened = self._plan.open[unit.job]
        opened.out.discard(unit.number)
        if self._plan.finished(opened):
            self._finish(unit.job)

    def _finish(self, number: int) -> None:
        job = self._jobs[number]
        del self._plan.open[number]
        store = self._stores.pop(number, None)
        if store is not None:
            store.close()
            self._watch.finished(job, store)
        else:  # nothing came back of it
            self._watch.finished(job, job.read())
        left = [*self._plan.waiting, *self._plan.open]
        if not any(self._jobs[other].target == job.target for other in left):
            self._fleet.forget(job.target.text)

    def _open_store(self, number: int, weights: str) -> Store:
        job = self._jobs[number]
        store = Store(job.store_path, job.rule, beside=job.beside).open(header_of(job, weights))
        write_settings(job)
        return store

    def _feed(self) -> None:
        """Give every sampler that has room its next unit."""
        for _ in range(IN_FLIGHT):
            for name, sampler in self._members.items():
                unit = self._next(sampler)
                if unit is not None:
                    sampler.holds = self._jobs[unit.job].target.text
                    sampler.units += 1
                    sampler.careful = unit.losses > 0
                    self._fleet.submit(name, unit)

    def _next(self, sampler: _Sampler) -> Unit | None:
        if sampler.units >= IN_FLIGHT or sampler.careful:
            return None
        if self._again:
            return self._plan.again(self._again.pop(0)) if sampler.units == 0 else None
        others = {one.holds for one in self._members.values() if one is not sampler and one.holds}
        number = self._plan.choose(sampler.holds, others)
        if number is None:
            return None
        return self._plan.next_unit(self._plan.open.get(number) or self._begin(number))

    def _begin(self, number: int) -> Open:
        job = self._jobs[number]
        weights = self._weights.get(job.target.text) or self._places.noted(job.target)
        opened = self._plan.begin(number, job.read(), weights)
        self._watch.started(job, sum(count for _, _, count in opened.missing))
        return opened


def check_seen(name: str, job: Job, there: dict[str, str], here: dict[str, object]) -> None:
    """Refuse samples of a checkpoint that is not the same on all nodes.

    Raises:
        RequestError: It names the sampler's node.
    """
    try:
        check_same(job.target.path, here, dict(there))
    except RequestError as error:
        raise RequestError(
            f"{name} sees another checkpoint at {job.target.path}: {error.what}",
            hint="Keep runs on a file system that all nodes share, or score hf:// checkpoints.",
        ) from error
