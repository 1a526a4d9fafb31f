"""The runner: what is missing is sampled, what is known is not done again."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from rlfe.errors import RequestError, RlfeError
from rlfe.eval.jobs import Job, Target, make_job
from rlfe.eval.judging import JudgeOnDemand, Report
from rlfe.eval.places import Places
from rlfe.eval.runner import Watch, run_jobs
from rlfe.eval.samplers import Samplers
from rlfe.eval.settings import Settings
from rlfe.eval.store import Store
from rlfe.eval.tables import Draws, Scored, score_rows, write_tables
from rlfe.eval.tally import measures, tally
from rlfe.tasks.base import Reply
from rlfe.types import Completion, Finish, Request, Verdict
from tests.eval_doubles import ENGINE, RECIPE, ParityTask, SeedSampler

NO_JUDGE = JudgeOnDemand(lambda: nullcontext())  # type: ignore[arg-type,return-value]
BASE = Settings(
    task="toy_plus",
    style="base",
    n=16,
    temperature=0.6,
    top_p=0.95,
    max_tokens=32,
    max_len=64,
    seed=0,
)


def with_(settings: Settings, **changes: object) -> Settings:
    return replace(settings, **changes)  # type: ignore[arg-type]


def target(root: Path, step: int = 30) -> Target:
    folder = root / "x_mbpp_nobuf_lr1e3" / f"global_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    return Target(path=folder, cell="x_mbpp_nobuf_lr1e3", step=step, evals=folder.parent / "evals")


def run(jobs: list[Job], weights: str = "w") -> tuple[Report, list[SeedSampler]]:
    made: list[SeedSampler] = []

    def make(job: Job) -> SeedSampler:
        made.append(SeedSampler(job.target.path))
        return made[-1]

    samplers = Samplers(make, lambda a, b: True)
    report = run_jobs(jobs, samplers, NO_JUDGE, Places(lambda path: f"{weights}{path.name}"))
    return report, made


def rows(job: Job) -> list[dict[str, str]]:
    store = Store.read(job.store_path, job.rule)
    ids = [problem.id for problem in job.problems]
    counts = tally(store, ids, job.settings.n, measures(job.task.name, None), 0.6)
    return score_rows(Scored(job=job, tally=counts), Draws())


def test_a_finished_evaluation_loads_no_model(tmp_path: Path) -> None:
    job = make_job(target(tmp_path), ParityTask(), BASE, RECIPE, ENGINE)
    first, made = run([job])
    assert (first.sampled, first.judged, first.loads) == (80, 80, 1)
    assert len(made[0].requests) == 10
    again, made = run([job])
    assert (again.sampled, again.judged, again.loads, made) == (0, 0, 0, [])


def test_identical_answers_of_a_problem_are_judged_once(tmp_path: Path) -> None:
    task = ParityTask()
    run([make_job(target(tmp_path), task, BASE, RECIPE, ENGINE)])
    assert len(task.judged) == len(set(task.judged)) <= 5 * 6
    run([make_job(target(tmp_path), task, with_(BASE, n=160), RECIPE, ENGINE)])
    assert len(task.judged) == len(set(task.judged))


def test_growing_n_adds_samples_and_equals_asking_for_all_at_once(tmp_path: Path) -> None:
    few = make_job(target(tmp_path / "a"), ParityTask(), BASE, RECIPE, ENGINE)
    run([few])
    many = make_job(target(tmp_path / "a"), ParityTask(), with_(BASE, n=44), RECIPE, ENGINE)
    assert many.store_path == few.store_path
    report, made = run([many])
    assert report.sampled == 5 * (44 - 16)
    direct = make_job(target(tmp_path / "b"), ParityTask(), with_(BASE, n=44), RECIPE, ENGINE)
    run([direct])
    assert rows(many) == rows(direct)
    seeds = [r.sampling.seed for r in made[0].requests]
    assert len(set(seeds)) == len(seeds)


def test_every_request_carries_explicit_values_and_its_own_seed(tmp_path: Path) -> None:
    from rlfe.randomness import derive

    _, made = run([make_job(target(tmp_path), ParityTask(), BASE, RECIPE, ENGINE)])
    sampling = made[0].requests[1].sampling
    text = "x_mbpp_nobuf_lr1e3/global_step_30"
    assert sampling.seed == derive(0, "eval", text, "toy_plus", "toy/0", 1)
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k) == (8, 0.6, 0.95, -1)
    assert (sampling.min_p, sampling.max_tokens, sampling.stop) == (0.0, 32, ("\n",))
    assert sampling.stop_token_ids == (0,)


def test_two_evaluation_seeds_share_no_stream(tmp_path: Path) -> None:
    seeds: list[set[int]] = []
    for seed in (0, 1):
        job = make_job(target(tmp_path), ParityTask(), with_(BASE, seed=seed), RECIPE, ENGINE)
        _, made = run([job])
        seeds.append({r.sampling.seed + i for r in made[0].requests for i in range(8)})
    assert not seeds[0] & seeds[1]


def test_other_settings_lie_apart(tmp_path: Path) -> None:
    task, place = ParityTask(), target(tmp_path)
    jobs = [
        make_job(place, task, with_(BASE, **change), RECIPE, ENGINE)
        for change in ({}, {"temperature": 0.7}, {"style": "chat"}, {"max_tokens": 31}, {"seed": 1})
    ]
    assert len({job.store_path for job in jobs}) == 5
    assert len({job.settings_text for job in jobs}) == 5


def test_n_and_limit_share_samples_but_not_rows(tmp_path: Path) -> None:
    task, place = ParityTask(), target(tmp_path)
    whole = make_job(place, task, BASE, RECIPE, ENGINE)
    first = make_job(place, task, with_(BASE, limit=2), RECIPE, ENGINE)
    assert first.store_path == whole.store_path
    assert first.settings_text == whole.settings_text + "-first2"
    run([first])
    report, _ = run([whole])
    assert report.sampled == 3 * 16
    assert [r["problems"] for r in rows(first)[:1]] == ["2"]
    with pytest.raises(RequestError, match="limit 6 is more than the 5 problems"):
        make_job(place, task, with_(BASE, limit=6), RECIPE, ENGINE)


def test_a_fault_of_ours_is_never_wrong_and_is_tried_again(tmp_path: Path) -> None:
    task = ParityTask()
    task.broken = {"toy/3"}
    job = make_job(target(tmp_path), task, BASE, RECIPE, ENGINE)
    report, _ = run([job])
    assert report.unscored == 16
    assert report.faults[0] == "no jail"
    incomplete = rows(job)
    assert {row["score"] for row in incomplete} == {""}
    assert {row["missing"] for row in incomplete} == {"toy/3"}
    task.broken = set()
    report, made = run([job])
    assert (report.unscored, report.sampled, made) == (0, 0, [])
    assert all(row["score"] for row in rows(job))


def test_a_long_prompt_gets_the_room_that_is_left(tmp_path: Path) -> None:
    job = make_job(target(tmp_path), ParityTask(), with_(BASE, max_len=20), RECIPE, ENGINE)
    report, made = run([job])
    assert report.shortened == 5
    assert {r.sampling.max_tokens for r in made[0].requests} == {17}


def test_a_prompt_without_room_counts_as_wrong_and_stays_in_the_mean(tmp_path: Path) -> None:
    job = make_job(target(tmp_path), ParityTask(), with_(BASE, max_len=3), RECIPE, ENGINE)
    report, made = run([job])
    assert (report.no_room, made[0].requests) == (5, [])
    assert rows(job)[0]["score"] == "0.0"
    assert rows(job)[0]["problems"] == "5"


def test_checkpoints_share_one_engine_and_each_is_loaded_once(tmp_path: Path) -> None:
    task = ParityTask()
    jobs = [
        make_job(target(tmp_path, step), task, with_(BASE, task=name), RECIPE, ENGINE)
        for step in (30, 60)
        for name in ("toy_plus",)
    ]
    report, made = run(jobs)
    assert (report.engines, report.loads, len(made)) == (1, 2, 1)
    assert [path.name for path in made[0].loaded] == ["global_step_30", "global_step_60"]


def test_retrained_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    job = make_job(target(tmp_path), ParityTask(), BASE, RECIPE, ENGINE)
    run([job])
    with pytest.raises(RequestError, match="--fresh"):
        run([job], weights="other")


def test_copies_at_a_temperature_above_zero_are_pointed_out(tmp_path: Path) -> None:
    class Parrot(SeedSampler):
        def _one(self, request: object, index: int) -> Completion:
            return Completion(token_ids=(2,), logprobs=(0.0,), text="answer 2", finish=Finish.STOP)

    job = make_job(target(tmp_path), ParityTask(), BASE, RECIPE, ENGINE)
    run_jobs(
        [job],
        Samplers(lambda job: Parrot(job.target.path), lambda a, b: True),
        NO_JUDGE,
        Places(lambda path: "w"),
    )
    store = Store.read(job.store_path, job.rule)
    ids = [problem.id for problem in job.problems]
    counts = tally(store, ids, 16, measures("toy_plus", None), 0.6)
    assert "same text for 5 of 5 problems" in counts.warnings[0]


def test_weights_are_hashed_once_while_their_files_stay_the_same(tmp_path: Path) -> None:
    place, read = target(tmp_path), []

    def weights(path: Path) -> str:
        read.append(path)
        return (path / "model.safetensors").read_text()

    (place.path / "model.safetensors").write_text("one")
    assert [Places(weights).weights(place) for _ in range(3)] == ["one"] * 3
    assert len(read) == 1
    (place.path / "model.safetensors").write_text("two!")
    assert Places(weights).weights(place) == "two!"


class Stale(SeedSampler):
    """An engine that reloads in place and whose tokens then differ from a fresh one's."""

    def verify_reload(self, requests: Sequence[Request]) -> tuple[str, ...]:
        return tuple(request.id for request in requests[:2])


def test_a_reload_that_did_not_take_is_found_when_asked_to_verify(tmp_path: Path) -> None:
    jobs = [make_job(target(tmp_path, s), ParityTask(), BASE, RECIPE, ENGINE) for s in (30, 60)]
    places = Places(lambda path: path.name)
    samplers = Samplers(lambda job: Stale(job.target.path), lambda a, b: True, verify=True)
    with pytest.raises(RlfeError, match="differ from a fresh engine's for 2 of 8 prompts"):
        run_jobs(jobs, samplers, NO_JUDGE, places)
    trusting = Samplers(lambda job: Stale(job.target.path), lambda a, b: True)
    assert run_jobs(jobs, trusting, NO_JUDGE, places).sampled == 80


def test_a_request_that_the_engine_gave_up_is_drawn_by_the_next_call(tmp_path: Path) -> None:
    class Tired(SeedSampler):
        def _one(self, request: Request, index: int) -> Completion:
            done = super()._one(request, index)
            return replace(done, finish=Finish.ABORT) if request.id == "0/1" else done

    job = make_job(target(tmp_path), ParityTask(), BASE, RECIPE, ENGINE)
    places = Places(lambda path: "w")
    samplers = Samplers(lambda job: Tired(job.target.path), lambda a, b: True)
    report = run_jobs([job], samplers, NO_JUDGE, places)
    assert (report.sampled, len(report.faults)) == (72, 1)
    assert rows(job)[0]["missing"] == "toy/0"
    samplers = Samplers(lambda job: SeedSampler(job.target.path), lambda a, b: True)
    assert run_jobs([job], samplers, NO_JUDGE, places).sampled == 8


class Heard(Watch):
    """What happened, in order: `drawn 30`, `finished 30`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.first_finished = threading.Event()

    def drawn(self, job: Job) -> None:
        self.events.append(f"drawn {job.target.step}")

    def finished(self, job: Job, store: Store) -> None:
        assert not store.unjudged()
        self.events.append(f"finished {job.target.step}")
        self.first_finished.set()


class Patient(ParityTask):
    """Judges the first checkpoint only once the second is being drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.second_begins = threading.Event()

    def judge(self, replies: Sequence[Reply], judge: object) -> Iterator[tuple[str, Verdict]]:
        assert self.second_begins.wait(20), "the second checkpoint waits for the first's verdicts"
        yield from super().judge(replies, judge)


class Telling(SeedSampler):
    """When it draws step 60: lets the task judge, and waits until step 30 is finished."""

    task: Patient
    heard: Heard
    fails = False

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        if self.loaded[-1].name != "global_step_60":
            yield from super().generate(requests)
            return
        self.task.second_begins.set()
        if self.fails:
            raise RlfeError("the engine stopped")
        assert self.heard.first_finished.wait(20), "the first checkpoint is not finished"
        yield from super().generate(requests)


def two_checkpoints(root: Path, heard: Heard) -> tuple[list[Job], Samplers]:
    task = Patient()
    jobs = [make_job(target(root, step), task, BASE, RECIPE, ENGINE) for step in (30, 60)]

    def make(job: Job) -> Telling:
        made = Telling(job.target.path)
        made.task, made.heard = task, heard
        return made

    return jobs, Samplers(make, lambda a, b: True)


def test_a_checkpoint_is_judged_and_scored_while_the_next_is_drawn(tmp_path: Path) -> None:
    heard = Heard()
    jobs, samplers = two_checkpoints(tmp_path, heard)
    report = run_jobs(jobs, samplers, NO_JUDGE, Places(lambda path: path.name), heard)
    assert heard.events == ["drawn 30", "finished 30", "drawn 60", "finished 60"]
    assert (report.sampled, report.judged, len(report.load_seconds)) == (160, 160, 2)
    assert report.work_seconds >= report.sample_seconds >= report.wait_seconds


def test_a_slow_program_does_not_hold_generation_up(tmp_path: Path) -> None:
    """Of 10 hand-overs the first ends last: each has 16 blocks."""

    class OneSlow(ParityTask):
        slow, all_drawn = threading.Lock(), threading.Event()

        def judge(self, replies: Sequence[Reply], judge: object) -> Iterator[tuple[str, Verdict]]:
            if self.slow.acquire(blocking=False):
                assert self.all_drawn.wait(20), "generation waits for the slow program"
            yield from super().judge(replies, judge)

    task = OneSlow(40)

    class Last(SeedSampler):
        def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
            yield from super().generate(requests[:-1])
            task.all_drawn.set()
            yield from super().generate(requests[-1:])

    job = make_job(target(tmp_path), task, with_(BASE, n=32), RECIPE, ENGINE)
    samplers = Samplers(lambda job: Last(job.target.path), lambda a, b: True)
    assert run_jobs([job], samplers, NO_JUDGE, Places(lambda path: "w")).judged == 1280


def test_a_checkpoint_is_finished_although_the_next_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Telling, "fails", True)
    heard = Heard()
    jobs, samplers = two_checkpoints(tmp_path, heard)
    with pytest.raises(RlfeError, match="the engine stopped"):
        run_jobs(jobs, samplers, NO_JUDGE, Places(lambda path: path.name), heard)
    assert heard.events == ["drawn 30", "finished 30"]


SCRIPT = """
import sys, time
from pathlib import Path
from tests.test_eval_runner import *
class Slow(SeedSampler):
    def generate(self, requests):
        for item in super().generate(requests):
            time.sleep(0.004)
            yield item
job = make_job(target(Path(sys.argv[1])), ParityTask(12), with_(BASE, n=44), RECIPE, ENGINE)
print("ready", flush=True)
samplers = Samplers(lambda job: Slow(job.target.path), lambda a, b: True)
run_jobs([job], samplers, NO_JUDGE, Places(lambda path: "w" + path.name))
print("done", flush=True)
"""


def test_killed_at_random_moments_gives_the_same_tables_as_an_unbroken_run(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": os.environ["PATH"]}
    chance, kills = random.Random(7), 0
    for _ in range(40):
        child = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "a")],
            stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        if kills < 6:
            time.sleep(chance.uniform(0.0, 0.09))
            child.send_signal(signal.SIGKILL)
        finished = child.stdout.read()
        child.wait()
        child.stdout.close()
        if finished == "done\n":
            break
        kills += 1
    assert kills >= 3
    tables = []
    for name in ("a", "b"):
        job = make_job(target(tmp_path / name), ParityTask(12), with_(BASE, n=44), RECIPE, ENGINE)
        run([job])
        store = Store.read(job.store_path, job.rule)
        ids = [problem.id for problem in job.problems]
        scored = Scored(job=job, tally=tally(store, ids, 44, measures("toy_plus", None), 0.6))
        write_tables(tmp_path / name / "scores", [scored], score_rows(scored, Draws()))
        files = sorted((tmp_path / name).glob("scores*"))
        tables.append({file.name: file.read_bytes() for file in files})
    assert len(tables[0]) == 5
    assert tables[0] == tables[1]
