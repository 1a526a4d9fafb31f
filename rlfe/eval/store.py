"""Samples and verdicts of one checkpoint and task, appended block by block.

One file per checkpoint: concatenated zstd frames (`zstd -dc` reads it), each frame one or more
JSON lines. A frame is written by one call and carries a checksum, so a kill leaves at most one cut
frame at the end, which the next opening drops: finished blocks are never lost. A block is known by
(problem, block number), so none is counted twice; a short last block is superseded by a whole one
when n grows. Verdicts name the judging rule: with another rule the samples stay and are judged
again. Not here: what is right (`tally.py`) and what to sample (`runner.py`).

Lines: {"kind": "header", ...} once; {"kind": "block", "p", "b", "s": [[text, finish, tokens]]};
{"kind": "verdicts", "p", "b", "rule", "v": [[answer hash, status, detail, seconds, facts]]}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlfe.errors import RequestError, RlfeError
from rlfe.eval.frames import FrameFile, frames

SCHEMA = "rlfe.samples/1"

BlockKey = tuple[str, int]


class Sample(NamedTuple):
    """One sampled reply: `Sample("def f(): ...", "stop", 41)`."""

    text: str
    finish: str
    tokens: int


class Judged(NamedTuple):
    """One judged reply: `Judged("9f86d081884c7d65", "failed", "plus 3", 0.02, {})`."""

    answer: str
    status: str
    detail: str
    seconds: float
    facts: Mapping[str, Any]


class Store:
    """Samples and verdicts in memory, and the file that they are appended to.

    `beside` are files of the same evaluation that other processes wrote (`--shard`): their blocks
    count as there, and are read only.

    `verdicts` are those of `rule`. Once a block is judged its texts are kept as digests only
    (60,000 replies are 90 MB), unless `texts` is true. Use as a context manager to write (the
    file is locked, threads may share it), or `Store.read(path, rule)` to look.
    """

    def __init__(
        self, path: Path, rule: str, texts: bool = False, beside: Sequence[Path] = ()
    ) -> None:
        self.path, self.rule, self.texts, self.beside = path, rule, texts, tuple(beside)
        self.header: Mapping[str, Any] | None = None
        self.blocks: dict[BlockKey, list[Sample]] = {}
        self.verdicts: dict[BlockKey, list[Judged]] = {}
        self._file: FrameFile | None = None

    @classmethod
    def read(cls, path: Path, rule: str, texts: bool = False, beside: Sequence[Path] = ()) -> Store:
        """What the files hold (nothing if there are none); a cut last frame is left out."""
        store = cls(path, rule, texts, beside)
        store._load()
        return store

    def open(self, header: Mapping[str, Any]) -> Store:
        """Lock the file for appending, drop a cut last frame, and check whose samples these are.

        Raises:
            RequestError: the samples belong to other weights or tokenizer files, or another
                process is writing them.
        """
        self._file = FrameFile(self.path)
        try:
            whole = {"kind": "header", "schema": SCHEMA, **header}
            self._file.truncate(self._load(whole))
            if self.header is None:
                self._file.append([whole])
                self.header = whole
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush to disk and give the lock back; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _appending(self) -> FrameFile:
        assert self._file is not None, "the store is not open for writing"
        return self._file

    def add_block(self, problem: str, block: int, samples: Sequence[Sample]) -> None:
        """Append one block; a block that was there is superseded."""
        self._appending.append(
            [{"kind": "block", "p": problem, "b": block, "s": [list(s) for s in samples]}]
        )
        self._take_block((problem, block), list(samples))

    def add_verdicts(self, verdicts: Mapping[BlockKey, Sequence[Judged]]) -> None:
        """Append the verdicts of whole blocks, all in one frame."""
        lines = [
            {"kind": "verdicts", "p": p, "b": b, "rule": self.rule, "v": [_verdict(v) for v in row]}
            for (p, b), row in verdicts.items()
        ]
        if lines:
            self._appending.append(lines)
        for key, row in verdicts.items():
            self._take_verdicts(key, list(row))

    def missing(self, problem: str, n: int, size: int) -> list[tuple[int, int]]:
        """(block, samples) still to be drawn so that `problem` has n, in blocks of `size`."""
        wanted = [(block, min(size, n - block * size)) for block in range(-(-n // size))]
        return [(b, count) for b, count in wanted if len(self.blocks.get((problem, b), ())) < count]

    def unjudged(self) -> list[BlockKey]:
        """Blocks without a verdict for every sample, in the order they were written."""
        return [k for k, s in self.blocks.items() if len(self.verdicts.get(k, ())) != len(s)]

    def _load(self, header: Mapping[str, Any] | None = None) -> int:
        """Read every whole frame of all files; returns the offset behind the own file's last one.

        `header` is what the files have to say they hold; None: not checked.
        """
        self.blocks, self.verdicts, good = {}, {}, 0
        for path in (*self.beside, self.path):
            self.header, good = None, 0
            for text, end in frames(path) if path.exists() else ():
                for line in text.splitlines():
                    self._take(json.loads(line))
                good = end
            if header is not None and self.header is not None:
                check_same(path, self.header, header)
        return good

    def _take(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "header":
            if line.get("schema") != SCHEMA:
                raise RlfeError(f"{self.path} has the schema {line.get('schema')}, not {SCHEMA}")
            self.header = line
        elif line["kind"] == "block":
            self._take_block((line["p"], line["b"]), [Sample(*row) for row in line["s"]])
        elif line["rule"] == self.rule:
            self._take_verdicts((line["p"], line["b"]), [Judged(*row) for row in line["v"]])

    def _take_block(self, key: BlockKey, samples: list[Sample]) -> None:
        if len(self.blocks.get(key, ())) <= len(samples):  # a whole block is never given back
            self.blocks[key] = samples
            self.verdicts.pop(key, None)

    def _take_verdicts(self, key: BlockKey, verdicts: list[Judged]) -> None:
        samples = self.blocks.get(key, [])
        if len(samples) != len(verdicts):
            return  # of a short block that a whole one has superseded
        self.verdicts[key] = verdicts
        if not self.texts:
            self.blocks[key] = [Sample(text_hash(s.text), s.finish, s.tokens) for s in samples]


def check_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse samples of other weights, tokenizer files or settings; RequestError says which."""
    for name, value in here.items():
        if there.get(name) != value:
            raise RequestError(
                f"{path} holds samples of another {name}: {there.get(name)} there, {value} here",
                hint="Start anew with --fresh, or evaluate into another --runs-dir.",
            )


def text_hash(text: str) -> str:
    """Sixteen hex digits of a text; lone surrogates count too."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _verdict(verdict: Judged) -> list[Any]:
    return [
        verdict.answer,
        verdict.status,
        verdict.detail[:200],
        round(verdict.seconds, 4),
        dict(verdict.facts),
    ]
