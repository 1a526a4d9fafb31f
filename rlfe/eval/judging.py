"""Judging beside generation: blocks are judged in a thread while the next ones are sampled.

Identical answers of a problem are judged once and count as often as they occur. A verdict that is
our own fault is not recorded, so the next call tries it again. Not here: what is right
(`rlfe.tasks`), running programs (`rlfe.sandbox`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlfe.eval.jobs import Job
from rlfe.eval.store import BlockKey, Judged, Sample, Store, text_hash
from rlfe.tasks.base import Reply, Task
from rlfe.types import Finish, Status

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge

JUDGE_AT = 16  # blocks handed to the judge at a time: enough to keep its workers busy
AT_WORK = 8  # such hand-overs that are judged at a time: one with an endless program takes seconds
OPEN = 16  # such hand-overs that may be open before generation pauses
Answer = tuple[str, str]  # problem id, hash of what is judged
_COUNTING = threading.Lock()  # of a report, which two jobs may share
NO_ROOM = "prompt leaves no room for a token"


@dataclass(slots=True)
class Report:
    """What happened while running: counts for the user, and whether something is still missing."""

    sampled: int = 0
    judged: int = 0
    shortened: int = 0
    no_room: int = 0
    unscored: int = 0
    tokens: int = 0
    sample_seconds: float = 0.0  # some job was being drawn, or the last verdicts were waited for
    wait_seconds: float = 0.0  # of these, generation stood still or was done, judging was not
    work_seconds: float = 0.0  # from the first request to the last score, changes of weights too
    load_seconds: list[float] = field(default_factory=list)  # the first one starts an engine
    loads: int = 0
    engines: int = 0
    lost_units: int = 0  # done again, because their sampler was lost or failed
    faults: list[str] = field(default_factory=list)


class JudgeOnDemand:
    """Starts the judge at the first program to judge, before a model is loaded; then keeps it.

    Args:
        make: Builds the judge, a context manager.
    """

    def __init__(self, make: Callable[[], Judge]) -> None:
        self._make, self._stack = make, ExitStack()
        self.judge: Judge | None = None

    def for_task(self, task: Task) -> Judge | None:
        """The judge where the task runs programs, else None."""
        if task.runs_programs and self.judge is None:
            self.judge = self._stack.enter_context(self._make())
        return self.judge if task.runs_programs else None

    def __enter__(self) -> JudgeOnDemand:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class JudgeThread:
    """Judges blocks beside generation; identical answers of a problem are judged once.

    Several hand-overs are in work at a time: a program that is stopped at its limit, and run once
    more, keeps its own from ending, but neither the judge's workers nor generation from going on.
    """

    def __init__(self, job: Job, store: Store, judge: Judge | None, report: Report) -> None:
        self._job, self._store, self._judge, self._report = job, store, judge, report
        self._problems = {p.id: (p, q) for p, q in zip(job.problems, job.prompts, strict=True)}
        self._known = self._seen_before()
        self._lock = threading.Lock()
        self._waiting: list[BlockKey] = []
        self._futures: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(max_workers=AT_WORK, thread_name_prefix="judge")

    def _seen_before(self) -> dict[Answer, Future[Judged | None]]:
        """Verdicts that are there. Only final ones: a timeout may have been the machine's."""
        known: dict[Answer, Future[Judged | None]] = {}
        for (problem, _), row in self._store.verdicts.items():
            for verdict in row:
                if verdict.status != Status.TIMEOUT:
                    known[problem, verdict.answer] = Future()
                    known[problem, verdict.answer].set_result(verdict)
        return known

    def __enter__(self) -> JudgeThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def join(self) -> None:
        """Wait for what was handed over, in a thread that holds nothing up."""
        for future in list(self._futures):
            future.result()
        self._futures = []

    def stop(self) -> None:
        """Judge no more than what is being judged; `join` then raises."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self) -> float:
        """Wait for the last verdict; returns the seconds that it took."""
        self.hand_over()
        return self._settle(0)

    def submit(self, blocks: Iterable[BlockKey]) -> None:
        """Queue stored blocks; pauses the caller when judging falls behind."""
        for key in blocks:
            self._waiting.append(key)
            if len(self._waiting) >= JUDGE_AT:
                self.hand_over()
        self._settle(OPEN)

    def no_room(self, key: BlockKey, count: int) -> None:
        """Record a block whose prompt leaves no room for a token: all its samples are wrong."""
        verdict = Judged("", str(Status.TRUNCATED), NO_ROOM, 0.0, {})
        self._pool.submit(self._store_no_room, key, count, verdict).result()

    def _store_no_room(self, key: BlockKey, count: int, verdict: Judged) -> None:
        self._store.add_block(*key, [Sample("", str(Finish.LENGTH), 0)] * count)
        self._store.add_verdicts({key: [verdict] * count})

    def hand_over(self) -> None:
        """Judge what is submitted, without waiting for more."""
        if self._waiting:
            self._futures.append(self._pool.submit(self._judge_blocks, self._waiting))
            self._waiting = []

    def _settle(self, allowed: int) -> float:
        """Wait until at most `allowed` hand-overs are open; raises what judging raised."""
        if len(self._futures) <= allowed:
            return 0.0
        start = time.monotonic()
        while len(self._futures) > allowed:
            ended, still_open = wait(self._futures, return_when=FIRST_COMPLETED)
            self._futures = list(still_open)
            for future in ended:
                future.result()
        waited = time.monotonic() - start
        self._report.wait_seconds += waited
        return waited

    def _judge_blocks(self, blocks: Sequence[BlockKey]) -> None:
        answers = {
            key: [self._answer_key(key[0], s) for s in self._store.blocks[key]] for key in blocks
        }
        fresh = self._claim(blocks, answers)
        try:
            found = self._verdicts(fresh)
        except BaseException as error:
            for answer in fresh:
                self._known[answer].set_exception(error)
            raise
        for answer in fresh:
            self._known[answer].set_result(found.get(answer))
        rows = {key: [self._known[answer].result() for answer in answers[key]] for key in blocks}
        self._record(rows)

    def _record(self, rows: Mapping[BlockKey, Sequence[Judged | None]]) -> None:
        """Store the blocks that are judged as a whole; the others are tried again next time."""
        whole: dict[BlockKey, list[Judged]] = {}
        unscored = 0
        for key, row in rows.items():
            scored = [verdict for verdict in row if verdict is not None]
            unscored += len(row) - len(scored)
            if len(scored) == len(row):
                whole[key] = scored
        self._store.add_verdicts(whole)
        with _COUNTING:
            self._report.unscored += unscored
            self._report.judged += sum(len(row) for row in whole.values())

    def _claim(
        self, blocks: Sequence[BlockKey], answers: Mapping[BlockKey, Sequence[Answer]]
    ) -> dict[Answer, Sample]:
        """Answers that no hand-over has judged or is judging; they are this one's from now on."""
        fresh: dict[Answer, Sample] = {}
        with self._lock:
            for key in blocks:
                for answer, sample in zip(answers[key], self._store.blocks[key], strict=True):
                    if answer not in self._known:
                        self._known[answer] = Future()
                        fresh[answer] = sample
        return fresh

    def _reply(self, key: str, problem: str, sample: Sample) -> Reply:
        asked, prompt = self._problems[problem]
        finish = Finish(sample.finish)
        return Reply(key=key, problem=asked, prompt=prompt, text=sample.text, finish=finish)

    def _answer_key(self, problem: str, sample: Sample) -> Answer:
        """What makes two replies one: the program (or, where nothing is run, the text), and how
        the reply ended, since a cut reply that fails is `truncated`."""
        task = self._job.task
        program = task.answer(self._reply("", problem, sample)) if task.runs_programs else ""
        return problem, text_hash(f"{program or sample.text}\x00{sample.finish}")

    def _verdicts(self, fresh: Mapping[Answer, Sample]) -> dict[Answer, Judged]:
        keys = list(fresh)
        replies = [self._reply(str(i), key[0], fresh[key]) for i, key in enumerate(keys)]
        found = {}
        for name, verdict in self._job.task.judge(replies, self._judge):
            if verdict.status is Status.INFRASTRUCTURE:
                self._report.faults.append(verdict.detail)
                continue
            key = keys[int(name)]
            found[key] = Judged(
                key[1], str(verdict.status), verdict.detail, verdict.seconds, verdict.facts
            )
        return found
