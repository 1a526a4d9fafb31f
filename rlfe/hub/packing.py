"""Rollouts and logs as few files: loaders list a repository's whole tree.

`from_pretrained(repo, subfolder=...)` of a sharded model or a tokenizer asks for the tree, 1,000
entries a page, so 500 rollout files would slow every load. Zstandard frames may simply stand one
behind the other, so packing is concatenation: nothing is compressed again, the bytes are the same
every time, and `zstdcat` or pandas reads the result. Evaluations (one file per checkpoint and
task) and tables go as they are. Try: `zstdcat rollouts/steps_000001-000100.jsonl.zst | head -1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlfe.hub.contents import Entry

STEPS_A_FILE = 100
LARGE_TEXT_BYTES = 10 * 2**20  # larger text is compressed: a commit takes 1 GB of regular content
LEVEL = 6
_STEP = re.compile(r"(?:step_)?([0-9]+)\.jsonl(?:\.zst)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One file of the repository made from `sources` in order.

    `Packed(name="rollouts/steps_000001-000100.jsonl.zst", sources=(...))`; a single source that
    keeps its name goes up as it is.
    """

    name: str
    sources: tuple[Entry, ...]

    @property
    def is_plain(self) -> bool:
        return len(self.sources) == 1 and self.sources[0].name == self.name

    @property
    def is_exact(self) -> bool:
        """Whether `size_bound` is the size: nothing is compressed on the way."""
        return self.is_plain or all(source.name.endswith(".zst") for source in self.sources)

    @property
    def size_bound(self) -> int:
        """Bytes at most: compressing plain text only makes it smaller."""
        return sum(source.size for source in self.sources)

    def chunks(self) -> Iterator[bytes]:
        """The packed bytes, a source at a time."""
        for source in self.sources:
            if self.is_plain or source.name.endswith(".zst"):
                yield from _read(source.path)
            else:
                yield _compressed(source.path.read_bytes())


def pack(entries: Iterable[Entry]) -> list[Packed]:
    """The files that logs, rollouts and evaluations become, in name order."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=_order):
        groups.setdefault(_target(entry), []).append(entry)
    return [Packed(name=name, sources=tuple(group)) for name, group in sorted(groups.items())]


def _target(entry: Entry) -> str:
    step = _STEP.fullmatch(entry.parts[-1])
    folder = "/".join(entry.parts[:-1])
    if step and entry.parts[0] == "rollouts":
        first = (max(int(step[1]), 1) - 1) // STEPS_A_FILE * STEPS_A_FILE + 1
        return f"{folder}/steps_{first:06d}-{first + STEPS_A_FILE - 1:06d}.jsonl.zst"
    if entry.name.endswith((".log", ".txt", ".jsonl")) and entry.size > LARGE_TEXT_BYTES:
        return f"{entry.name}.zst"
    return entry.name


def _order(entry: Entry) -> tuple[tuple[str, ...], int, str]:
    step = _STEP.fullmatch(entry.parts[-1])
    return entry.parts[:-1], int(step[1]) if step else -1, entry.parts[-1]


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            yield chunk


def _compressed(text: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL).compress(text)
