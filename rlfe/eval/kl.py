"""How far training moved a model: KL to the base, on samples of the base itself.

Mean over prompts x of the trained task and samples y of the base (temperature 1, top_p 1, n = 8)
of log base(y) - log pi(y), per sequence and per token: an unbiased estimate of KL(base || pi) over
replies of that length limit. On other samples the number is no KL and is called `mean log ratio`.
Source and use: docs/statistics.md 6, arXiv:2509.04259.

The base is sampled once. Its token ids lie in `texts.jsonl.zst` in a folder of their own beside
its evaluations; the summed log-probabilities of every model (the base included) in one small file
each, appended prompt by prompt: a killed call continues. Scoring is teacher-forced and runs on
transformers whatever samples (`rlfe.engines.scorer`). Not here: tables, the fit over checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlfe.engines.base import Sampler
from rlfe.engines.scorer import Scorer
from rlfe.errors import RlfeError
from rlfe.eval.frames import FrameFile, frames
from rlfe.eval.jobs import Job, Target, make_job
from rlfe.eval.places import Places
from rlfe.eval.settings import budget, request_sampling
from rlfe.eval.statistics import DRAWS, LEVEL, draw_weights
from rlfe.eval.store import check_same
from rlfe.randomness import derive, generator
from rlfe.types import Finish, Request

SCHEMA = "rlfe.kl/1"
SAMPLES = 8
KL, LOG_RATIO = "KL to base", "mean log ratio"
TEXTS = "texts.jsonl.zst"
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A checkpoint and its base on the trained task, both asked as `settings` of the jobs say."""

    base: Job
    point: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """What one checkpoint came to; intervals are 95 % over prompts, None with a single one.

    `per_sequence` and `per_token` in nats. `no_room`: prompts that leave no room for a reply.
    """

    pair: Pair
    measure: str
    prompts: int
    no_room: int
    tokens: int
    per_sequence: float
    sequence_interval: tuple[float, float] | None
    per_token: float
    token_interval: tuple[float, float] | None


class Watch:
    """What `measure` tells while it works."""

    def started(self, what: str, prompts: int) -> None:
        """So many prompts are to be sampled or scored."""

    def advanced(self) -> None:
        """One more is on disk."""

    def ended(self) -> None:
        """All of them are."""


def pair_of(job: Job, base: Target, temperature: float = 1.0, top_p: float = 1.0) -> Pair:
    """The measurement that belongs to a scored checkpoint. 1 and 1 make it a KL."""
    settings = replace(job.settings, n=SAMPLES, temperature=temperature, top_p=top_p, ks=())
    made = [
        make_job(target, job.task, settings, job.recipe, job.facts["engine"])
        for target in (base, job.target)
    ]
    return Pair(base=made[0], point=made[1])


def measure_name(job: Job) -> str:
    """Only the base's own distribution gives a KL."""
    whole = job.settings.temperature == 1 and job.settings.top_p == 1
    return KL if whole else LOG_RATIO


def folder_of(job: Job) -> Path:
    """Where texts and log-probabilities of these settings lie."""
    return job.store_path.parent.with_name(f"kl-{job.store_path.parent.name}")


def logp_path(job: Job) -> Path:
    """The file of one model's log-probabilities."""
    return folder_of(job) / f"step_{job.target.step:06d}.jsonl.zst"


class Lines:
    """A file of lines, one for each problem, with a header that says whose they are.

    Raises:
        RequestError: They are of other weights or settings, or another process writes them.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        whole = {"kind": "header", "schema": SCHEMA, **header}
        self._file = FrameFile(path)
        try:
            found, self.rows, end = read_lines(path)
            if found is not None:
                check_same(path, found, whole)
            self._file.truncate(end)
            if found is None:
                self._file.append([whole])
        except BaseException:
            self._file.close()
            raise

    def add(self, line: Line) -> None:
        self._file.append([line])
        self.rows[line["p"]] = line

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_lines(path: Path) -> tuple[Line | None, dict[str, Line], int]:
    """Header, line of each problem, and where the last whole frame ends; None: no header."""
    header: Line | None = None
    rows: dict[str, Line] = {}
    whole = 0
    for text, whole in frames(path) if path.exists() else ():  # noqa: B007
        for line in map(json.loads, text.splitlines()):
            if line.get("kind") == "header":
                header = line
            else:
                rows[line["p"]] = line
    return header, rows, whole


@dataclass(slots=True)
class Engines:
    """The one model in memory: a sampler while texts are drawn, a scorer afterwards."""

    make_sampler: Callable[[Job], Sampler]
    make_scorer: Callable[[Job], Scorer]
    _scorer: Scorer | None = field(default=None, init=False)
    _holds: Path | None = field(default=None, init=False)

    @contextmanager
    def sampler(self, job: Job) -> Iterator[Sampler]:
        self.close()
        sampler = self.make_sampler(job)
        try:
            yield sampler
        finally:
            sampler.close()

    def scorer(self, job: Job) -> Scorer:
        """A scorer with the weights of the job's checkpoint."""
        if self._scorer is None:
            self._scorer = self.make_scorer(job)
        elif self._holds != job.target.path:
            self._scorer.load(job.target.path)
        self._holds = job.target.path
        return self._scorer

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None


def measure(
    pairs: Sequence[Pair], engines: Engines, places: Places, watch: Watch | None = None
) -> Iterator[Distance]:
    """Bring every pair to its log-probabilities, base texts first, and yield what they come to.

    Raises:
        RequestError: A file holds what other weights gave.
        RlfeError: The engine gave up on a prompt; what is finished is kept.
    """
    watch = watch or Watch()
    bases = {_place(pair.base): pair.base for pair in pairs}
    texts_of = {place: _drawn(base, engines, places, watch) for place, base in bases.items()}
    for pair in pairs:
        texts = texts_of[_place(pair.base)]
        base = _scored(pair.base, pair.base, texts, engines, places, watch)
        point = _scored(pair.point, pair.base, texts, engines, places, watch)
        places.done(pair.point.target)
        yield distance(pair, texts, base, point)


def _place(base: Job) -> tuple[Path, int]:
    """Pairs that share texts: the same samples of the same first problems."""
    return folder_of(base), len(base.problems)


def _drawn(job: Job, engines: Engines, places: Places, watch: Watch) -> dict[str, Line]:
    """The base's samples with their token ids: {"p": problem, "x": prompt, "y": replies}."""
    header = {"weights": places.weights(job.target), "facts": dict(job.facts)}
    with Lines(folder_of(job) / TEXTS, header) as lines:
        missing = [i for i, problem in enumerate(job.problems) if problem.id not in lines.rows]
        if missing:
            places.ready(job.target)
            watch.started(f"{job.target.text} {job.task.name} texts for KL", len(missing))
            with engines.sampler(job) as sampler:
                _draw(job, missing, sampler, lines, watch)
            watch.ended()
        return {problem.id: lines.rows[problem.id] for problem in job.problems}


def _draw(job: Job, missing: Sequence[int], sampler: Sampler, lines: Lines, watch: Watch) -> None:
    requests = []
    for index in missing:
        ids, problem = sampler.tokenizer.encode(job.prompts[index]), job.problems[index].id
        fit = budget(len(ids), job.settings.max_tokens, job.settings.max_len)
        if fit.action == "fail_problem":
            lines.add({"p": problem, "x": [], "y": []})
            watch.advanced()
            continue
        sampling = request_sampling(
            job.settings,
            n=SAMPLES,
            max_tokens=fit.max_tokens,
            seed=derive(job.settings.seed, "kl", job.target.text, job.task.name, problem),
            prompt=job.prompts[index],
            stop_token_ids=sampler.tokenizer.stop_token_ids,
        )
        requests.append(Request(id=str(index), prompt_ids=ids, sampling=sampling))
    prompts = {request.id: request.prompt_ids for request in requests}
    for name, completions in sampler.generate(requests):
        if any(c.finish is Finish.ABORT for c in completions):
            raise RlfeError(
                f"the engine gave up on {job.problems[int(name)].id}",
                hint="Finished texts are kept; run it again.",
            )
        replies = [list(c.token_ids) for c in completions]
        lines.add({"p": job.problems[int(name)].id, "x": list(prompts[name]), "y": replies})
        watch.advanced()


def _scored(
    job: Job,
    base: Job,
    texts: Mapping[str, Line],
    engines: Engines,
    places: Places,
    watch: Watch,
) -> dict[str, list[float]]:
    """Summed log-probability of every base sample under the job's weights, by problem."""
    header = {
        "weights": places.weights(job.target),
        "base": places.weights(base.target),
        "facts": dict(job.facts),
    }
    with Lines(logp_path(job), header) as lines:
        missing = [name for name, text in texts.items() if text["y"] and name not in lines.rows]
        if missing:
            places.ready(job.target)
            watch.started(f"{job.target.text} {job.task.name} scored for KL", len(missing))
            scorer = engines.scorer(job)
            for name in missing:
                found = scorer.logprobs(texts[name]["x"], texts[name]["y"])
                lines.add({"p": name, "l": [float(logp_L.sum()) for logp_L in found]})
                watch.advanced()
            watch.ended()
        return {name: lines.rows[name]["l"] for name, text in texts.items() if text["y"]}


def distance(
    pair: Pair,
    texts: Mapping[str, Line],
    base: Mapping[str, Sequence[float]],
    point: Mapping[str, Sequence[float]],
) -> Distance:
    """Means and their bootstrap over prompts, from summed log-probabilities.

    Raises:
        RlfeError: No prompt has a reply.
    """
    names = [name for name, text in texts.items() if text["y"]]
    if not names:
        raise RlfeError(f"{pair.base.target.text}: no prompt of {pair.base.task.name} has room")
    ratio_PS = np.array([base[name] for name in names]) - np.array([point[name] for name in names])
    token_P = np.array([sum(len(reply) for reply in texts[name]["y"]) for name in names])
    sequence, token = _intervals(pair, ratio_PS, token_P)
    return Distance(
        pair=pair,
        measure=measure_name(pair.base),
        prompts=len(names),
        no_room=len(texts) - len(names),
        tokens=int(token_P.sum()),
        per_sequence=float(ratio_PS.mean()),
        sequence_interval=sequence,
        per_token=float(ratio_PS.sum() / token_P.sum()),
        token_interval=token,
    )


def _intervals(
    pair: Pair, ratio_PS: np.ndarray, token_P: np.ndarray
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    prompts = len(token_P)
    if prompts < 2:
        return None, None
    weights_BP = draw_weights(prompts, DRAWS, generator(0, "bootstrap", "kl", pair.base.task.name))
    sequence_B = weights_BP @ ratio_PS.mean(axis=1) / prompts
    token_B = (weights_BP @ ratio_PS.sum(axis=1)) / (weights_BP @ token_P)
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(sequence_B, ends)
    token_low, token_high = np.quantile(token_B, ends)
    return (float(low), float(high)), (float(token_low), float(token_high))


def forget(pairs: Sequence[Pair]) -> None:
    """Drop what an earlier call drew and scored (`--fresh`)."""
    for pair in pairs:
        for path in (folder_of(pair.base) / TEXTS, logp_path(pair.base), logp_path(pair.point)):
            path.unlink(missing_ok=True)
