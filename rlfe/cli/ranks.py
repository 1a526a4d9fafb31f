"""A command as one rank of several: who speaks, and how all of them end.

Of the ranks the first speaks; the others are silent. A failure is reported once, by the rank that
it hit first, whichever that is. Not here: what the ranks do, and who started them
(`launching.py`, or torchrun by hand).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlfe.cli import output
from rlfe.cli.launching import launched
from rlfe.engines import rank_device
from rlfe.engines.devices import choose, need_gpus
from rlfe.engines.ranks import Ranks, TorchRanks, end_now, member
from rlfe.errors import RequestError, RlfeError
from rlfe.schema import Recipe

INTERRUPTED = 130


@contextmanager
def speaking(environment: Mapping[str, str]) -> Iterator[Ranks]:
    """This process's rank, which has not joined the others yet."""
    ranks = member(environment)
    if ranks is None:
        yield Ranks()
        return
    # What the settings call for, the launcher has said already.
    output.configure(mute=not ranks.first or launched(environment))
    try:
        yield ranks
    except BaseException as problem:
        speak_up(ranks, problem)
        # At exit, when the error has been said: what other ranks owe us never comes.
        atexit.register(end_now, _code(problem))
        raise


def speak_up(ranks: Ranks, problem: BaseException) -> None:
    """Let this rank be heard if it is the one to report the failure, else silence it."""
    if not isinstance(ranks, TorchRanks):
        return
    output.configure(mute=not ranks.speaks(str(problem)))


def join(ranks: Ranks, recipe: Recipe, gpus: int | None) -> None:
    """Meet the other ranks, each on its own GPU or all on the CPU.

    Raises:
        RequestError: This machine has fewer GPUs than ranks, or `--gpus` says another number.
        PeerError: A rank does not come.
    """
    if not isinstance(ranks, TorchRanks):
        return
    if gpus not in (None, ranks.local_size):
        raise RequestError(
            f"--gpus {gpus}, but torchrun started {ranks.local_size} processes on this machine",
            hint="Leave --gpus out under torchrun; --nproc-per-node is its number of processes.",
        )
    choose(recipe.engine)
    device = rank_device(recipe)
    if device == "cuda":
        need_gpus(ranks.local_size)

    def expired(problem: RlfeError) -> None:
        speak_up(ranks, problem)
        output.error(problem)
        end_now(problem.exit_code)

    ranks.join(device, minutes=recipe.run.timeout_minutes, expired=expired)
    output.configure(mute=not ranks.first)


def need_gpus_for(recipe: Recipe, count: int) -> None:
    """RequestError if this machine has fewer GPUs than `count` ranks of the recipe need."""
    if recipe.engine.device != "cpu":
        choose(recipe.engine)
        need_gpus(count)


def judge_workers(ranks: Ranks) -> int | None:
    """Programs that this rank judges at a time; None: as many as there are cores."""
    return None if ranks.local_size == 1 else max(1, (os.cpu_count() or 1) // ranks.local_size)


def _code(problem: BaseException) -> int:
    if isinstance(problem, RlfeError):
        return problem.exit_code
    return INTERRUPTED if isinstance(problem, KeyboardInterrupt) else 1
