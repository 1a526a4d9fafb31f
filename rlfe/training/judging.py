"""Judging beside generation: replies go to the task's judge while later ones are still sampled.

What: one call of `task.judge` per step, in a thread of its own, on a sequence that grows as
requests finish; the verdicts are the same whatever the order, since a verdict depends on its reply
alone. Not here: what is right (`rlfe.tasks`), running programs (`rlfe.sandbox`), rewards.
Try it: `with Judging(lambda replies: task.judge(replies, judge)) as judging: ...`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from rlfe.tasks.base import Reply
from rlfe.training.clock import Clock
from rlfe.training.job import Job
from rlfe.types import Completion, Request, Verdict

STOP_SECONDS = 5.0  # a judge that is no longer wanted gets this long to notice
Judged = tuple[dict[str, list[Completion]], dict[str, Verdict]]


class _Stopped(Exception):
    """Sampling failed: the replies that are still waited for will not come."""


class Arriving(Sequence[Reply]):
    """Replies in the order of their arrival: a sequence whose end is waited for.

    Iterating hands out each reply as it comes; `len`, a slice or an index from the end waits for
    the last one. So a judge that reads once overlaps generation, and any other still works.
    """

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._whole = self._stopped = False
        self._changed = threading.Condition()

    def add(self, replies: Iterable[Reply]) -> None:
        with self._changed:
            self._replies += replies
            self._changed.notify_all()

    def end(self) -> None:
        """No more replies will come."""
        with self._changed:
            self._whole = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Whoever waits for a reply is sent home."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def __len__(self) -> int:
        self._wait(None)
        return len(self._replies)

    @overload
    def __getitem__(self, place: int) -> Reply: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Reply]: ...
    def __getitem__(self, place: int | slice) -> Reply | Sequence[Reply]:
        self._wait(place if isinstance(place, int) and place >= 0 else None)
        return self._replies[place]

    def _wait(self, place: int | None) -> None:
        """Until there is a reply at `place`; None: until all are there."""

        def ready() -> bool:
            arrived = place is not None and place < len(self._replies)
            return arrived or self._whole or self._stopped

        with self._changed:
            self._changed.wait_for(ready)
            if self._stopped:
                raise _Stopped


class Judging:
    """Judges the replies of one step in a thread; leaving the block early stops it.

    Args:
        judge: Takes the replies, yields (key, verdict) for each, in any order.
    """

    def __init__(self, judge: Callable[[Sequence[Reply]], Iterable[tuple[str, Verdict]]]) -> None:
        self._judge, self._replies = judge, Arriving()
        self._verdicts: dict[str, Verdict] = {}
        self._error: BaseException | None = None
        self._ended = threading.Event()  # a join that Ctrl-C interrupts cannot be waited for again
        # A daemon: a judge of the user's that hangs must not keep a stopped run from ending.
        self._thread = threading.Thread(target=self._work, name="rlfe-judging", daemon=True)

    def __enter__(self) -> Judging:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._replies.stop()
        if self._ended.wait(STOP_SECONDS):
            self._thread.join()

    def submit(self, replies: Iterable[Reply]) -> None:
        """Hand over replies; raises what judging the earlier ones raised."""
        if self._error is not None:
            raise self._error
        self._replies.add(replies)

    def verdicts(self) -> dict[str, Verdict]:
        """Wait for the verdicts on all replies; raises what judging raised."""
        self._replies.end()
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._verdicts

    def _work(self) -> None:
        try:
            for key, verdict in self._judge(self._replies):
                self._verdicts[key] = verdict
                if self._replies.stopped:
                    return
        except _Stopped:
            return
        except BaseException as error:  # raised again where the verdicts are wanted
            self._error = error
        finally:
            self._ended.set()


def sampled_and_judged(
    job: Job,
    requests: Sequence[Request],
    replies: Callable[[str, Sequence[Completion]], Iterable[Reply]],
    clock: Clock,
    doing: str,
) -> Judged:
    """Completions by request id and verdicts by reply key, judged while later ones are sampled.

    Args:
        replies: What is to be judged of (request id, its completions).
        clock: `sample` is generation; `judge` is what was left to judge when it had ended.
        doing: What the watch reads, in front of how far it is ("step 3").

    Raises:
        RlfeError: Sampling or judging failed; the other of the two is stopped.
    """
    done: dict[str, list[Completion]] = {}
    with Judging(lambda arriving: job.task.judge(arriving, job.judge)) as judging:
        with clock.phase("sample"):
            for name, completions in job.sampler.generate(requests):
                done[name] = completions
                judging.submit(replies(name, completions))
                job.within(f"{doing}: sampled {len(done)}/{len(requests)} groups")
        with clock.phase("judge"):
            return done, judging.verdicts()
