"""Is a checkpoint complete enough to be published? What `rlfe.checkpoints` asks, and a little more.

Added here: sharded training state counts as "needs a merge" only when there are no whole weights
(otherwise the filter leaves it out), and no file may be a link that leads out of the run. Headers
are read, weights are not, torch is not needed. Try: `problems(Path("runs/x/global_step_30"))`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlfe import checkpoints
from rlfe.hub.contents import Entry, leaves

SHARDED_STATE = (
    "*.pt", "*.pth", "*.distcp", "*/*.pt", "*/*.pth", "*/*.distcp", "pytorch_model*.bin",
)  # fmt: skip


def problems(folder: Path, entries: Iterable[Entry]) -> list[str]:
    """What keeps a checkpoint home, in words; empty when it may go up.

    `entries` are the files of `folder` that the filter lets through.
    """
    if needs_merge(folder):
        return ["sharded training state without whole weights: it needs a merge by its trainer"]
    outside = [entry.parts[-1] for entry in entries if leaves(entry, folder.parent)]
    lacks = checkpoints.problems(folder, need_tokenizer_config=True)
    return lacks + [f"{name} is a link to a file outside the run" for name in outside]


def needs_merge(folder: Path) -> bool:
    """Whether there is only sharded training state."""
    if any(folder.glob("*.safetensors")):
        return False
    return any(True for pattern in SHARDED_STATE for _ in folder.glob(pattern))
