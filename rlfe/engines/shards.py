"""The resumable state of a learner in shards: torch.distributed.checkpoint, one file a rank.

What: float32 weights and AdamW's moments and step counts, each rank's own part; any number of
ranks reads what any other number wrote, one process included. Not here: the state of one process
(`whole_state.py`). The format's metadata is a pickle: such a folder is local and
never comes from another user.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlfe.errors import RlfeError

METADATA = ".metadata"
MOMENTS = ("exp_avg", "exp_avg_sq")
Trained = Mapping[str, torch.Tensor]


def is_sharded(folder: Path) -> bool:
    """Whether the folder holds a state in shards."""
    return (folder / METADATA).is_file()


def save_shards(folder: Path, trained: Trained, optimizer: Any, group: Any) -> None:
    """Write the state; every rank of `group` (None: one process) calls it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = {"weights": {n: p.detach() for n, p in trained.items()}}
    for part in (*MOMENTS, "step"):
        held = {n: optimizer.state[p][part] for n, p in trained.items() if optimizer.state.get(p)}
        state[part] = held
    save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)


def load_shards(folder: Path, trained: Trained, optimizer: Any, group: Any) -> None:
    """Read the state into the weights and the optimiser; every rank calls it.

    Raises:
        RlfeError: It belongs to another model, or a part of it is damaged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    if {f"weights.{name}" for name in trained} != {n for n in stored if n.startswith("weights.")}:
        raise RlfeError(f"{folder} belongs to another model")
    state: dict[str, Any] = {"weights": {n: p.detach() for n, p in trained.items()}}
    stepped = {n: p for n, p in trained.items() if f"step.{n}" in stored}
    for part in MOMENTS:
        state[part] = {n: torch.zeros_like(p.detach()) for n, p in stepped.items()}
    device = next(iter(trained.values())).device
    place = device if device.type == "cuda" else torch.device("cpu")  # as fused AdamW keeps it
    state["step"] = {n: torch.zeros((), device=place) for n in stepped}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*load in a single process")  # as is meant
            load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise RlfeError(
            f"{folder} is damaged: {str(error).splitlines()[0]}",
            hint="Start the run again with --overwrite.",
        ) from error
    for name, parameter in stepped.items():
        optimizer.state[parameter] = {part: state[part][name] for part in ("step", *MOMENTS)}
