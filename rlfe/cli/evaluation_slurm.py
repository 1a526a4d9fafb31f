"""`rlfe eval --slurm K`: the asked evaluation as an array script, for a cluster without Ray.

Not here: the script's text (`rlfe.slurm`). Try:
`rlfe eval --ckpt-glob 'runs/*/global_step_*' --slurm 8 > eval.sh && bash eval.sh`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlfe.cli import evaluation_output, output
from rlfe.cli.evaluation_output import Options
from rlfe.errors import RequestError
from rlfe.eval.jobs import Job
from rlfe.slurm import eval_script

LEFT_OUT = {"slurm", "as_json", "resume", "gpus"}
AT_THE_END = {"kl", "conditions"}  # by one process, when all samples are there


def check(options: Options) -> None:
    """Refuse what has no meaning in a script.

    Raises:
        RequestError: It names the option.
    """
    others = {
        "--shard": options.shard is not None,
        "--ray": options.ray is not None,
        "--dry-run": options.dry_run,
    }
    for name, given in others.items():
        if given:
            raise RequestError(f"--slurm and {name} exclude each other", hint="Give one of them.")
    if not options.resume:
        raise RequestError(
            "--slurm with --fresh: every requeued part would start anew",
            hint="Remove the samples first: they lie in runs/<cell>/evals/<task>.",
        )


def show(options: Options, jobs: Sequence[Job]) -> None:
    """Print the script; each part gets `--gpus` GPUs (default 1)."""
    parts = options.slurm or 1
    smallest = min(len(job.problems) for job in jobs)
    if parts > smallest:
        raise RequestError(
            f"--slurm {parts}: one of the tasks has {smallest} problems",
            hint=f"Give --slurm {smallest} or less.",
        )
    part = evaluation_output.typed_words(LEFT_OUT | AT_THE_END)
    tables = evaluation_output.typed_words(LEFT_OUT)
    output.result(eval_script("rlfe-eval", part, tables, parts, options.gpus or 1))
    output.hint("bash FILE submits the parts, and the tables for when all parts have ended well")
