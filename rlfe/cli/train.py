"""`rlfe train`: resolve a recipe, refuse what cannot work, train, say what came out.

Two hops from here to a formula: `rlfe.training.loop.train`. Not here: anything that is computed.
Try: `rlfe train --recipe tiny --dry-run`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlfe import config, sweeps
from rlfe.budget import overruns, step_seconds, used_gpus
from rlfe.cli import help as pages
from rlfe.cli import output, values
from rlfe.cli.judges import make_judge
from rlfe.cli.launching import launch, launched, stop_file
from rlfe.cli.ranks import join, judge_workers, need_gpus_for, speak_up, speaking
from rlfe.cli.screen import watched
from rlfe.cli.training_summary import summary, summary_lines
from rlfe.engines.fallback import settled
from rlfe.errors import PartialError, RequestError, RlfeError
from rlfe.naming import cell_of, cell_of_run, format_cell
from rlfe.records import read_jsonl
from rlfe.rundir import RunDir
from rlfe.training.lock import refuse_if_held

if TYPE_CHECKING:
    from rlfe.engines.ranks import Ranks
    from rlfe.training.job import Job
    from rlfe.training.loop import Ending

WHAT, WHERE, HOW = "What to run", "Where", "How"
INTERRUPTED = 130


@click.command(
    "train",
    cls=pages.Command,
    examples=[
        "rlfe train --recipe tiny --dry-run",
        "rlfe train --recipe tiny --set model.path=models/smollm2",
        "rlfe train --recipe lr-ladder --set model.path=Qwen/Qwen3-1.7B-Base"
        " --set optim.lr=6e-6 --set replay.strategy=hard_cooldown",
        "rlfe train --recipe tiny --resume",
        "rlfe train --recipe deepcoder-top-p-0.9 --gpus 8 --set engine.tensor_parallel=1",
    ],
)
@pages.recipe_options
@pages.option(WHAT, "--name", metavar="NAME", help="Run folder's name; default: from the settings.")
@pages.runs_dir_option
@pages.option(
    WHERE,
    "--engine",
    type=click.Choice(values.ENGINES),
    help="What samples and learns; default: the recipe's.",
)
@pages.option(
    WHERE,
    "--gpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train in N processes on this machine, a GPU each; default: in this one.",
)
@pages.option(HOW, "--resume", is_flag=True, help="Go on with the run in that folder.")
@pages.option(HOW, "--overwrite", is_flag=True, help="Replace the run in that folder.")
@pages.option(
    HOW,
    "--require-isolation",
    is_flag=True,
    help="Refuse to judge where programs can reach files or the network.",
)
@pages.option(
    HOW, "--fresh-verdicts", is_flag=True, help="Judge again what is known from earlier runs."
)
@pages.option(
    HOW, "--dry-run", is_flag=True, help="Check and say what would happen; write nothing."
)
@pages.option(HOW, "--seed", type=click.IntRange(min=0), metavar="N", help="Sets run.seed.")
@pages.json_option
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Train one cell: GRPO from a recipe, with or without replay.

    The run folder holds config, metrics, rollouts, checkpoints and the state to resume from.
    Ctrl-C ends the running step and saves; a second one stops at once.
    """
    with speaking(pages.environment(ctx)) as ranks:
        count = max(ranks.size, options["gpus"] or 1)
        resolved = _resolved(ctx, options, count)
        run = RunDir(options["runs_dir"] / _run_name(options["name"], resolved))
        if options["dry_run"]:
            _refuse(run, resolved, options)
            _show_plan(resolved, run, options, count)
            return 0
        if count > ranks.size == 1:
            _refuse(run, resolved, options)
            need_gpus_for(resolved.recipe, count)
            return launch(_words_of_a_rank(options), count)
        join(ranks, resolved.recipe, options["gpus"])
        if ranks.size > 1:
            options["gpus"] = count if launched(pages.environment(ctx)) else None
        try:
            with ranks.guarded():
                ranks.once(lambda: _refuse(run, resolved, options))
                ending = _train(ctx, resolved, run, options, ranks)
                ranks.close()
        except RlfeError as problem:
            speak_up(ranks, problem)
            if "--overwrite" not in problem.hint:  # else it is the state itself that is not whole
                _name_last_step(run, options)
            raise
    return _report(run, ending, resolved, options, ranks.size) if ranks.first else 0


def _refuse(run: RunDir, resolved: config.Resolved, options: Mapping[str, Any]) -> None:
    """RequestError if the run's folder is not free for what was asked."""
    if options["resume"] and options["overwrite"]:
        raise RequestError("--resume and --overwrite exclude each other", hint="Give one of them.")
    run.check(resolved.recipe, overwrite=options["overwrite"], resume=options["resume"])
    refuse_if_held(run)


def _run_name(given: str | None, resolved: config.Resolved) -> str:
    """The run folder's name: one path part, which had better say what the run is.

    Raises:
        RequestError: It would lie elsewhere than in the runs folder, or hide there.
    """
    if given is None:
        return format_cell(cell_of(resolved.recipe))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", given):
        raise RequestError(
            f"--name {given!r} is no name of a run folder",
            hint="Letters, digits, - _ and . only, with a letter or a digit first.",
        )
    try:
        cell_of_run(given, resolved.recipe)
    except RequestError:
        output.warn(
            f"{given} does not say model, task, arm and rate: such a run can be evaluated, but "
            "neither reported nor pushed; naming.model and naming.arm change the parts of the name"
        )
    return given


def _resolved(ctx: click.Context, options: Mapping[str, Any], ranks: int) -> config.Resolved:
    """The configuration, checked for what may not stand together.

    Raises:
        RequestError: Nothing to run was named, or the recipe is a whole sweep.
    """
    if not options["recipe"] and not options["sets"]:
        names = ", ".join(config.shipped())
        raise RequestError("no recipe given", hint=f"Give --recipe NAME or FILE; shipped: {names}.")
    sampler = options["engine"]
    flags = {
        "engine.sampler": sampler,
        "engine.learner": "transformers" if sampler == "vllm" else sampler,
        "run.seed": options["seed"],
    }
    given = config.load(options["recipe"], options["sets"], pages.environment(ctx), flags)
    resolved, instead = settled(given)
    if instead is not None:
        output.warn(instead)
    for text in config.check(resolved.recipe, training=True, ranks=ranks):
        output.warn(text)
    varied = sweeps.varied(resolved)
    if varied and options["dry_run"]:
        output.warn(f"one run without what the recipe varies: {', '.join(varied)}")
    elif varied:
        raise RequestError(
            f"the recipe varies {', '.join(varied)}: it is a sweep, not one run",
            hint="Run all cells with rlfe sweep, or fix each of these with --set.",
        )
    return resolved


def _show_plan(
    resolved: config.Resolved, run: RunDir, options: Mapping[str, Any], ranks: int
) -> None:
    from rlfe.cli.training_checks import checked_dry
    from rlfe.cli.training_plan import plan

    unchecked = checked_dry(resolved.recipe)
    if options["require_isolation"]:
        from rlfe.sandbox.pool import Judge

        with Judge(workers=1, require_isolation=True):
            pass  # starting it is the check
    made = plan(resolved, run, real_command(options), unchecked, ranks)
    if options["as_json"]:
        output.document(made.document())
        return
    output.table(("key", "value", "origin"), made.settings)
    for line in made.lines:
        output.result(line)
    for text in made.warnings:
        output.warn(text)
    output.result(made.command)


def real_command(options: Mapping[str, Any]) -> str:
    """The command that was asked for, without --dry-run, to copy."""
    words = ["rlfe", "train"]
    for name in options["recipe"]:
        words += ["--recipe", name]
    for text in options["sets"]:
        words += ["--set", text]
    for flag in ("name", "engine", "seed", "gpus"):
        if options[flag] is not None:
            words += [f"--{flag}", str(options[flag])]
    if options["runs_dir"] != Path("runs"):
        words += ["--runs-dir", str(options["runs_dir"])]
    for flag in ("resume", "overwrite", "require_isolation", "fresh_verdicts"):
        if options[flag]:
            words.append("--" + flag.replace("_", "-"))
    return shlex.join(words)


def _words_of_a_rank(options: Mapping[str, Any]) -> list[str]:
    """The command line of each process that the launcher starts."""
    words = shlex.split(real_command({**options, "gpus": None}))[1:]
    return [*words, *(["--json"] if options["as_json"] else []), *output.flags()]


def _train(
    ctx: click.Context,
    resolved: config.Resolved,
    run: RunDir,
    options: Mapping[str, Any],
    ranks: Ranks,
) -> Ending:
    from rlfe.training.loop import train

    recipe = resolved.recipe
    several = f", {ranks.size} ranks" if ranks.size > 1 else ""
    output.note(f"{run.path}: {recipe.train.steps} steps, engine {recipe.engine.sampler}{several}")
    judge = make_judge(
        pages.environment(ctx),
        workers=judge_workers(ranks),
        require_isolation=options["require_isolation"],
        fresh=options["fresh_verdicts"],
    )
    with judge:
        job = _job(resolved, run, options, judge, ranks)
        label, stop = f"training {run.name}", stop_file(pages.environment(ctx))
        with output.progress(label, recipe.train.steps) as bar, watched(job, bar, stop):
            return train(job)


def _job(
    resolved: config.Resolved, run: RunDir, options: Mapping[str, Any], judge: Any, ranks: Ranks
) -> Job:
    """Everything that can be refused is refused before the model is loaded."""
    from rlfe.cli.training_checks import checked
    from rlfe.engines import computes_in_float32, make_engines
    from rlfe.training.job import Job

    recipe = resolved.recipe
    task, data = checked(recipe)
    sampler, learner = make_engines(recipe, ranks)
    hashes = {task.name: task.data_sha256()}
    again = ranks.once(
        lambda: run.create(
            recipe, resolved.origins, options["overwrite"], options["resume"], data_hashes=hashes
        )
    )
    return Job(
        recipe=recipe,
        run=run,
        task=task,
        data=data,
        sampler=sampler,
        learner=learner,
        judge=judge,
        float32=computes_in_float32(recipe),
        resume=again,
        ranks=ranks,
    )


def _report(
    run: RunDir, ending: Ending, resolved: config.Resolved, options: Mapping[str, Any], ranks: int
) -> int:
    """The result and the next command; returns the exit code.

    Raises:
        PartialError: A rule ended the run.
    """
    kept, lines = run.steps(), read_jsonl(run.metrics)
    recipe = resolved.recipe
    gpus = used_gpus(recipe.engine) * ranks
    beyond = overruns(recipe.study, [step_seconds(lines)], gpus)
    for text in beyond:
        output.warn(text)
    speed = summary(lines)
    for text in summary_lines(speed):
        output.note(text)
    if options["as_json"]:
        output.document(_document(run, ending, kept, lines, beyond) | {"speed": speed})
    else:
        output.table(("run", "status", "steps", "checkpoints"), [_row(run, ending, kept)])
    if ending.status == "nothing_left":
        output.note(f"nothing left to do: {run.path} has all {ending.step} steps")
    if ending.status == "interrupted":
        output.hint(f"Go on with: {real_command({**options, 'resume': True, 'overwrite': False})}")
        return INTERRUPTED
    if ending.status not in ("done", "nothing_left"):
        raise PartialError(
            f"{run.path} ended early: {ending.reason}",
            hint="It does not go on with --resume; start it again with --overwrite.",
        )
    output.hint(f"Next: rlfe eval --ckpt-glob {shlex.quote(f'{run.path}/global_step_*')}")
    return 0


def _name_last_step(run: RunDir, options: Mapping[str, Any]) -> None:
    """After a failure: the step that the run can go on from, if it got that far."""
    facts = run.state / "state.json"
    if facts.is_file():
        try:
            step = json.loads(facts.read_bytes())["step"]
        except ValueError:
            return  # damaged: there is nothing to go on from
        again = real_command({**options, "resume": True, "overwrite": False})
        output.hint(f"The state after step {step} is whole; go on with: {again}")


def _row(run: RunDir, ending: Ending, kept: Sequence[int]) -> list[Any]:
    return [str(run.path), ending.status, ending.step, ", ".join(str(step) for step in kept)]


def _document(
    run: RunDir,
    ending: Ending,
    kept: Sequence[int],
    lines: Sequence[Mapping[str, Any]],
    beyond: Sequence[str],
) -> dict[str, Any]:
    rows = [{"step": step, "path": str(run.checkpoint(step))} for step in kept]
    facts = {
        "path": str(run.path),
        "name": run.name,
        "status": ending.status,
        "reason": ending.reason or None,
        "steps": ending.step,
        "reward_first": lines[0]["reward/mean"] if lines else None,
        "reward_last": lines[-1]["reward/mean"] if lines else None,
        "overruns": list(beyond),
    }
    return {"schema": "rlfe.train/1", "rows": rows, "run": facts}
