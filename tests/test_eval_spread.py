"""An evaluation over many samplers: units, who gets which, and what a lost sampler costs."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.engines.fake import FakeLearner
from rlfe.errors import RequestError, RlfeError
from rlfe.eval.fleet import Answered, Event, Joined, Lost
from rlfe.eval.jobs import Job, make_job
from rlfe.eval.judging import Report
from rlfe.eval.places import Places, stamp
from rlfe.eval.runner import run_jobs
from rlfe.eval.samplers import Samplers
from rlfe.eval.settings import Settings
from rlfe.eval.spread import Spread, SpreadWatch
from rlfe.eval.units import Plan, Unit, cut, unit_size
from rlfe.eval.worker import Failed, Parcel, Refused, Result, Worker
from rlfe.tasks import get
from rlfe.types import Completion, Finish, Request
from rlfe.weights import weights_hash
from tests.eval_doubles import ENGINE, RECIPE, ParityTask, SeedSampler
from tests.test_eval_runner import BASE, NO_JUDGE, rows, target

MISSING = [(problem, block, 8) for problem in range(5) for block in range(2)]


def test_a_unit_is_about_a_minute_of_work() -> None:
    def size(**changes: object) -> int:
        usual = {"remaining": 1000, "samplers": 8, "batch": 8, "seconds_per_block": 0.5}
        return unit_size(**{**usual, "last": False, **changes})  # type: ignore[arg-type]

    assert size() == 120
    assert size(seconds_per_block=None) == 32
    assert size(seconds_per_block=100.0) == 8  # never below one engine batch
    assert size(remaining=5) == 5
    assert size(last=True) == 63  # half of an eighth
    assert size(last=True, remaining=20) == 8


def test_a_unit_ends_between_problems_where_it_holds_a_whole_one() -> None:
    assert [cut(MISSING, size) for size in (1, 2, 3, 5, 9, 10, 99)] == [1, 2, 2, 4, 8, 10, 10]
    assert cut([], 3) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=12), st.integers(1, 20))
def test_units_cover_every_block_once(problems: list[tuple[int, int]], size: int) -> None:
    blocks = [(n, block, 8) for n, (_, count) in enumerate(problems) for block in range(count)]
    left, seen = blocks, []
    while left:
        count = cut(left, size)
        assert 1 <= count <= size
        seen, left = seen + left[:count], left[count:]
    assert seen == blocks


class Toy(ParityTask):
    """Judged without programs, so that no judge has to start."""

    runs_programs = False


def model(folder: Path, number: int) -> None:
    learner = FakeLearner()
    learner.updates = number
    learner.export(folder)


def alone(jobs: Sequence[Job]) -> Report:
    """The same in one process."""
    samplers = Samplers(lambda job: SeedSampler(job.target.path), lambda a, b: True)
    return run_jobs(jobs, samplers, NO_JUDGE, Places(weights_hash))


def jobs_of(root: Path, steps: Sequence[int] = (30, 60), settings: Settings = BASE) -> list[Job]:
    jobs = []
    for step in steps:
        point = target(root, step)
        model(point.path, step)
        jobs.append(make_job(point, Toy(), settings, RECIPE, ENGINE))
    return jobs


def parcel_of(jobs: Sequence[Job]) -> Parcel:
    stamps = {job.target.text: stamp(job.target.path) for job in jobs}
    return Parcel(jobs=tuple(jobs), references={}, stamps=stamps, cache=Path("none"))


class Faults:
    """Which units end badly: `Faults({3: ["lost", "failed"]})` the first two times for unit 3."""

    def __init__(self, by_unit: dict[int, list[str]] | None = None, every: str = "") -> None:
        self.by_unit, self.every = by_unit or {}, every

    def next(self, unit: Unit) -> str:
        planned = self.by_unit.get(unit.number)
        return self.every or (planned.pop(0) if planned else "")


class LocalFleet:
    """Samplers in this process, one unit a turn, with faults where they are wanted."""

    def __init__(self, jobs: Sequence[Job], samplers: int, faults: Faults | None = None) -> None:
        self.parcel, self.faults = parcel_of(jobs), faults or Faults()
        self.numbers = itertools.count(1)
        self.workers: dict[str, Worker] = {}
        self.queues: dict[str, list[Unit]] = {}
        self.given: list[tuple[str, Unit]] = []
        self.forgotten: list[str] = []
        self.started = 0
        self.wanted = samplers
        self.made: list[SeedSampler] = []

    def _make(self, job: Job) -> SeedSampler:
        self.made.append(SeedSampler(job.target.path))
        return self.made[-1]

    def submit(self, name: str, unit: Unit) -> None:
        self.queues[name].append(pickle.loads(pickle.dumps(unit)))
        self.given.append((name, unit))

    def wait(self) -> Iterable[Event]:
        while len(self.workers) < self.wanted:
            name = f"node/{next(self.numbers)}"
            self.workers[name] = Worker(self.parcel, make=self._make)
            self.queues[name] = []
            yield Joined(name=name, host="node")
        for name in [name for name, queue in self.queues.items() if queue]:
            yield self._work(name)

    def _work(self, name: str) -> Event:
        unit = self.queues[name].pop(0)
        fault = self.faults.next(unit)
        if fault == "lost":
            return Lost(name=name, units=(unit, *self.replace(name)), why="killed")
        if fault == "failed":
            return Answered(name=name, unit=unit, outcome=Failed(why="device lost"))
        return Answered(name=name, unit=unit, outcome=self.workers[name].run(unit))

    def replace(self, name: str) -> tuple[Unit, ...]:
        self.workers.pop(name).close()
        return tuple(self.queues.pop(name))

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    @property
    def alive(self) -> bool:
        return self.wanted > 0


def spread(
    jobs: Sequence[Job], fleet: LocalFleet, batch: int = 16, watch: SpreadWatch | None = None
) -> Report:
    places, watch = Places(weights_hash), watch or SpreadWatch()
    samplers = fleet.wanted or 1
    return Spread(jobs, fleet, places, watch, samplers=samplers, batch=batch).run()


def scores(jobs: Iterable[Job]) -> list[dict[str, str]]:
    return [row for job in jobs for row in rows(job)]


@pytest.fixture
def whole(tmp_path: Path) -> list[dict[str, str]]:
    """Scores of one process."""
    jobs = jobs_of(tmp_path / "whole")
    alone(jobs)
    return scores(jobs)


def test_the_scores_are_those_of_one_process(tmp_path: Path, whole: list[dict[str, str]]) -> None:
    jobs = jobs_of(tmp_path)
    fleet = LocalFleet(jobs, samplers=3)
    report = spread(jobs, fleet)
    assert scores(jobs) == whole
    assert (report.sampled, report.judged, report.lost_units, report.faults) == (160, 160, 0, [])
    assert sorted(fleet.forgotten) == sorted(job.target.text for job in jobs)
    again = LocalFleet(jobs, samplers=3)
    assert spread(jobs, again).sampled == 0
    assert again.given == []


def test_one_process_goes_on_where_the_cluster_stopped(
    tmp_path: Path, whole: list[dict[str, str]]
) -> None:
    jobs = jobs_of(tmp_path)
    with pytest.raises(RlfeError, match="every sampler fails: device lost"):
        spread(jobs, LocalFleet(jobs, 2, OnlyAFew(3)), batch=8)
    there = sum(len(row) for job in jobs for row in job.read().blocks.values())
    assert 0 < there < 160
    assert alone(jobs).sampled == 160 - there
    assert scores(jobs) == whole


class OnlyAFew(Faults):
    """After some units nothing works any more."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.left = good

    def next(self, unit: Unit) -> str:
        self.left -= 1
        return "" if self.left >= 0 else "failed"


@pytest.mark.parametrize("kind", ["lost", "failed"])
def test_a_lost_sampler_costs_only_its_units(
    tmp_path: Path, whole: list[dict[str, str]], kind: str
) -> None:
    jobs = jobs_of(tmp_path)
    fleet = LocalFleet(jobs, 2, Faults({2: [kind], 5: [kind, kind]}))
    report = spread(jobs, fleet)
    assert scores(jobs) == whole
    assert report.sampled == 160
    assert report.lost_units >= 3
    assert report.faults == []


def test_a_unit_that_kills_every_sampler_is_left_out_and_named(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    fleet = LocalFleet(jobs, 2, Faults({2: ["lost"] * 9}))
    report = spread(jobs, fleet)
    assert report.faults == [
        "x_mbpp_nobuf_lr1e3/global_step_30: 3 samplers failed, the last: killed"
    ]
    assert 0 < report.sampled < 80
    assert [unit.number for _, unit in fleet.given].count(2) == 3


def test_nothing_goes_with_a_unit_that_was_lost_before(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    fleet = LocalFleet(jobs, 1, Faults({1: ["lost", "lost"]}))
    report = spread(jobs, fleet)
    assert report.sampled == 80
    assert [unit.losses for _, unit in fleet.given if unit.number == 1] == [0, 1, 2]
    assert max(unit.losses for _, unit in fleet.given if unit.number != 1) == 1


def test_no_sampler_at_all_ends_with_an_error(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    with pytest.raises(RlfeError, match="no sampler is left"):
        spread(jobs, LocalFleet(jobs, 0))


def test_a_sampler_keeps_the_checkpoint_that_it_has_loaded(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30, 60, 90, 120], replace(BASE, n=32))
    fleet = LocalFleet(jobs, 2)
    report = spread(jobs, fleet)
    assert report.sampled == 4 * 160
    assert report.loads <= 6  # each checkpoint once, and the rest of the last for the other one
    assert report.engines == 2


def test_a_node_without_the_checkpoint_is_named(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    away = replace(jobs[0], target=replace(jobs[0].target, path=tmp_path / "away"))
    fleet = LocalFleet(jobs, 1)
    fleet.parcel = replace(fleet.parcel, jobs=(away,))
    with pytest.raises(RequestError, match=r"node \S+: there is no checkpoint at .*away") as told:
        spread(jobs, fleet)
    assert "file system that all nodes share" in told.value.hint


def test_a_node_with_other_weights_under_the_same_name_is_named(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    fleet = LocalFleet(jobs, 1)
    other = tmp_path / "other"
    other.mkdir()
    model(other, 7)
    away = replace(jobs[0], target=replace(jobs[0].target, path=other))
    fleet.parcel = replace(fleet.parcel, jobs=(away,))
    with pytest.raises(RequestError, match=r"node/1 sees another checkpoint at .*another weights"):
        spread(jobs, fleet)


def test_samples_of_other_weights_are_refused_before_a_sampler_works(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    alone(jobs)
    model(jobs[0].target.path, 99)
    fleet = LocalFleet(jobs, 1)
    with pytest.raises(RequestError, match="another weights"):
        spread(jobs, fleet)
    assert fleet.given == []


def test_what_is_drawn_but_not_judged_is_judged_without_drawing(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    jobs[0].task.broken.add("toy/1")  # type: ignore[attr-defined]
    report = spread(jobs, LocalFleet(jobs, 2))
    assert (report.sampled, report.judged) == (80, 64)
    assert set(report.faults) == {"no jail"}
    jobs[0].task.broken.clear()  # type: ignore[attr-defined]
    report = spread(jobs, LocalFleet(jobs, 2))
    assert (report.sampled, report.judged, report.loads) == (0, 16, 0)


def test_other_problems_on_a_node_are_refused(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    facts = {**jobs[0].facts, "data_sha256": "0"}
    worker = Worker(parcel_of([replace(jobs[0], facts=facts)]))
    answer = worker.run(Unit(number=1, job=0, missing=((0, 0, 8),)))
    assert isinstance(answer, Refused)
    assert "toy_plus has other problems here" in answer.error.what


def test_an_engine_that_raises_is_a_failure_that_another_node_may_not_have(tmp_path: Path) -> None:
    class Broken(SeedSampler):
        def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
            raise RuntimeError("CUDA error: device-side assert\n  somewhere")

    jobs = jobs_of(tmp_path, [30])
    worker = Worker(parcel_of(jobs), make=lambda job: Broken(job.target.path))
    answer = worker.run(Unit(number=1, job=0, missing=((0, 0, 8),)))
    assert isinstance(answer, Failed)
    assert answer.why.endswith("RuntimeError: CUDA error: device-side assert somewhere")


def test_a_worker_returns_texts_and_verdicts_and_writes_nothing(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    before = sorted(tmp_path.rglob("*"))
    worker = Worker(parcel_of(jobs), make=lambda job: SeedSampler(job.target.path))
    answer = worker.run(Unit(number=1, job=0, missing=((0, 0, 8), (0, 1, 8))))
    assert isinstance(answer, Result)
    assert [block.key for block in answer.blocks] == [("toy/0", 0), ("toy/0", 1)]
    assert answer.blocks[0].samples[0].text.startswith("answer ")
    assert {verdict.status for verdict in answer.blocks[0].verdicts or ()} <= {"passed", "failed"}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_parcel_with_an_own_task_opens_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text(
        "def problems(split): return [{'id': 'a', 'prompt': '1+1', 'answer': '2'}]\n"
        "def prompt(problem, style): return problem.prompt\n"
        "def judge(problem, reply): return reply.strip() == problem.answer\n"
    )
    task = get("sums", "sums.py")
    parcel = pickle.dumps(task)
    monkeypatch.chdir("/")
    assert pickle.loads(parcel).data_sha256() == task.data_sha256()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_nothing_is_counted_twice_or_missing(
    tmp_path: Path, whole: list[dict[str, str]], seed: int
) -> None:
    chance = random.Random(seed)
    faults = {n: chance.choices(["lost", "failed", ""], k=2) for n in chance.sample(range(30), 8)}
    jobs = jobs_of(tmp_path)
    report = spread(jobs, LocalFleet(jobs, chance.randrange(1, 5), Faults(faults)), batch=8)
    assert report.faults == []
    assert scores(jobs) == whole


def test_the_plan_takes_a_free_checkpoint_before_one_that_others_hold(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30, 60, 90])
    names = [job.target.text for job in jobs]
    plan = Plan(jobs, samplers=2, batch=2)
    assert plan.choose(None, set()) == 0
    opened = plan.begin(0, jobs[0].read(), None)
    assert plan.choose(names[0], set()) == 0
    assert plan.choose(None, {names[0]}) == 1
    assert plan.choose(None, set(names)) == 1  # nothing is free: begin another one
    assert plan.choose(names[2], {names[0]}) == 2
    unit = plan.next_unit(opened)
    assert unit.blocks == 8
    assert opened.remaining == 2


def test_the_finish_of_a_reply_travels(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, [30])
    spread(jobs, LocalFleet(jobs, 1))
    samples = [sample for row in jobs[0].read(texts=True).blocks.values() for sample in row]
    assert {sample.finish for sample in samples} == {str(Finish.STOP)}
    assert len(samples) == 80
