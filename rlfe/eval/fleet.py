"""Samplers as Ray actors: started, given units, and known to be lost when they are.

What: one actor a GPU (or CPU), two units in flight each, so that one is drawn while the one before
is judged; a lost actor is replaced while that helps. What not: which unit goes where
(`spread.py`), what an actor does (`worker.py`). Try: tests/test_ray_eval.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlfe import __version__
from rlfe.errors import RequestError
from rlfe.eval.units import Unit
from rlfe.eval.worker import Failed, Parcel, Refused, Result, Worker
from rlfe.ray_cluster import Needs, Node, reason

MAX_STARTS_LOST = 3  # samplers in a row that died before they said hello
WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A sampler is ready. `Joined(name="gpu07/1", host="gpu07")`"""

    name: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A unit has come back, or could not be done."""

    name: str
    unit: Unit
    outcome: Result | Refused | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A sampler is gone, with what it was doing. `Lost(name="gpu07/1", units=(...), why="...")`"""

    name: str
    units: tuple[Unit, ...]
    why: str


Event = Joined | Answered | Lost


class Fleet(Protocol):
    """Samplers that units can be given to."""

    def submit(self, name: str, unit: Unit) -> None: ...

    def wait(self) -> Iterable[Event]:
        """What has happened; returns after a moment even if nothing has."""
        ...

    def replace(self, name: str) -> tuple[Unit, ...]:
        """End a sampler that is not to be trusted any more, and start another in its place.

        Returns the units that it still had.
        """
        ...

    def forget(self, target: str) -> None:
        """Tell all samplers that a checkpoint is done."""
        ...

    @property
    def alive(self) -> bool:
        """Whether a sampler is there or on its way."""
        ...


@dataclass(slots=True)
class _Member:
    handle: Any
    running: dict[Any, Unit] = field(default_factory=dict)


class RayFleet:
    """Samplers on a cluster; a context manager that ends them.

    Args:
        parcel: What every sampler is told.
        samplers: How many to start.
        needs: What each takes.
        nodes: The machines, so that the samplers of one share its cores for judging.
    """

    def __init__(
        self, parcel: Parcel, *, samplers: int, needs: Needs, nodes: Iterable[Node]
    ) -> None:
        import ray

        self._ray = ray
        shares = [max(1, node.cpus // needs.fit(node)) for node in nodes if needs.fit(node)]
        self._judges = min(shares, default=1)
        self._needs, self._parcel = needs, ray.put(parcel)
        self._members: dict[str, _Member] = {}
        self._starting: dict[Any, Any] = {}
        self._unheard = self._started = 0
        for _ in range(samplers):
            self._start()

    def __enter__(self) -> RayFleet:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in [*self._starting.values(), *(m.handle for m in self._members.values())]:
            self._ray.kill(handle)

    def submit(self, name: str, unit: Unit) -> None:
        member = self._members[name]
        member.running[member.handle.run.remote(unit)] = unit

    def wait(self) -> Iterable[Event]:
        owners = {ref: name for name, member in self._members.items() for ref in member.running}
        refs = [*self._starting, *owners]
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        if not ready and refs:
            ready, _ = self._ray.wait(refs, num_returns=1, timeout=WAIT_SECONDS)
        for ref in ready:
            if ref in self._starting:
                yield from self._heard(ref)
            elif owners[ref] in self._members and ref in self._members[owners[ref]].running:
                yield self._answer(owners[ref], ref)

    def replace(self, name: str) -> tuple[Unit, ...]:
        member = self._members.pop(name)
        self._ray.kill(member.handle)
        self._start()
        return tuple(member.running.values())

    def forget(self, target: str) -> None:
        for member in self._members.values():
            member.handle.forget.remote(target)

    @property
    def alive(self) -> bool:
        return bool(self._members or self._starting)

    def _start(self) -> None:
        actor = self._ray.remote(Worker).options(
            num_cpus=self._needs.cpus,
            num_gpus=self._needs.gpus,
            max_concurrency=2,
            max_restarts=0,
        )
        handle = actor.remote(self._parcel, self._judges)
        self._starting[handle.hello.remote()] = handle

    def _heard(self, ref: Any) -> Iterable[Event]:
        handle = self._starting.pop(ref)
        try:
            host, version = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._unheard += 1
            yield Lost(name="", units=(), why=reason(error))
            if self._unheard < MAX_STARTS_LOST:
                self._start()
            return
        if version != __version__:
            raise RequestError(
                f"node {host} has rlfe {version}, this one {__version__}",
                hint="Install the same version on all nodes.",
            )
        self._unheard = 0
        self._started += 1
        name = f"{host}/{self._started}"
        self._members[name] = _Member(handle)
        yield Joined(name=name, host=host)

    def _answer(self, name: str, ref: Any) -> Event:
        unit = self._members[name].running.pop(ref)
        try:
            return Answered(name=name, unit=unit, outcome=self._ray.get(ref))
        except self._ray.exceptions.RayTaskError as error:
            failed = Failed(why=f"{name}: {reason(error)}")
            return Answered(name=name, unit=unit, outcome=failed)
        except self._ray.exceptions.RayError as error:
            return Lost(name=name, units=(unit, *self.replace(name)), why=reason(error))
