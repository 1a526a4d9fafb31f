"""One checkpoint after another: sample what is missing, judge distinct answers once, append.

One load per checkpoint for all its tasks, judging in a thread while the next block, or the next
checkpoint, is generated (`judging.py`). Everything finished is on disk the moment it exists
(`store.py`), so a killed evaluation continues; what cannot be judged through a fault of ours is not
recorded and makes the evaluation incomplete. Not here: where checkpoints come from (`plan.py`),
tables (`tables.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from copy import copy
from typing import TYPE_CHECKING, Any

from rlfe.engines.base import Tokenizer
from rlfe.eval.jobs import Job
from rlfe.eval.judging import JudgeOnDemand, JudgeThread, Report
from rlfe.eval.places import Places
from rlfe.eval.samplers import Samplers, tokenizer_hash
from rlfe.eval.settings import budget, request_sampling
from rlfe.eval.store import Sample, Store
from rlfe.randomness import derive
from rlfe.rundir import write_text
from rlfe.types import Finish, Request

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge


class Watch:
    """What `run_jobs` tells while it works; the command line draws it, tests ignore it.

    `finished` is called in a thread, for one job after the other.
    """

    def started(self, job: Job, samples: int) -> None:
        """`samples` of this job are still to be drawn (0: all are there)."""

    def sampled(self, job: Job, samples: int) -> None:
        """So many more samples are stored."""

    def drawn(self, job: Job) -> None:
        """No more samples of this job will come; they may still be judged."""

    def finished(self, job: Job, store: Store) -> None:
        """All that could be drawn and judged of this job is on disk."""


def run_jobs(
    jobs: Sequence[Job],
    samplers: Samplers,
    judges: JudgeOnDemand,
    places: Places,
    watch: Watch | None = None,
) -> Report:
    """Bring every job to n judged samples per problem; jobs of one checkpoint stand together.

    `places` knows the weights and where the files of a checkpoint are.

    Raises:
        RequestError: a store holds samples of other weights, or is being written by another
            process. Everything finished before is kept.
    """
    report, watch = Report(), watch or Watch()
    with Behind(watch, report) as behind:
        for place, job in enumerate(jobs):
            with Opened(job, header_of(job, places.weights(job.target))) as opened:
                write_settings(job)
                _fill(opened, samplers, judges, places, watch, report, behind)
                behind.follow(opened)
            if not any(later.target == job.target for later in jobs[place + 1 :]):
                places.done(job.target)
    report.loads, report.engines = samplers.loads, samplers.engines
    report.load_seconds = samplers.load_seconds
    return report


class Opened:
    """A job with its store and, once it draws or judges, its judging thread.

    As a context manager it ends all of it, unless `keep` was called: then what was kept does.
    """

    def __init__(self, job: Job, header: Mapping[str, Any]) -> None:
        self.job, self._ending = job, ExitStack()
        store = Store(job.store_path, job.rule, beside=job.beside).open(header)
        self.store = self._ending.enter_context(store)
        self.judging: JudgeThread | None = None

    def judge(self, judge: Judge | None, report: Report) -> JudgeThread:
        self.judging = JudgeThread(self.job, self.store, judge, report)
        return self._ending.enter_context(self.judging)

    def keep(self) -> Opened:
        """The same, which outlives the block that opened it."""
        kept = copy(self)
        kept._ending = self._ending.pop_all()
        return kept

    def finish(self, watch: Watch) -> None:
        """Wait for the last verdict, tell, and close the store."""
        with self:
            if self.judging is not None:
                self.judging.join()
            watch.finished(self.job, self.store)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: Any) -> None:
        self._ending.__exit__(*error)


class Behind:
    """Ends the job that is drawn, in a thread, while the next one is loaded and drawn.

    An engine would stand still for the last programs of every checkpoint, and for its scores.
    """

    def __init__(self, watch: Watch, report: Report) -> None:
        self._watch, self._report = watch, report
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finish")
        self._held: tuple[Opened, Future[None]] | None = None
        self._first: float | None = None

    def __enter__(self) -> Behind:
        return self

    def begins(self) -> None:
        """The first request is about to be sent."""
        self._first = self._first or time.monotonic()

    def follow(self, opened: Opened) -> None:
        """Wait for the job before, then end this one in the thread."""
        self._finish()
        kept = opened.keep()
        self._held = kept, self._thread.submit(kept.finish, self._watch)

    def _finish(self) -> None:
        """Waiting for verdicts counts as sampling that was held up; scores do not."""
        if self._held is None:
            return
        opened, ended = self._held
        try:
            if opened.judging is not None:
                self._report.sample_seconds += opened.judging.finish()
            ended.result()
        except BaseException:
            self._stop()
            raise
        finally:
            self._held = None

    def _stop(self) -> None:
        if self._held is not None and self._held[0].judging is not None:
            self._held[0].judging.stop()

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """What failed is another job: the held one is finished, unless the user stopped it."""
        try:
            if kind is None or issubclass(kind, Exception):
                self._finish()
            else:
                self._stop()
        finally:
            self._thread.shutdown()
        if self._first is not None:
            self._report.work_seconds = time.monotonic() - self._first


def _fill(
    opened: Opened,
    samplers: Samplers,
    judges: JudgeOnDemand,
    places: Places,
    watch: Watch,
    report: Report,
    behind: Behind,
) -> None:
    """Draw what one job lacks and hand it to the judge."""
    job, store = opened.job, opened.store
    missing = job.missing(store)
    watch.started(job, sum(count for _, _, count in missing))
    unjudged = [key for key in store.unjudged() if key[0] in job.ids]
    if not missing and not unjudged:
        return
    judge = judges.for_task(job.task)
    if missing:
        places.ready(job.target)
        samplers.on(job)
    behind.begins()
    judging = opened.judge(judge, report)
    start = time.monotonic()
    judging.submit(unjudged)
    if missing:
        sample_missing(job, store, samplers, missing, judging, watch, report)
    judging.hand_over()
    report.sample_seconds += time.monotonic() - start
    watch.drawn(job)


def write_settings(job: Job) -> None:
    """What shaped the samples, readable, beside them."""
    text = json.dumps(job.facts, indent=1, sort_keys=True) + "\n"
    write_text(job.store_path.parent / "settings.json", text)


def header_of(job: Job, weights: str) -> dict[str, Any]:
    """Whose samples a store holds: other weights, tokenizer or settings are refused."""
    return {
        "checkpoint": job.target.text,
        "weights": weights,
        "tokenizer": tokenizer_hash(job.target.path),
        "facts": dict(job.facts),
    }


def sample_missing(
    job: Job,
    store: Store,
    samplers: Samplers,
    missing: Sequence[tuple[int, int, int]],
    judging: JudgeThread,
    watch: Watch,
    report: Report,
) -> None:
    """Draw the missing blocks, store each at once, hand it to the judge."""
    sampler = samplers.on(job)
    requests, hopeless = requests_of(job, sampler.tokenizer, missing, report)
    samplers.verified(requests)
    for problem, block, count in hopeless:
        judging.no_room((problem, block), count)
        watch.sampled(job, count)
    for request_id, completions in sampler.generate(requests):
        if any(c.finish is Finish.ABORT for c in completions):
            report.faults.append(f"the engine gave up on request {request_id}")
            continue  # drawn again by the next call
        index, block = (int(part) for part in request_id.split("/"))
        samples = [Sample(c.text, str(c.finish), len(c.token_ids)) for c in completions]
        problem = job.problems[index].id
        store.add_block(problem, block, samples)
        report.sampled += len(samples)
        report.tokens += sum(sample.tokens for sample in samples)
        judging.submit([(problem, block)])
        watch.sampled(job, len(samples))


def requests_of(
    job: Job, tokenizer: Tokenizer, missing: Iterable[tuple[int, int, int]], report: Report
) -> tuple[list[Request], list[tuple[str, int, int]]]:
    """Requests of the missing blocks, and the blocks whose prompt leaves no room at all."""
    settings, requests, hopeless = job.settings, [], []
    lengths: dict[int, tuple[int, ...]] = {}
    for index, block, count in missing:
        if index not in lengths:
            lengths[index] = tokenizer.encode(job.prompts[index])
            fit = budget(len(lengths[index]), settings.max_tokens, settings.max_len)
            report.shortened += fit.action == "shorten"
            report.no_room += fit.action == "fail_problem"
        ids, problem = lengths[index], job.problems[index].id
        fit = budget(len(ids), settings.max_tokens, settings.max_len)
        if fit.action == "fail_problem":
            hopeless.append((problem, block, count))
            continue
        seed = derive(settings.seed, "eval", job.target.text, job.task.name, problem, block)
        sampling = request_sampling(
            settings,
            n=count,
            max_tokens=fit.max_tokens,
            seed=seed,
            prompt=job.prompts[index],
            stop_token_ids=tokenizer.stop_token_ids,
        )
        requests.append(Request(id=f"{index}/{block}", prompt_ids=ids, sampling=sampling))
    return requests, hopeless
