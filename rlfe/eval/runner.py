"""One checkpoint after another: sample what is missing, judge distinct answers once, append.

`jobs` plans (no model), `run_jobs` does it: one load per checkpoint, all its tasks, judging in a
thread while the next block is generated. Everything finished is on disk the moment it exists
(`store.py`), so a killed evaluation continues; what cannot be judged through a fault of ours is
not recorded and makes the evaluation incomplete. Not here: where checkpoints come from, tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfe.engines.base import Sampler, Tokenizer
from rlfe.errors import RequestError
from rlfe.eval.settings import (
    BLOCK,
    Settings,
    budget,
    digest,
    request_sampling,
    sample_facts,
    sample_key,
    settings_text,
)
from rlfe.eval.store import BlockKey, Judged, Sample, Store, text_hash
from rlfe.naming import checkpoint_name
from rlfe.randomness import derive
from rlfe.tasks.base import Reply, Task
from rlfe.types import Finish, Problem, Prompt, Request, Status

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge

JUDGE_AT = 16  # blocks handed to the judge at a time: enough to keep its workers busy
WAITING = 4  # such hand-overs that may wait before generation pauses
NO_ROOM = "prompt leaves no room for a token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checkpoint to score. `text` is its name in seeds and samples: `<cell>/global_step_30`.

    `Target(path=Path("runs/x/global_step_30"), cell="x", step=30, evals=Path("runs/x/evals"))`
    """

    path: Path
    cell: str
    step: int
    evals: Path

    @property
    def text(self) -> str:
        return f"{self.cell}/{checkpoint_name(self.step)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checkpoint on one task: what to ask, where samples lie, how the row is labelled."""

    target: Target
    task: Task
    settings: Settings
    problems: tuple[Problem, ...]
    prompts: tuple[Prompt, ...]
    facts: Mapping[str, Any]
    store_path: Path

    @property
    def rule(self) -> str:
        return f"{self.task.name} {self.task.version}"

    @property
    def settings_text(self) -> str:
        return settings_text(self.facts, self.settings, self.rule)

    def missing(self, store: Store) -> list[tuple[int, int, int]]:
        """(index of the problem, block, samples) still to be drawn."""
        n = self.settings.n
        return [
            (index, block, count)
            for index, problem in enumerate(self.problems)
            for block, count in store.missing(problem.id, n, BLOCK)
        ]


@dataclass(slots=True)
class Report:
    """What happened while running: counts for the user, and whether something is still missing."""

    sampled: int = 0
    judged: int = 0
    shortened: int = 0
    no_room: int = 0
    unscored: int = 0
    loads: int = 0
    engines: int = 0
    faults: list[str] = field(default_factory=list)


class Watch:
    """What `run_jobs` tells while it works; the command line draws it, tests ignore it."""

    def loading(self, target: Target) -> None: ...
    def sampled(self, job: Job, samples: int) -> None: ...
    def finished(self, job: Job) -> None: ...


def make_job(target: Target, task: Task, settings: Settings, engine: Mapping[str, Any]) -> Job:
    """Plan one checkpoint on one task; loads problems, no model.

    Raises:
        RequestError: an unknown example id, or a limit above the task's size.
    """
    everything = task.problems("test")
    if settings.limit is not None and settings.limit > len(everything):
        raise RequestError(
            f"limit {settings.limit} is more than the {len(everything)} problems of {task.name}",
            hint="Leave --limit out to score all of them.",
        )
    prompts = tuple(task.prompt(p, settings.style, settings.examples) for p in everything)
    facts = sample_facts(settings, prompts, data_sha256=task.data_sha256(), engine=engine)
    folder = target.evals / task.name / sample_key(facts)
    return Job(
        target=target,
        task=task,
        settings=settings,
        problems=everything[: settings.limit],
        prompts=prompts[: settings.limit],
        facts=facts,
        store_path=folder / f"step_{target.step:06d}.jsonl.zst",
    )


class Samplers:
    """The one sampler: reloads in place while the architecture and the tokenizer stay the same.

    Args:
        make: Builds a sampler on a model folder.
        same: Whether a sampler built on the first folder can load the second.
    """

    def __init__(self, make: Callable[[Path], Sampler], same: Callable[[Path, Path], bool]) -> None:
        self._make, self._same = make, same
        self._sampler: Sampler | None = None
        self._built_on = self._holds = Path()
        self.loads = self.engines = 0

    def on(self, path: Path) -> Sampler:
        """A sampler that holds the weights in `path`."""
        if self._sampler is not None and self._holds == path:
            return self._sampler
        if self._sampler is not None and self._same(self._built_on, path):
            self._sampler.load(path)
        else:
            self.close()
            self._sampler, self._built_on = self._make(path), path
            self.engines += 1
        self._holds = path
        self.loads += 1
        return self._sampler

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None


def same_files(first: Path, second: Path) -> bool:
    """Whether two model folders share architecture and tokenizer, byte for byte."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return all(_bytes(first / name) == _bytes(second / name) for name in names)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def tokenizer_hash(folder: Path) -> str:
    """Digest of what turns a prompt into ids: tokenizer files and chat template."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model")
    data = {name: hashlib.sha256(_bytes(folder / name) or b"").hexdigest() for name in names}
    return digest(data)[:16]


def run_jobs(
    jobs: Sequence[Job],
    samplers: Samplers,
    judge: Judge | None,
    weights: Callable[[Path], str],
    watch: Watch | None = None,
) -> Report:
    """Bring every job to n judged samples per problem; jobs of one checkpoint stand together.

    Raises:
        RequestError: a store holds samples of other weights, or is being written by another
            process. Everything finished before is kept.
    """
    report, watch = Report(), watch or Watch()
    for job in jobs:
        header = {
            "checkpoint": job.target.text,
            "weights": weights(job.target.path),
            "tokenizer": tokenizer_hash(job.target.path),
            "facts": dict(job.facts),
        }
        with Store(job.store_path, job.rule).open(header) as store:
            with _JudgeThread(job, store, judge, report) as judging:
                judging.submit(store.unjudged())
                if missing := job.missing(store):
                    watch.loading(job.target)
                    _sample(
                        job, store, samplers.on(job.target.path), missing, judging, watch, report
                    )
            watch.finished(job)
    report.loads, report.engines = samplers.loads, samplers.engines
    return report


def _sample(
    job: Job,
    store: Store,
    sampler: Sampler,
    missing: Sequence[tuple[int, int, int]],
    judging: _JudgeThread,
    watch: Watch,
    report: Report,
) -> None:
    """Draw the missing blocks, store each at once, hand it to the judge."""
    requests, hopeless = _requests(job, sampler.tokenizer, missing, report)
    for problem, block, count in hopeless:
        judging.no_room((problem, block), count)
        watch.sampled(job, count)
    for request_id, completions in sampler.generate(requests):
        index, block = (int(part) for part in request_id.split("/"))
        samples = [Sample(c.text, str(c.finish), len(c.token_ids)) for c in completions]
        problem = job.problems[index].id
        store.add_block(problem, block, samples)
        report.sampled += len(samples)
        judging.submit([(problem, block)])
        watch.sampled(job, len(samples))


def _requests(
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


class _JudgeThread:
    """Judges blocks in one thread beside generation. Identical answers of a problem run once."""

    def __init__(self, job: Job, store: Store, judge: Judge | None, report: Report) -> None:
        self._job, self._store, self._judge, self._report = job, store, judge, report
        self._problems = {p.id: (p, q) for p, q in zip(job.problems, job.prompts, strict=True)}
        self._known = self._seen_before()
        self._waiting: list[BlockKey] = []
        self._futures: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")

    def _seen_before(self) -> dict[tuple[str, str], Judged]:
        """Verdicts by (problem, answer). Only final ones: a timeout may have been the machine's."""
        known = {}
        for (problem, _), row in self._store.verdicts.items():
            for verdict in row:
                if verdict.status != Status.TIMEOUT:
                    known[problem, verdict.answer] = verdict
        return known

    def __enter__(self) -> _JudgeThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._hand_over()
                self._settle(0)
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, blocks: Iterable[BlockKey]) -> None:
        """Queue stored blocks; pauses the caller when judging falls behind."""
        for key in blocks:
            if key[0] in self._problems:
                self._waiting.append(key)
            if len(self._waiting) >= JUDGE_AT:
                self._hand_over()
        self._settle(WAITING)

    def no_room(self, key: BlockKey, count: int) -> None:
        """Record a block whose prompt leaves no room for a token: all its samples are wrong."""
        verdict = Judged("", str(Status.TRUNCATED), NO_ROOM, 0.0, {})
        self._pool.submit(self._store_no_room, key, count, verdict).result()

    def _store_no_room(self, key: BlockKey, count: int, verdict: Judged) -> None:
        self._store.add_block(*key, [Sample("", str(Finish.LENGTH), 0)] * count)
        self._store.add_verdicts({key: [verdict] * count})

    def _hand_over(self) -> None:
        if self._waiting:
            self._futures.append(self._pool.submit(self._judge_blocks, self._waiting))
            self._waiting = []

    def _settle(self, allowed: int) -> None:
        """Wait until at most `allowed` hand-overs are open; raises what judging raised."""
        while len(self._futures) > allowed:
            self._futures.pop(0).result()

    def _judge_blocks(self, blocks: Sequence[BlockKey]) -> None:
        answers: dict[tuple[BlockKey, int], str] = {}
        fresh: dict[tuple[str, str], Reply] = {}
        for key in blocks:
            problem, prompt = self._problems[key[0]]
            for place, sample in enumerate(self._store.blocks[key]):
                finish = Finish(sample.finish)
                reply = Reply(
                    key="", problem=problem, prompt=prompt, text=sample.text, finish=finish
                )
                answers[key, place] = answer = self._answer_hash(reply)
                if (problem.id, answer) not in self._known:
                    fresh[problem.id, answer] = reply
        self._known |= self._verdicts(fresh)
        whole = {}
        for key in blocks:
            row = [
                self._known.get((key[0], answers[key, place]))
                for place in range(len(self._store.blocks[key]))
            ]
            scored = [verdict for verdict in row if verdict is not None]
            self._report.unscored += len(row) - len(scored)
            if len(scored) == len(row):
                whole[key] = scored
        self._report.judged += sum(len(row) for row in whole.values())
        self._store.add_verdicts(whole)

    def _answer_hash(self, reply: Reply) -> str:
        """What makes two replies one: the program (or, where nothing is run, the text), and how
        the reply ended, since a cut reply that fails is `truncated`."""
        answer = self._job.task.answer(reply) if self._job.task.runs_programs else ""
        return text_hash(f"{answer or reply.text}\x00{reply.finish}")

    def _verdicts(self, fresh: Mapping[tuple[str, str], Reply]) -> dict[tuple[str, str], Judged]:
        keys = dict(enumerate(fresh))
        replies = [
            Reply(key=str(i), problem=r.problem, prompt=r.prompt, text=r.text, finish=r.finish)
            for i, r in enumerate(fresh.values())
        ]
        found = {}
        for name, verdict in self._job.task.judge(replies, self._judge):
            if verdict.status is Status.INFRASTRUCTURE:
                self._report.faults.append(verdict.detail)
                continue
            problem, answer = keys[int(name)]
            found[problem, answer] = Judged(
                answer, str(verdict.status), verdict.detail, verdict.seconds, verdict.facts
            )
        return found
