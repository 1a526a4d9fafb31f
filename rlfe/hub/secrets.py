"""Tokens in text files: a push with one in it stops, naming file and line but never the token.

Shapes only (`hf_`, wandb, `sk-` and a few more); it does not find a password in plain words.
Compressed records are read through. Try: `first_secret(Path("logs/train.log"))`.
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

TEXT_SUFFIXES = (".log", ".txt", ".json", ".jsonl", ".csv", ".toml", ".md", ".html", ".jinja")
# vocabularies hold millions of word pieces and no secrets
NOT_SCANNED = ("tokenizer.json", "vocab.json", "merges.txt", "model.safetensors.index.json")
SHAPES: dict[str, re.Pattern[bytes]] = {
    "Hugging Face token": re.compile(rb"(?<![A-Za-z0-9_])(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    "wandb key": re.compile(
        rb"(?i)wandb[a-z_\- .]{0,20}[\"'\s:=]{1,6}[0-9a-f]{40}(?![0-9a-f])"
        rb"|wandb_v1_[A-Za-z0-9_]{20,}|password\s+[0-9a-f]{40}(?![0-9a-f])"
    ),
    "sk- key": re.compile(rb"(?<![A-Za-z0-9_-])sk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}"),
    "GitHub token": re.compile(rb"(?<![A-Za-z0-9_])(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{30,}"),
    "AWS key": re.compile(rb"(?<![A-Za-z0-9])AKIA[0-9A-Z]{16}(?![0-9A-Za-z])"),
}
# one cheap look at a line before the shapes: rollouts are long and hold none of this
HINT = re.compile(rb"hf_|api_org_|wandb|password|sk-|gh[pousr]_|github_pat_|akia", re.IGNORECASE)


class Secret(NamedTuple):
    """Where a token was found. `Secret(line=3, shape="wandb key")`"""

    line: int
    shape: str


def is_scanned(name: str) -> bool:
    """Whether a file of this name is text that is looked through."""
    low = name.lower().removesuffix(".zst").removesuffix(".gz")
    return low.endswith(TEXT_SUFFIXES) and low.rsplit("/", 1)[-1] not in NOT_SCANNED


def first_secret(path: Path) -> Secret | None:
    """The first token shape in a text file, plain, `.gz` or `.zst`."""
    with path.open("rb") as raw:
        return first_secret_in(_opened(raw, path.name))


def first_secret_in(lines: Iterable[bytes]) -> Secret | None:
    """The first token shape in these lines. `first_secret_in([b"x", b"key sk-..."]).line == 2`"""
    for number, line in enumerate(lines, start=1):
        if not HINT.search(line):
            continue
        for shape, pattern in SHAPES.items():
            if pattern.search(line):
                return Secret(number, shape)
    return None


def _opened(raw: BinaryIO, name: str) -> Iterable[bytes]:
    if name.endswith(".gz"):
        return gzip.open(raw)
    if name.endswith(".zst"):
        import zstandard

        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader)
    return raw
