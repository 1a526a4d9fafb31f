"""`rlfe eval`: score checkpoints and base models, resumable by the block.

What was asked is resolved into jobs (`rlfe.eval.plan`), jobs are run (`rlfe.eval.runner`), tables
and plot are written after each. stdout holds the table or one JSON document. Not here: formulas.
Try: `rlfe eval --ckpt-glob 'runs/*/global_step_*' --dry-run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlfe.cli import help as pages
from rlfe.cli import values
from rlfe.errors import RequestError

WHAT, SAMPLING, HOW, OUTPUT = "What to score", "Sampling", "How", "Output"
ANY_CLUSTER = ""  # --ray without a value: RAY_ADDRESS's, else one of our own
RUNS_OWN = "@runs"  # --base without a value: the models that the runs started from


def numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """`"1,8,32"` -> (1, 8, 32)."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f'--k "{text}" is no list of numbers', hint="Write --k 1,8.") from None


@click.command(
    "eval",
    cls=pages.Command,
    examples=[
        "rlfe eval --ckpt-glob 'runs/*/global_step_*' --base",
        "rlfe eval --ckpt-glob 'runs/*/global_step_*' --steps 30:500:30,last -n 16",
        "rlfe eval --base HuggingFaceTB/SmolLM2-135M --prompt base --task gsm8k --limit 50",
        "rlfe eval --ckpt-glob 'runs/*/global_step_*' --dry-run",
    ],
)
@pages.option(
    WHAT,
    "--ckpt-glob",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Checkpoints: folders or hf://ORG/REPO/*/global_step_*; quote it; may be repeated.",
)
@pages.option(
    WHAT,
    "--base",
    "bases",
    multiple=True,
    is_flag=False,
    flag_value=RUNS_OWN,
    metavar="[MODEL]",
    help="Untrained model, folder or Hub id; alone: the runs' own.",
)
@pages.option(WHAT, "--steps", metavar="STEPS", help="Which steps: 30:500:30,last or 30,60.")
@pages.option(
    WHAT,
    "--task",
    "tasks",
    multiple=True,
    metavar="TASK",
    help="Task to score; may be repeated; default: the runs' [eval.*], else mbpp_plus and gsm8k.",
)
@pages.option(WHAT, "--limit", type=int, metavar="N", help="First N problems only.")
@pages.recipe_options
@pages.option(
    WHAT, "--prompt", type=click.Choice(["base", "chat"]), help="Prompt style; default: the run's."
)
@pages.option(
    SAMPLING, "-n", "n", type=int, metavar="N", help="Samples per problem; default 160, gsm8k 8."
)
@pages.option(SAMPLING, "--temperature", type=float, help="Default 0.6.")
@pages.option(SAMPLING, "--top-p", type=float, help="Default 0.95.")
@pages.option(SAMPLING, "--max-tokens", type=int, help="Completion tokens at most; default 3072.")
@pages.option(SAMPLING, "--seed", type=click.IntRange(min=0), help="Evaluation seed; default 0.")
@pages.option(
    SAMPLING,
    "--k",
    "ks",
    callback=numbers,
    metavar="K,K",
    help="pass@k to show; default 1, 5, 10, 50, 100 and n.",
)
@pages.option(
    HOW,
    "--engine",
    type=click.Choice(values.EVALUATING),
    help="What samples; default: the run's.",
)
@pages.option(
    HOW,
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Judge workers; default: the cores.",
)
@pages.option(
    HOW,
    "--require-isolation",
    is_flag=True,
    help="Refuse to judge where programs can reach files or the network.",
)
@pages.option(
    HOW,
    "--resume/--fresh",
    default=True,
    help="Go on with samples and verdicts that are there, or sample and judge anew.",
)
@pages.option(HOW, "--keep", is_flag=True, help="Keep weights that were downloaded from the Hub.")
@pages.option(
    HOW, "--engine-per-checkpoint", is_flag=True, help="Start a new engine for each checkpoint."
)
@pages.option(
    HOW,
    "--verify-reload",
    is_flag=True,
    help="Compare greedy tokens after a reload in place with a fresh engine's.",
)
@pages.option(
    HOW, "--gpus", type=click.IntRange(min=1), metavar="N", help="One sampler on each of N GPUs."
)
@pages.option(
    HOW,
    "--ray",
    is_flag=False,
    flag_value=ANY_CLUSTER,
    metavar="[ADDRESS]",
    help="Samplers on a Ray cluster: HOST:PORT or auto; alone: RAY_ADDRESS, else this machine.",
)
@pages.option(
    HOW,
    "--slurm",
    type=click.IntRange(min=1),
    metavar="K",
    help="Print an array script of K parts with --gpus GPUs each (default 1), and of the tables.",
)
@pages.option(
    HOW,
    "--shard",
    metavar="I/K",
    help="This process does part I of K of the problems; without it afterwards for the tables.",
)
@pages.option(
    HOW,
    "--kl",
    is_flag=True,
    help="Also the KL of runs to their base, on 8 samples of the base per prompt.",
)
@pages.runs_dir_option
@pages.option(HOW, "--dry-run", is_flag=True, help="Say what is to do; load no model.")
@pages.option(
    OUTPUT,
    "--csv",
    "table",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Score table; default <runs-dir>/_tables/scores.csv, Parquet beside it.",
)
@pages.option(
    OUTPUT,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="PNG of pass@k over steps; default beside the table.",
)
@pages.option(
    OUTPUT,
    "--require",
    "conditions",
    multiple=True,
    metavar="COND",
    help="Exit 3 unless it holds for every checkpoint: 'mbpp_plus/pass@1>=0.35'.",
)
@pages.json_option
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Measure pass@k of checkpoints and of base models.

    Samples are stored block by block, so a killed evaluation continues where it stopped, and a
    larger -n adds samples. Exit 3: a checkpoint was incomplete, or something could not be scored.
    """
    from rlfe.cli import evaluation
    from rlfe.cli.evaluation_output import Options

    evaluation.evaluate(Options(**options), pages.environment(ctx))
