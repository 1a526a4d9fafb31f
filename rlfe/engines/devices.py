"""`engine.devices`: which GPUs this process may see, chosen before CUDA starts.

CUDA reads its visible devices from the environment only, once. The names are those of
`nvidia-smi`; what a scheduler has hidden stays hidden. Not here: which of them computes
(`engine.device`), how many share a sampler (`engine.tensor_parallel`).
Try: `choose(Engine(devices="0"))`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping

from rlfe.errors import RequestError
from rlfe.recipe_checks import device_names
from rlfe.schema import Engine

VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose(
    engine: Engine,
    environment: MutableMapping[str, str] | None = None,
    count: Callable[[], int] | None = None,
) -> None:
    """Show this process the GPUs of `engine.devices` only; nothing is done without CUDA.

    `environment`, `count`: the process's and torch's where not given.

    Raises:
        RequestError: A named GPU is hidden or not there, or CUDA has started with others.
    """
    wanted = device_names(engine)
    if not wanted or engine.sampler == "fake" or engine.device in ("cpu", "mps"):
        return
    environment = os.environ if environment is None else environment
    before = environment.get(VISIBLE)
    hidden = [name for name in wanted if before is not None and name not in before.split(",")]
    if hidden:
        raise RequestError(
            f'engine.devices = "{engine.devices}": GPU {hidden[0]} is not among the visible ones '
            f'({VISIBLE}="{before}")',
            hint=f"Name visible ones, or take all of them with --set engine.devices={before}.",
        )
    if before != ",".join(wanted):
        _refuse_late(engine)
        environment[VISIBLE] = ",".join(wanted)
    there = (count or _count)()
    if 0 < there < len(wanted):
        raise RequestError(
            f'engine.devices = "{engine.devices}" names {len(wanted)} GPUs, of which {there} '
            f"{'is' if there == 1 else 'are'} there",
            hint="Name only those that nvidia-smi lists, such as --set engine.devices='\"0\"'.",
        )


def need_gpus(count: int, there: int | None = None) -> None:
    """RequestError unless this process sees at least `count` GPUs; `there`: torch's where None."""
    there = _count() if there is None else there
    if there < count:
        raise RequestError(
            f"{count} processes need {count} GPUs on this machine, {there} "
            f"{'is' if there == 1 else 'are'} there",
            hint="Start fewer; --set engine.device=cpu tries several processes without a GPU.",
        )


def _refuse_late(engine: Engine) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RequestError(
            f'engine.devices = "{engine.devices}" comes too late: CUDA has started in this process',
            hint="Use one process for each choice of GPUs.",
        )


def _count() -> int:
    import torch

    return torch.cuda.device_count()
