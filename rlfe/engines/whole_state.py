"""The resumable state of a learner of one process: three files of plain tensors and numbers.

What: float32 weights and AdamW's moments (safetensors), step counts (JSON); several ranks read it
too, each its part. Not here: the state that several ranks write (`shards.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlfe.engines.base import Later
from rlfe.engines.transfer import Copies
from rlfe.engines.weights import host_copies
from rlfe.errors import RlfeError

WEIGHTS, MOMENTS, OPTIMIZER = "weights.safetensors", "moments.safetensors", "optimizer.json"
Trained = Mapping[str, torch.Tensor]
Part = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def state_later(trained: Trained, optimizer: Any, copies: Copies) -> Later:
    """What writes the state as it is now; `copies` makes the copies."""
    from safetensors.torch import save_file

    held, steps = {}, {}
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter)
        if not state:
            continue  # no optimiser step yet
        held[f"exp_avg.{name}"] = state["exp_avg"]
        held[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
        steps[name] = float(state["step"])
    plain = {name: parameter.detach() for name, parameter in trained.items()}
    made = copies.later(lambda: (host_copies(plain), host_copies(held)))

    def write(folder: Path) -> None:
        weights, moments = made.result()
        save_file(weights, str(folder / WEIGHTS))
        save_file(moments, str(folder / MOMENTS))
        (folder / OPTIMIZER).write_text(json.dumps(steps, sort_keys=True))

    return write


def load_state(
    folder: Path, trained: Trained, optimizer: Any, *, part: Part, step_device: torch.device
) -> None:
    """Read the state into the weights and the optimiser.

    Args:
        part: What of a whole tensor belongs to a held one.
        step_device: Where the optimiser keeps its step counts.

    Raises:
        RlfeError: A file is missing, or it belongs to another model.
    """
    from safetensors.torch import load_file

    missing = [n for n in (WEIGHTS, MOMENTS, OPTIMIZER) if not (folder / n).is_file()]
    if missing:
        raise RlfeError(
            f"{folder} lacks {', '.join(missing)}: it is no whole state",
            hint="Start the run again with --overwrite.",
        )
    device = str(next(iter(trained.values())).device)
    weights = load_file(str(folder / WEIGHTS), device=device)
    if set(weights) != set(trained):
        raise RlfeError(f"{folder / WEIGHTS} belongs to another model")
    moments = load_file(str(folder / MOMENTS), device=device)
    steps = json.loads((folder / OPTIMIZER).read_text())
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(part(weights[name], parameter))
            if name in steps:
                optimizer.state[parameter] = {
                    "step": torch.tensor(steps[name]).to(step_device),
                    "exp_avg": part(moments[f"exp_avg.{name}"], parameter),
                    "exp_avg_sq": part(moments[f"exp_avg_sq.{name}"], parameter),
                }
