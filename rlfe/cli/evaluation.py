"""What `rlfe eval` does, from options to tables; `eval.py` holds the options alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfe import config, remote
from rlfe.checkpoints import Listing, find
from rlfe.cli import evaluation_kl, evaluation_output, evaluation_slurm, output
from rlfe.cli.eval import RUNS_OWN
from rlfe.cli.evaluation_checks import before_work, check_base
from rlfe.cli.evaluation_output import Options, Results
from rlfe.cli.interrupts import second_stops_at_once
from rlfe.cli.judges import make_judge
from rlfe.cli.pull import cache_root
from rlfe.engines.fallback import evaluated
from rlfe.errors import PartialError, RequestError
from rlfe.eval import conditions as conditions_of
from rlfe.eval import merge, plan, tables
from rlfe.eval.jobs import Job, Target
from rlfe.eval.judging import JudgeOnDemand, Report
from rlfe.eval.kl import Pair, forget
from rlfe.eval.places import HubPlaces, Places, remote_target
from rlfe.eval.plots import plotted_ks, write_plot
from rlfe.eval.runner import Watch, run_jobs
from rlfe.eval.samplers import Samplers, make_engine, same_engine
from rlfe.eval.store import Store
from rlfe.eval.tally import Tally, measures, tally
from rlfe.hub_calls import Patience
from rlfe.schema import Recipe
from rlfe.weights import weights_hash

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge
    from rlfe.tasks.base import Task


Run = tuple[Results, Report, Mapping[str, Any]]  # scores, counts, isolation of the judge


def evaluate(options: Options, environment: Mapping[str, str]) -> None:
    """The whole command."""
    if sys.platform == "win32":
        raise RequestError("rlfe eval does not run on Windows", hint="Use WSL2.")
    wanted = [conditions_of.parse(text) for text in options.conditions]
    places = HubPlaces(weights_hash, keep=options.keep, patience=Patience(say=output.note))
    with ExitStack() as stack:
        cluster = None
        if options.slurm is not None:
            evaluation_slurm.check(options)
        if options.ray is not None:
            from rlfe.cli.evaluation_ray import connected, run_on_ray

            cluster = connected(stack, options, environment)
        on_gpu = None if cluster is None else cluster.gpus > 0
        listing, jobs = _jobs(options, environment, places, on_gpu)
        pairs = evaluation_kl.pairs_of(options, jobs) if options.kl else []
        if options.slurm is not None:
            evaluation_slurm.show(options, jobs)
            return
        if options.dry_run:
            evaluation_kl.dry_run(pairs)
            evaluation_output.dry_run(options, jobs)
            return
        before_work(options, jobs, wanted)
        _drop(options, jobs, pairs)
        stack.enter_context(second_stops_at_once("what is being judged is finished and kept"))
        if cluster is not None:
            results, report, tier = run_on_ray(cluster, options, jobs, places, environment)
        else:
            if options.gpus is not None:
                _on_gpus(options.gpus, options.runs_dir, environment)
            results, report, tier = _run(options, jobs, places, environment)
        results.kl += evaluation_kl.measure(options, pairs, places)
    evaluation_output.show(options, results, report, tier)
    evaluation_output.settle(options, listing, results, report, wanted)


def _drop(options: Options, jobs: Sequence[Job], pairs: Sequence[Pair]) -> None:
    """With --fresh: nothing that is there counts."""
    if options.resume:
        return
    forget(pairs)
    for job in jobs:
        for path in (job.store_path, *(() if job.shard else job.beside)):
            path.unlink(missing_ok=True)


def _on_gpus(count: int, runs_dir: Path, environment: Mapping[str, str]) -> None:
    """One process a GPU, each with its part of the problems; the tables are made afterwards here.

    Raises:
        RequestError: There are fewer GPUs.
        PartialError: A part failed; what it finished is kept.
    """
    from rlfe.cli.workers import Task as Command
    from rlfe.cli.workers import gpu_list, run_all

    gpus = gpu_list(environment)
    if len(gpus) < count:
        raise RequestError(
            f"--gpus {count}: this machine has {len(gpus)}",
            hint="Leave --gpus out, or ask for less.",
        )
    words = evaluation_output.typed_words({"gpus", "resume", "as_json", "kl"})
    parts = [
        Command(f"shard{i}of{count}", [*words, "--shard", f"{i}/{count}"])
        for i in range(1, count + 1)
    ]
    folder = runs_dir / "_tables" / "shards"
    ended = run_all(parts, jobs=count, gpus=gpus[:count], folder=folder, environment=environment)
    failed = [f"{name} (exit {end.code}, log {end.log})" for name, end in ended.items() if end.code]
    if failed:
        raise PartialError(
            f"failed: {', '.join(failed)}", hint="Finished samples are kept; run it again."
        )


def _jobs(
    options: Options,
    environment: Mapping[str, str],
    places: HubPlaces,
    on_gpu: bool | None = None,
) -> tuple[Listing, list[Job]]:
    if not options.globs and not options.bases:
        raise RequestError(
            "nothing to score: give --ckpt-glob or --base",
            hint="For instance: rlfe eval --ckpt-glob 'runs/*/global_step_*' --base",
        )
    flags = {"engine.sampler": options.engine}
    fallback = evaluated(config.load(options.recipe, options.sets, environment, flags).recipe)
    listing, targets = _targets(options, places, cache_root(environment))
    subjects = []
    for target in plan.chosen(targets, options.steps):
        own = target.path.parent / "config.toml"
        recipe = fallback
        if own.is_file():
            recipe = evaluated(config.load([str(own)], options.sets, environment, flags).recipe)
        subjects.append(
            plan.Subject(target=target, recipe=recipe, fallback=fallback, has_run=own.is_file())
        )
    subjects += _bases(options, subjects, fallback)
    if not subjects:
        raise PartialError(
            f"no complete checkpoint among the {len(listing.skipped)} folders that match",
            hint="The reasons stand above.",
        )
    kinds: dict[tuple[str, ...], Task] = {}
    asked = replace(options.asked(), on_gpu=on_gpu)
    return listing, plan.plan_jobs(subjects, asked, lambda n, s: _task(kinds, n, s))


def _targets(options: Options, places: HubPlaces, cache: Path) -> tuple[Listing, list[Target]]:
    """Checkpoints of all globs, local ones first, and what was left out with its reason."""
    local = [glob for glob in options.globs if not remote.is_remote(glob)]
    listing = find(local) if local else Listing()
    for point in listing.found:
        for warning in point.warnings:
            output.warn(f"{point.path}: {warning}")
    targets = [plan.checkpoint_target(point) for point in listing.found]
    skipped = dict(listing.skipped)
    for glob in options.globs:
        if remote.is_remote(glob):
            found, passed = places.find(glob, cache)
            targets += [remote_target(one, options.runs_dir) for one in found]
            skipped |= passed
    listing = replace(listing, skipped=skipped)
    _say_skipped(listing)
    return listing, list({target.path: target for target in targets}.values())


def _task(made: dict[tuple[str, ...], Task], name: str, subject: plan.Subject) -> Task:
    """One task object for all checkpoints that ask it alike: its data is read once.

    The run's config says what an own task or deepcoder is, where it trains on it; else `--recipe`.
    """
    from rlfe.tasks import get

    named = [r for r in (subject.recipe, subject.fallback) if r.task.name == name]
    recipe = named[0] if named else subject.fallback
    module = recipe.task.module if named else None
    # Only deepcoder has no problems of its own: another benchmark is the packaged one, whatever a
    # run trained on, so that its score means the same for all runs and their base.
    is_deepcoder = name == "deepcoder" and module is None
    data = recipe.data if is_deepcoder else None
    thinking = recipe.prompt.thinking if is_deepcoder else None
    key = (name, str(module), data.model_dump_json() if data else "", str(thinking))
    if key not in made:
        # Statuses of gsm8k follow the lenient rule; its verdicts keep both.
        mode = "flexible" if name == "gsm8k" else None
        made[key] = get(name, module, mode=mode, data=data, thinking=thinking)
        if named and recipe.data.source and not is_deepcoder:
            output.warn(
                f"{name} is scored on its packaged problems, not on data.source "
                f"{recipe.data.source} that {subject.target.cell} trained on"
            )
    return made[key]


def _bases(options: Options, runs: Sequence[plan.Subject], fallback: Recipe) -> list[plan.Subject]:
    """The base models, each once, as subjects at step 0."""
    from rlfe.engines.source import model_folder

    models: list[str] = []
    for name in options.bases:
        own = [run.recipe.model.path for run in runs if run.has_run]
        if name == RUNS_OWN and not own:
            raise RequestError(
                "--base without a model takes the runs' own, and no run is given",
                hint="Name it: --base FOLDER or a Hub id.",
            )
        models += own if name == RUNS_OWN else [name]
    found = {}
    for model in dict.fromkeys(models):
        cell = plan.base_cell(model, [run for run in runs if run.has_run])
        if cell not in found:
            folder = model_folder(model, fallback.model.revision)
            check_base(folder)
            target = plan.base_target(folder, cell, options.runs_dir)
            found[cell] = plan.Subject(
                target=target, recipe=fallback, fallback=fallback, has_run=False
            )
    return list(found.values())


def _say_skipped(listing: Listing) -> None:
    for path, reason in listing.left_out.items():
        details = ", ".join(listing.details.get(path, ()))
        output.warn(f"{path} is left out: {reason}" + (f" ({details})" if details else ""))


def _run(
    options: Options, jobs: Sequence[Job], places: Places, environment: Mapping[str, str]
) -> Run:
    """Run the jobs with progress; tables and plot are written after each."""
    results, start = Results(), time.monotonic()
    same = _never_same if options.engine_per_checkpoint else same_engine
    samplers = Samplers(make_engine, same, verify=options.verify_reload)
    say_plan(jobs)
    with ExitStack() as stack:
        stack.callback(samplers.close)
        judges = stack.enter_context(JudgeOnDemand(lambda: _judge(options, environment)))
        watch = ScoreWatch(options, results, len(jobs))
        stack.callback(watch.end)
        report = run_jobs(jobs, samplers, judges, places, watch)
        tier = judges.judge.tier if judges.judge is not None else {}
    say_report(report, time.monotonic() - start)
    return results, report, tier


def say_report(report: Report, seconds: float) -> None:
    """How much was done, how fast, and what was out of the ordinary."""
    output.note(
        f"{report.sampled} samples drawn, {report.judged} judged, models loaded: {report.loads}, "
        f"engines started: {report.engines}, {seconds:.1f} s"
    )
    if report.tokens and report.sample_seconds:
        share = report.wait_seconds / report.sample_seconds
        output.note(
            f"{report.tokens / report.sample_seconds:.0f} tokens/s while sampling; judging held it "
            f"up for {report.wait_seconds:.1f} s ({share:.0%})"
        )
    if report.shortened:
        output.warn(f"{report.shortened} prompts left less room than max_tokens")
    if report.no_room:
        output.warn(f"{report.no_room} prompts left no room for an answer and count as wrong")


def _never_same(first: Job, second: Job) -> bool:
    return first.target == second.target


def _judge(options: Options, environment: Mapping[str, str]) -> Judge:
    return make_judge(
        environment,
        workers=options.workers,
        require_isolation=options.require_isolation,
        fresh=not options.resume,
    )


class ScoreWatch(Watch):
    """Progress of one job after the other; scores each as it ends."""

    def __init__(self, options: Options, results: Results, total: int) -> None:
        self._options, self._results, self._total = options, results, total
        self._draws, self._number = tables.Draws(), 0
        self._bar = ExitStack()
        self._advance: output.Progress | None = None

    def started(self, job: Job, samples: int) -> None:
        self._number += 1
        label = f"[{self._number}/{self._total}] {job.target.text} {job.task.name}"
        if samples:
            self._advance = self._bar.enter_context(output.progress(f"{label} samples", samples))
        else:
            output.note(f"{label}: all samples are there")

    def sampled(self, job: Job, samples: int) -> None:
        if self._advance is not None:
            self._advance.advance(samples)

    def drawn(self, job: Job) -> None:
        self.end()

    def finished(self, job: Job, store: Store) -> None:
        self.score(job, store)

    def score(self, job: Job, store: Store) -> None:
        """Count what is there, and write the tables."""
        item = tables.Scored(job=job, tally=counts_of(job, store))
        for warning in item.tally.warnings:
            output.warn(f"{job.target.text} {job.task.name}: {warning}")
        self._results.scored.append(item)
        if job.shard is not None:  # a part of the problems has no score
            return
        rows = tables.score_rows(item, self._draws)
        self._results.rows += rows
        merged = tables.write_tables(self._options.table_base, [item], rows)
        tables.write_tables(job.target.evals / "scores", [item], rows)
        shown = _current(merged, self._results.rows)
        write_plot(self._options.plot_path, shown, plotted_ks(shown, self._options.ks or ()))

    def end(self) -> None:
        self._bar.close()
        self._bar, self._advance = ExitStack(), None


def counts_of(job: Job, store: Store) -> Tally:
    ids = [problem.id for problem in job.problems]
    columns = measures(job.task.name, job.settings.mode)
    return tally(store, ids, job.settings.n, columns, job.settings.temperature)


def _current(merged: Sequence[merge.Row], rows: Sequence[merge.Row]) -> list[merge.Row]:
    """Rows of the whole table under the settings of this call: what belongs into one plot."""
    settings = {row["settings"] for row in rows}
    return [row for row in merged if row["settings"] in settings]


def say_plan(jobs: Sequence[Job]) -> None:
    points = len({job.target.text for job in jobs})
    for name in dict.fromkeys(job.task.name for job in jobs):
        job = next(job for job in jobs if job.task.name == name)
        s = job.settings
        output.note(
            f"{name}: {points} checkpoints, {len(job.problems)} problems, n={s.n}, temperature "
            f"{s.temperature:g}, top_p {s.top_p:g}, max_tokens {s.max_tokens}, prompt {s.style}, "
            f"engine {job.facts['engine']['sampler']} {job.facts['engine']['dtype']}"
        )
