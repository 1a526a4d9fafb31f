"""`rlfe eval --ray`: the same jobs over the samplers of a Ray cluster, tables written here.

Not here: what a sampler does (`rlfe.eval.worker`), which unit it gets (`rlfe.eval.spread`).
Try: `rlfe eval --ckpt-glob 'runs/*/global_step_*' --ray`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from rlfe.cli import output
from rlfe.cli.evaluation import Run, ScoreWatch, say_plan, say_report
from rlfe.cli.evaluation_output import Options, Results
from rlfe.cli.pull import cache_root
from rlfe.errors import RequestError
from rlfe.eval.fleet import RayFleet
from rlfe.eval.jobs import Job
from rlfe.eval.places import HubPlaces, stamp
from rlfe.eval.samplers import TOKENIZER
from rlfe.eval.settings import BLOCK
from rlfe.eval.spread import Spread, SpreadWatch
from rlfe.eval.store import Store
from rlfe.eval.worker import Parcel
from rlfe.ray_cluster import LOCAL, Cluster, Needs, chosen_address, cluster
from rlfe.schema import Engine

BATCHES = {"vllm": 512, "transformers": 64, "fake": 64}  # sequences, where the recipe names none


def connected(stack: ExitStack, options: Options, environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that `--ray` asks for, until the stack ends; None without it.

    Raises:
        RequestError: `--shard` too: Ray's samplers share the problems by themselves; or `--kl`.
        NetworkError: No cluster answers.
    """
    if options.ray is None:
        return None
    if options.shard is not None:
        raise RequestError("--ray and --shard exclude each other", hint="Give one of the two.")
    if options.kl:
        raise RequestError(
            "--kl is computed by one process",
            hint="Score with --ray, then run the same command with --kl and without --ray.",
        )
    address = chosen_address(options.ray, environment)
    if options.dry_run and address == LOCAL:
        return None
    found: Cluster = stack.enter_context(cluster(address))
    return found


def run_on_ray(
    found: Cluster,
    options: Options,
    jobs: Sequence[Job],
    places: HubPlaces,
    environment: Mapping[str, str],
) -> Run:
    """Run the jobs on the cluster's samplers; tables and plot are written after each."""
    needs = _needs(jobs, found)
    batch = max(_batch(job.recipe.engine) for job in jobs)
    blocks = sum(len(job.problems) * -(-job.settings.n // BLOCK) for job in jobs)
    samplers = min(found.room(needs), options.gpus or blocks, max(1, blocks * BLOCK // batch))
    say_plan(jobs)
    each = f"{needs.gpus} GPUs" if needs.gpus else f"{needs.cpus} CPUs"
    output.note(f"Ray: {len(found.nodes())} nodes, {samplers} samplers with {each} each")
    results, start = Results(), time.monotonic()
    parcel = _parcel(options, jobs, places, environment)
    with ExitStack() as stack:
        watch = _RayWatch(options, results, len(jobs))
        stack.callback(watch.end)
        fleet = stack.enter_context(
            RayFleet(parcel, samplers=samplers, needs=needs, nodes=found.nodes())
        )
        spread = Spread(jobs, fleet, places, watch, samplers=samplers, batch=batch)
        report = spread.run()
    _in_order(results, jobs)
    say_report(report, time.monotonic() - start)
    if report.lost_units:
        output.warn(f"{report.lost_units} units were lost with their samplers and given out again")
    return results, report, spread.tier


def _needs(jobs: Sequence[Job], found: Cluster) -> Needs:
    """What a sampler takes: the most that any job's engine does."""
    engines = [job.recipe.engine for job in jobs]
    gpus = max(_gpus(engine) for engine in engines) if found.gpus else 0
    return Needs(cpus=1 if gpus else max(engine.threads or 1 for engine in engines), gpus=gpus)


def _gpus(engine: Engine) -> int:
    if engine.sampler == "fake" or engine.device == "cpu":
        return 0
    return engine.tensor_parallel if engine.sampler == "vllm" else 1


def _batch(engine: Engine) -> int:
    return engine.sample_batch or BATCHES[engine.sampler]


def _parcel(
    options: Options, jobs: Sequence[Job], places: HubPlaces, environment: Mapping[str, str]
) -> Parcel:
    references, stamps = {}, {}
    for target in {job.target.text: job.target for job in jobs}.values():
        reference = places.reference(target)
        if reference is not None:
            references[target.text] = reference
            places.fetch(target, TOKENIZER)  # part of what samples belong to
        else:
            stamps[target.text] = stamp(target.path)
    return Parcel(
        jobs=tuple(job.absolute() for job in jobs),
        references=references,
        stamps=stamps,
        cache=cache_root(dict(environment)).absolute(),
        workers=options.workers,
        keep=options.keep,
        require_isolation=options.require_isolation,
        engine_per_checkpoint=options.engine_per_checkpoint,
        verify_reload=options.verify_reload,
    )


def _in_order(results: Results, jobs: Sequence[Job]) -> None:
    """Scores in the order of the jobs, in whatever order they ended."""
    place = {(job.target.text, job.settings_text): n for n, job in enumerate(jobs)}
    results.scored.sort(key=lambda item: place[item.job.target.text, item.job.settings_text])
    cells = {(job.target.cell, str(job.target.step), job.settings_text): n
             for n, job in enumerate(jobs)}  # fmt: skip
    results.rows.sort(key=lambda row: cells[row["cell"], row["step"], row["settings"]])


class _RayWatch(ScoreWatch, SpreadWatch):
    """One bar over all jobs; scores each as it ends."""

    def __init__(self, options: Options, results: Results, total: int) -> None:
        super().__init__(options, results, total)
        self._samples = self._samplers = 0
        self._jobs = self._bar.enter_context(output.progress("jobs scored", total))

    def started(self, job: Job, samples: int) -> None:
        words = f"{samples} samples to draw" if samples else "all samples are there"
        output.note(f"{job.target.text} {job.task.name}: {words}")

    def sampled(self, job: Job, samples: int) -> None:
        self._samples += samples
        self._tell(0)

    def joined(self, name: str) -> None:
        self._samplers += 1
        output.detail(f"sampler {name} is ready")

    def lost(self, name: str, why: str, units: int) -> None:
        self._samplers -= bool(name)
        output.warn(f"sampler {name or 'that was starting'} is lost ({why}): {units} units again")

    def finished(self, job: Job, store: Store) -> None:
        self.score(job, store)
        self._tell(1)

    def _tell(self, jobs: int) -> None:
        self._jobs.advance(jobs, f"{self._samples} samples, {self._samplers} samplers")
