"""The pool: persistent workers, one verdict per case, nothing lost.

What: `Judge` starts the jailed workers by exec and runs cases on them; a case is one or more
parts (base, then plus), each a fresh process, compared here value by value, stopped at the first
wrong one. What not: it knows no task. Every wait has a limit; a case whose worker is lost is run
again, and after three losses reported as infrastructure, never as wrong.
Try: `with Judge(workers=2) as judge: list(judge.run([case]))`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlfe.errors import RequestError, RlfeError
from rlfe.sandbox import bubblewrap, calibration
from rlfe.sandbox.parts import Case, Outcome, Part, PartResult
from rlfe.sandbox.traces import keep_quiet, leaves_nothing
from rlfe.sandbox.verdicts import Verdicts
from rlfe.sandbox.worker import Worker, WorkerLost
from rlfe.types import Status

MAX_LOSSES = 3
WEAK = {
    "limits": "programs run with limits only: files are open to them, and on macOS the network "
    "(--require-isolation refuses this)",
    "filters": "programs run behind filters, without namespaces: they can see names of files and "
    "processes of the same user",
}
GRACE_SECONDS = 10.0  # a worker that says nothing for this long beyond a job's limit is lost


@dataclass(slots=True)
class _Ticket:
    case: Case
    deliver: Callable[[Case, Outcome], None]
    done: list[PartResult] = field(default_factory=list)
    losses: int = 0
    first_cpu: float | None = None
    by_itself: bool = False

    @property
    def screening(self) -> bool:
        """Whether a timeout would be run again: then the first run may be short."""
        return self.case.confirm and self.first_cpu is None

    def may_suffer(self, result: PartResult) -> bool:
        """Whether a part failed because of what an earlier one in its process left behind."""
        wrong = result.status is Status.FAILED and leaves_nothing(self.case.program)
        return not wrong and result.status is not Status.PASSED

    def parts(self) -> tuple[Part, ...]:
        """What a worker is to run next."""
        left = self.case.parts[len(self.done) :]
        together = self.case.shared and not self.by_itself and self.first_cpu is None
        return left if together else left[:1]


class Judge:
    """A pool of jailed workers; a context manager, usable from several threads.

    Args:
        workers: Number of workers; None is the number of usable cores.
        require_isolation: Refuse the tier `limits` (files and network open).
        cache: File that keeps verdicts across runs; None keeps them while the pool lives.
        jail: `auto` for the strongest tier that works here, or the name of one.
        warn: Told once, at the start, of a tier below the strongest or of a file that is no use.
    """

    def __init__(
        self,
        workers: int | None = None,
        require_isolation: bool = False,
        *,
        jail: str = "auto",
        cache: Path | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.size = max(1, min(workers or usable, usable))
        self._reruns = max(1, min(self.size, usable // 2))  # second runs at a time
        self.require_isolation, self._jail, self._warn = require_isolation, jail, warn
        self._incoming: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._pending: list[tuple[float, int, _Ticket]] = []
        self._confirm: list[_Ticket] = []
        self._order = itertools.count()
        self._wake_reader, self._wake_writer = os.pipe()
        self._workers: list[Worker] = []
        self._thread: threading.Thread | None = None
        self.tier: dict[str, Any] = {}
        self.verdicts = Verdicts(cache)
        self.probe_seconds = 0.0
        self.scale = 1.0  # how much slower this machine is than the one of the reference times

    def __enter__(self) -> Judge:
        if sys.platform == "win32":
            raise RequestError("programs cannot be judged on Windows", hint="Use WSL2.")
        keep_quiet()
        try:
            self._jail = self._chosen_jail()
            self._workers = [self._start() for _ in range(self.size)]
            for worker in self._workers:
                self.tier = worker.hello()
            if self.require_isolation and self.tier["tier"] == "limits":
                raise RequestError(
                    "programs cannot be isolated here: only limits are possible",
                    hint="Use Linux with namespaces or Landlock, or leave out --require-isolation.",
                )
        except WorkerLost as error:
            self._close_workers()
            raise RlfeError(
                f"the judge's workers do not start: {error}", hint="Run `rlfe doctor`."
            ) from error
        except BaseException:
            self._close_workers()
            raise
        self._thread = threading.Thread(target=self._loop, name="rlfe-judge", daemon=True)
        self._thread.start()
        try:
            self.probe_seconds = calibration.probe_seconds(self.run)
        except BaseException:
            self.__exit__()
            raise
        self.scale = calibration.scale(self.probe_seconds)
        self._warn_once()
        return self

    def _warn_once(self) -> None:
        tier = self.tier["tier"]
        if self._warn is not None and tier in WEAK:
            why = "; ".join(f"{name}: {text}" for name, text in self.tier["refused"].items())
            self._warn(f"{WEAK[tier]}{f' [{why}]' if why else ''}")
        if self._warn is not None and self.verdicts.trouble:
            self._warn(f"verdicts are not kept for other runs: {self.verdicts.trouble}")

    def _chosen_jail(self) -> str:
        """`auto` is bubblewrap where it works; then the worker itself takes what it can get."""
        if self._jail != "auto" or not bubblewrap.find():
            return self._jail
        trial = Worker(jail="bubblewrap")
        try:
            trial.hello()
        except WorkerLost:
            return "auto"
        finally:
            trial.close()
        return "bubblewrap"

    def __exit__(self, *_: object) -> None:
        self._incoming.put(None)
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._close_workers()

    def _close_workers(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []
        self.verdicts.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def submit(self, case: Case, deliver: Callable[[Case, Outcome], None]) -> None:
        """Start a case; `deliver` is called from the pool's thread when it has ended."""
        if self._thread is None:
            raise RlfeError("the judge is not started", hint="Use it as `with Judge() as judge:`.")
        self._incoming.put(_Ticket(case, deliver))
        self._wake()

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Judge cases at once, from the call on; yields them as they end, in any order."""
        results: queue.SimpleQueue[tuple[Case, Outcome]] = queue.SimpleQueue()
        count = 0
        for case in cases:
            self.submit(case, lambda ended, outcome: results.put((ended, outcome)))
            count += 1
        return (results.get() for _ in range(count))

    # -- the pool's own thread

    def _wake(self) -> None:
        os.write(self._wake_writer, b"w")

    def _start(self) -> Worker:
        return Worker(jail=self._jail)

    def _loop(self) -> None:
        try:
            self._work()
            why = "the judge was closed"
        except BaseException as error:
            why = f"the judge failed: {type(error).__name__}: {error}"
        held = [*self._confirm, *(row[2] for row in self._pending)]
        for ticket in [*held, *(w.run for w in self._workers if w.run is not None)]:
            _give_up(ticket, why)  # nobody may wait for ever on a pool that is gone
        while why != "the judge was closed" and (late := self._incoming.get()) is not None:
            _give_up(late, why)

    def _work(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_reader, selectors.EVENT_READ, None)
        for worker in self._workers:
            selector.register(worker.replies, selectors.EVENT_READ, worker)
        running = True
        while running:
            self._assign(selector)
            for key, _ in selector.select(timeout=1.0):
                if key.data is None:
                    running = self._collect()
                else:
                    self._serve(key.data, selector)
            self._expire(selector)
        selector.close()

    def _collect(self) -> bool:
        os.read(self._wake_reader, 1 << 16)
        while True:
            try:
                ticket = self._incoming.get_nowait()
            except queue.Empty:
                return True
            if ticket is None:
                return False
            self._queue(ticket)

    def _queue(self, ticket: _Ticket) -> None:
        heapq.heappush(self._pending, (-ticket.case.cost, next(self._order), ticket))

    def _assign(self, selector: selectors.BaseSelector) -> None:
        for worker in list(self._workers):
            if worker.run is None and self._pending:
                self._give(worker, heapq.heappop(self._pending)[2], selector)
        while self._confirm and self._may_rerun():
            idle = next(worker for worker in self._workers if worker.run is None)
            self._give(idle, self._confirm.pop(), selector)

    def _may_rerun(self) -> bool:
        """A second run has no first run beside it, and no more second runs than half the cores.

        CPU time decides on it, and a core with an idle neighbour is as good as one alone.
        """
        running = [worker.run for worker in self._workers if worker.run is not None]
        if self._pending or len(running) >= self._reruns:
            return False
        return all(ticket.first_cpu is not None for ticket in running)

    def _give(self, worker: Worker, ticket: _Ticket, selector: selectors.BaseSelector) -> None:
        try:
            worker.begin(ticket.case.program, ticket.parts(), ticket, ticket.screening)
        except WorkerLost:
            worker.run = ticket
            self._lost(worker, selector)

    def _serve(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        try:
            results = worker.receive()
        except WorkerLost:
            return self._lost(worker, selector)
        if results:
            ticket: _Ticket = worker.run
            worker.run = None
            ticket.done += results[:-1]
            self._ended(ticket, results, worker, selector)

    def _ended(
        self,
        ticket: _Ticket,
        results: Sequence[PartResult],
        worker: Worker,
        selector: selectors.BaseSelector,
    ) -> None:
        result = results[-1]
        if result.status is Status.TIMEOUT and ticket.case.confirm and ticket.first_cpu is None:
            ticket.first_cpu = result.cpu
            return self._confirm.append(ticket)
        if len(results) > 1 and ticket.may_suffer(result):
            ticket.by_itself = True
            return self._give(worker, ticket, selector)
        ticket.done.append(_with_first(result, ticket.first_cpu))
        ticket.first_cpu = None
        goes_on = result.status is Status.PASSED or ticket.case.run_all
        if goes_on and len(ticket.done) < len(ticket.case.parts):
            return self._give(worker, ticket, selector)
        ticket.deliver(ticket.case, _outcome(ticket.done))

    def _lost(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        """Replace a worker; its case is run again."""
        ticket = worker.run
        selector.unregister(worker.replies)
        worker.close()
        fresh = self._replacement()
        self._workers[self._workers.index(worker)] = fresh
        selector.register(fresh.replies, selectors.EVENT_READ, fresh)
        if ticket is not None:
            self._redo(ticket)

    def _replacement(self) -> Worker:
        for attempt in range(5):
            try:
                worker = self._start()
                worker.hello()
                return worker
            except (WorkerLost, OSError):
                time.sleep(0.2 * 2**attempt)
        raise RlfeError("the judge's workers cannot be started", hint="Run `rlfe doctor`.")

    def _redo(self, ticket: _Ticket) -> None:
        ticket.losses += 1
        if ticket.losses < MAX_LOSSES:
            return self._queue(ticket)
        _give_up(ticket, f"the worker was lost {MAX_LOSSES} times")

    def _expire(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.run is not None and now > worker.deadline + GRACE_SECONDS:
                worker.kill()
                self._lost(worker, selector)


def _give_up(ticket: _Ticket, why: str) -> None:
    part = ticket.parts()[0]
    result = PartResult(
        name=part.name,
        mode=part.mode,
        status=Status.INFRASTRUCTURE,
        detail=why,
        cpu=0.0,
        wall=0.0,
        right=0,
        total=len(part.inputs),
    )
    ticket.deliver(ticket.case, _outcome([*ticket.done, result]))


def _with_first(result: PartResult, first_cpu: float | None) -> PartResult:
    return result if first_cpu is None else replace(result, first_cpu=first_cpu)


def _outcome(parts: Sequence[PartResult]) -> Outcome:
    bad = next((part for part in parts if part.status is not Status.PASSED), parts[-1])
    seconds = sum(part.cpu for part in parts)
    return Outcome(status=bad.status, detail=bad.detail, seconds=seconds, parts=tuple(parts))
