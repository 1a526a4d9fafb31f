"""Which files of a run folder may leave the machine: an allow-list by path parts.

Decided by parts and not by the client's patterns, where `optimizer.pt` does not match
`cell/global_step_30/optimizer.pt` and `*` crosses folders. What is not listed stays home. Secrets
are looked for in `rlfe.hub.secrets`. Try: `kind_of(("global_step_30", "optimizer.pt")) is None`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from rlfe.hub.paths import STEP_FOLDER

# A README.md inside a checkpoint is not here on purpose: trainers write one with a local path as
# base_model, and the server refuses it after the upload.
CHECKPOINT_FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "*.safetensors.index.json",
    "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json",
    "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip
CHECKPOINT_FOLDERS = {
    "chat_templates": ("*.jinja",),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
}
CELL_FILES = ("config.toml", "provenance.json", "metrics.jsonl")
RECORD_FOLDERS = ("logs", "rollouts", "evals")
RECORD_SUFFIXES = (
    ".log", ".txt", ".json", ".jsonl", ".csv", ".toml", ".parquet", ".png", ".html", ".md",
    ".zst", ".gz",
)  # fmt: skip
NEVER_FOLDERS = frozenset({"state", "wandb", "__pycache__", "node_modules"})
NEVER_SUFFIXES = (
    ".pt", ".pth", ".pkl", ".pickle", ".tmp", ".temp", ".lock", ".part", ".incomplete", ".swp",
    ".bak", ".pem", ".key", ".pyc", "~",
)  # fmt: skip
NEVER_NAMES = ("id_rsa*", "id_ed25519*", "*credential*", "*secret*", "optimizer*", "scheduler*")


class Kind(StrEnum):
    """What a file of a run is for a push. `Kind("checkpoint")`"""

    CHECKPOINT = "checkpoint"
    CELL = "cell"
    RECORDS = "records"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file on disk; size and time are those of a link's target.

    `Entry(path=Path("x/config.toml"), parts=("config.toml",), size=600, mtime_ns=1, inode=7)`
    """

    path: Path
    parts: tuple[str, ...]
    size: int
    mtime_ns: int
    inode: int

    @property
    def name(self) -> str:
        """Path below the run folder, with forward slashes."""
        return "/".join(self.parts)


def is_never_sent(name: str) -> bool:
    """Whether a file or folder of this name stays home wherever it lies.

    Dot files, training state, temporary and lock files, keys, and `*token` files other than the
    tokenizer's.
    """
    low = name.lower()
    is_token_file = low.split(".")[0].endswith(("token", "tokens")) and "tokenizer" not in low
    return (
        low.startswith(".")
        or low in NEVER_FOLDERS
        or low.endswith(NEVER_SUFFIXES)
        or is_token_file
        or any(fnmatchcase(low, pattern) for pattern in NEVER_NAMES)
    )


def kind_of(parts: tuple[str, ...]) -> Kind | None:
    """What the file at `parts` below a run folder is, or None when it stays home."""
    if any(is_never_sent(part) for part in parts):
        return None
    first, rest = parts[0], parts[1:]
    if not rest:
        return Kind.CELL if first in CELL_FILES else None
    if STEP_FOLDER.fullmatch(first):
        return Kind.CHECKPOINT if _belongs_to_checkpoint(rest) else None
    is_record = first in RECORD_FOLDERS and parts[-1].lower().endswith(RECORD_SUFFIXES)
    return Kind.RECORDS if is_record else None


def _belongs_to_checkpoint(parts: tuple[str, ...]) -> bool:
    if len(parts) == 1:
        return any(fnmatchcase(parts[0], pattern) for pattern in CHECKPOINT_FILES)
    patterns = CHECKPOINT_FOLDERS.get(parts[0], ())
    return len(parts) == 2 and any(fnmatchcase(parts[1], pattern) for pattern in patterns)


def walk(folder: Path, parts: tuple[str, ...] = (), *, everything: bool = False) -> Iterator[Entry]:
    """Files below `folder` in name order, links followed, what is never sent left out.

    `everything` leaves nothing out. One `stat` a file and no reading. A link that leads nowhere is
    passed over (the completeness check names what is then missing).
    """
    with os.scandir(folder) as found:
        listed = sorted(found, key=lambda item: item.name)
    for item in listed:
        if not everything and is_never_sent(item.name):
            continue
        if item.is_dir():
            # a linked folder could lead in a circle; nothing that is sent lies behind one
            if not item.is_symlink():
                yield from walk(Path(item.path), (*parts, item.name), everything=everything)
        elif item.is_file():
            stat = item.stat()
            yield Entry(
                path=Path(item.path), parts=(*parts, item.name), size=stat.st_size,
                mtime_ns=stat.st_mtime_ns, inode=stat.st_ino,
            )  # fmt: skip


def leaves(entry: Entry, run: Path) -> bool:
    """Whether the entry is a link whose target lies outside the run folder."""
    return entry.path.is_symlink() and not entry.path.resolve().is_relative_to(run.resolve())
