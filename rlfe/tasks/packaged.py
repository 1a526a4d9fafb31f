"""Reading the packaged problem files (`rlfe/data/README.md` names their sources and digests)."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from rlfe.errors import RlfeError

FOLDER = Path(__file__).resolve().parent.parent / "data"


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a packaged `.jsonl.gz` file, in order."""
    text = gzip.decompress(_bytes(name)).decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def document(name: str) -> Any:
    """A packaged JSON file."""
    return json.loads(_bytes(name))


@functools.cache
def sha256(name: str) -> str:
    """Digest of a packaged file as it lies there."""
    return hashlib.sha256(_bytes(name)).hexdigest()


def _bytes(name: str) -> bytes:
    try:
        return (FOLDER / name).read_bytes()
    except FileNotFoundError:
        raise RlfeError(
            f"packaged data file {name} is missing from {FOLDER}", hint="Install rlfe again."
        ) from None
