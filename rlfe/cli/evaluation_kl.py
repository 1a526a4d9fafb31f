"""`rlfe eval --kl`: how far the scored checkpoints are from their base models (`rlfe.eval.kl`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from rlfe.cli import output
from rlfe.cli.evaluation_checks import check_base
from rlfe.cli.evaluation_output import Options
from rlfe.errors import RequestError
from rlfe.eval import kl, kl_table, merge, plan, tables
from rlfe.eval.jobs import Job, Target
from rlfe.eval.places import Places
from rlfe.eval.report.series import TRAINED
from rlfe.naming import cell_of


def pairs_of(options: Options, jobs: Sequence[Job]) -> list[kl.Pair]:
    """Every scored checkpoint of a run on the task that the run trains, with its base.

    Raises:
        RequestError: There is none, or a part of the problems was asked for.
    """
    if options.shard is not None:
        raise RequestError(
            "--kl measures whole tasks, not a --shard",
            hint="Give it to the call without --shard that makes the tables.",
        )
    made: dict[tuple[str, str | None], Target] = {}
    pairs = []
    for job in jobs:
        trained = job.recipe.task.name
        if job.target.step == 0 or job.task.name != TRAINED.get(trained, trained):
            continue
        base = _base(options, job, made)
        temperature = 1.0 if options.temperature is None else options.temperature
        top_p = 1.0 if options.top_p is None else options.top_p
        pairs.append(kl.pair_of(job, base, temperature, top_p))
    if not pairs:
        raise RequestError(
            "--kl has nothing to measure: no checkpoint of a run is scored on the task it trains",
            hint="Give --ckpt-glob, and with --task the evaluation of the trained task too.",
        )
    return pairs


def _base(options: Options, job: Job, made: dict[tuple[str, str | None], Target]) -> Target:
    from rlfe.engines.source import model_folder

    model = job.recipe.model
    if (model.path, model.revision) not in made:
        folder = model_folder(model.path, model.revision)
        check_base(folder)
        made[model.path, model.revision] = plan.base_target(
            folder, cell_of(job.recipe).model, options.runs_dir
        )
    return made[model.path, model.revision]


def measure(options: Options, pairs: Sequence[kl.Pair], places: Places) -> list[merge.Row]:
    """Measure all pairs; the tables are written after each."""
    if not pairs:
        return []
    from rlfe.engines import make_sampler
    from rlfe.engines.scorer import make_scorer

    engines = kl.Engines(
        make_sampler=lambda job: make_sampler(
            job.recipe.engine,
            job.target.path,
            dtype=job.facts["engine"]["dtype"],
            thinking=job.settings.thinking,
            max_len=job.settings.max_len,
        ),
        make_scorer=lambda job: make_scorer(
            job.recipe.engine, job.target.path, dtype=job.facts["engine"]["dtype"]
        ),
    )
    rows: list[merge.Row] = []
    with ExitStack() as stack:
        stack.callback(engines.close)
        for distance in kl.measure(pairs, engines, places, _Watch(stack)):
            row = kl_table.row_of(distance)
            kl_table.write(distance.pair.point.target.evals / "kl.csv", [row])
            kl_table.write(tables.beside(options.table_base, "_kl.csv"), [row])
            rows.append(row)
    _say(pairs, rows)
    return rows


def _say(pairs: Sequence[kl.Pair], rows: Sequence[merge.Row]) -> None:
    if any(row["measure"] == kl.LOG_RATIO for row in rows):
        settings = pairs[0].base.settings
        output.warn(
            f"samples at temperature {settings.temperature:g}, top_p {settings.top_p:g} are not "
            f"the base's own distribution: the number is a {kl.LOG_RATIO}, no KL"
        )


def dry_run(pairs: Sequence[kl.Pair]) -> None:
    """Say what a measurement would do."""
    if pairs:
        prompts = sum(len(pair.point.problems) for pair in pairs)
        output.note(
            f"--kl: {len(pairs)} checkpoints scored on {kl.SAMPLES} samples of the base for each "
            f"of their prompts ({prompts} in all); what is there is not repeated"
        )


class _Watch(kl.Watch):
    """A bar for each model's texts or scores."""

    def __init__(self, outer: ExitStack) -> None:
        self._outer, self._bar = outer, ExitStack()
        self._advance: output.Progress | None = None
        outer.callback(self.ended)

    def started(self, what: str, prompts: int) -> None:
        self._advance = self._bar.enter_context(output.progress(f"{what}, prompts", prompts))

    def advanced(self) -> None:
        if self._advance is not None:
            self._advance.advance(1)

    def ended(self) -> None:
        self._bar.close()
        self._bar, self._advance = ExitStack(), None
