"""Problems from elsewhere: a local JSONL, JSON or Parquet file, or a data set of the Hub.

What: rows of a source as plain dicts under our field names. What not: what a row means (the task's
business). `data.columns` maps our field to the source's column; a field that is not mapped has its
own name. Try: `rows(Data(source="my.jsonl", columns={"prompt": "question"}), "train")`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlfe.errors import NetworkError, NotFoundError, RequestError
from rlfe.schema import Data

FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


def is_file(source: str) -> bool:
    """Whether a source is a local file, by its name."""
    return source.endswith(FILE_ENDINGS)


def rows(data: Data, split: str) -> list[dict[str, Any]]:
    """All rows of a split, each with `subset` where subsets were asked for.

    Raises:
        NotFoundError: no such file or data set. NetworkError: the Hub does not answer.
        RequestError: a line that is no JSON object, a column that is not there.
    """
    assert data.source is not None
    found = _from_file(Path(data.source)) if is_file(data.source) else _from_hub(data, split)
    return [_renamed(row, data.columns, number) for number, row in enumerate(found)]


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str], number: int) -> dict[str, Any]:
    missing = [name for name in columns.values() if name not in row]
    if missing:
        raise RequestError(
            f"row {number} of the source has no column {', '.join(missing)}",
            hint=f"It has {', '.join(row)}; set data.columns.",
        )
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items()}}


def _from_file(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        raise NotFoundError(f"data.source {path} does not exist")
    if path.name.endswith(".parquet"):
        import pyarrow.parquet

        table: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return table
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8")
    if path.name.endswith(".json"):
        whole: list[dict[str, Any]] = json.loads(text)
        return whole
    return [_parsed(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line]


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RequestError(f"{path}:{number}: not an object")
    return row


def _from_hub(data: Data, split: str) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise RequestError(
            f"data.source {data.source} comes from the Hub and needs the package datasets",
            hint="pip install 'rlfe[train]', or give a local JSONL or Parquet file.",
        ) from None
    found: list[dict[str, Any]] = []
    for subset in data.subsets or (None,):
        try:
            part = datasets.load_dataset(data.source, subset, split=split, revision=data.revision)
        except (FileNotFoundError, ValueError) as error:
            raise NotFoundError(
                f"data set {data.source} ({subset or 'default'}, {split}): {error}",
                hint="Check data.source, data.subsets and data.split.",
            ) from error
        except OSError as error:
            raise NetworkError(f"data set {data.source} cannot be read: {error}") from error
        found += [{**row, "subset": subset} if subset else dict(row) for row in part]
    return found


def digest(found: Iterable[Mapping[str, Any]]) -> str:
    """sha256 of rows, whatever they came from."""
    whole = hashlib.sha256()
    for row in found:
        whole.update(json.dumps(row, sort_keys=True, default=str).encode("utf-8", "replace"))
        whole.update(b"\n")
    return whole.hexdigest()
