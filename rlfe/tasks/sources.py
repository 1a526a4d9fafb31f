"""Problems from elsewhere: a local JSONL, JSON or Parquet file, or a data set of the Hub.

What: rows of a source as plain dicts under our field names. What not: what a row means (the task's
business). `data.columns` maps our field to the source's column; a field that is not mapped has its
own name. Try: `rows(Data(source="my.jsonl", columns={"prompt": "question"}), "train")`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfe.errors import NetworkError, NotFoundError, RequestError
from rlfe.recipe_checks import FILE_ENDINGS
from rlfe.schema import Data


def is_file(source: str) -> bool:
    """Whether a source is a local file, by its name."""
    return source.endswith(FILE_ENDINGS)


def rows(data: Data, split: str, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """All rows of a split, each with `subset` where subsets were asked for.

    A file is one list of problems: every split of it is the whole file. Of a data set, subsets
    without the split are left out; `notes` gets a sentence that says which.

    Raises:
        NotFoundError: no such file or data set. NetworkError: the Hub does not answer.
        RequestError: a file or line that cannot be read, a split or column that is not there.
    """
    assert data.source is not None
    if is_file(data.source):
        found = _from_file(Path(data.source))
    else:
        found, left_out = _from_hub(data, split)
        if left_out and notes is not None:
            notes.append(f"data set {data.source} has no {split} split in {', '.join(left_out)}")
    return [_renamed(row, data.columns, number) for number, row in enumerate(found)]


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str], number: int) -> dict[str, Any]:
    missing = [name for name in columns.values() if name not in row]
    if missing:
        raise RequestError(
            f"row {number} of the source has no column {', '.join(missing)}",
            hint=f"It has {', '.join(row)}; set data.columns.",
        )
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items()}}


def _from_file(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise NotFoundError(f"data.source {path} does not exist")
    if path.name.endswith(".parquet"):
        return _from_parquet(path)
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, "not a whole gzip file", error) from error
    except UnicodeDecodeError as error:
        raise _unreadable(path, "not UTF-8", error) from error
    if path.name.endswith(".json"):
        return _from_json(path, text)
    lines = enumerate(text.split("\n"), 1)
    return [_parsed(path, number, line) for number, line in lines if line.strip()]


def _from_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, "not a whole Parquet file", error) from error
    return table


def _from_json(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError as error:
        hint = "A file with one object a line is called .jsonl."
        raise RequestError(f"data.source {path}: not JSON: {error}", hint=hint) from error
    if not isinstance(whole, list) or not all(isinstance(row, dict) for row in whole):
        raise RequestError(
            f"data.source {path}: not a list of objects",
            hint="Write [{...}, {...}], or one object a line into a .jsonl file.",
        )
    return whole


def _unreadable(path: Path, what: str, error: Exception) -> RequestError:
    return RequestError(
        f"data.source {path}: {what}: {error}", hint="Write or download the file again."
    )


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(
            f"data.source {path}:{number}: not JSON: {error}",
            hint="A .jsonl file has one JSON object a line.",
        ) from None
    if not isinstance(row, dict):
        raise RequestError(
            f"data.source {path}:{number}: not an object",
            hint="A .jsonl file has one JSON object a line.",
        )
    return row


def _from_hub(data: Data, split: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all subsets that have the split, and the names of those that lack it."""
    try:
        import datasets
    except ImportError:
        raise RequestError(
            f"data.source {data.source} comes from the Hub and needs the package datasets",
            hint="pip install 'rlfe[train]', or give a local JSONL or Parquet file.",
        ) from None
    found: list[dict[str, Any]] = []
    lacking: dict[str, list[str]] = {}
    for subset in data.subsets or (None,):
        try:
            there = datasets.get_dataset_split_names(data.source, subset, revision=data.revision)
            if not _has(there, split):
                lacking[subset or "default"] = there
                continue
            part = datasets.load_dataset(data.source, subset, split=split, revision=data.revision)
        except (FileNotFoundError, ValueError) as error:
            raise NotFoundError(
                f"data set {data.source} ({subset or 'default'}, {split}): {error}",
                hint="Check data.source, data.subsets and data.split.",
            ) from error
        except OSError as error:
            raise NetworkError(f"data set {data.source} cannot be read: {error}") from error
        found += [{**row, "subset": subset} if subset else dict(row) for row in part]
    if len(lacking) == len(data.subsets or (None,)):
        names = "; ".join(f"{subset} has {', '.join(there)}" for subset, there in lacking.items())
        raise RequestError(
            f"data set {data.source} has no split {split}: {names}",
            hint="Set data.split (training) or validate.split to one of these.",
        )
    return found, list(lacking)


def _has(there: Sequence[str], split: str) -> bool:
    """Whether all parts of a split are there; `train[:100]+test` is such a split too."""
    return all(part.split("[")[0].strip() in (*there, "all") for part in split.split("+"))


def problem_id(data: Data, split: str, name: str) -> str:
    """An id for a row without one: `rows/train/7`; of a file, whose splits are the same, `rows/7`.

    The split stands before the row's number only where another split has other rows.
    """
    assert data.source is not None
    head, _, number = name.rpartition("/")
    return name if is_file(data.source) else f"{head}/{split}/{number}"


def digest(found: Iterable[Mapping[str, Any]]) -> str:
    """sha256 of rows, whatever they came from."""
    whole = hashlib.sha256()
    for row in found:
        whole.update(json.dumps(row, sort_keys=True, default=str).encode("utf-8", "replace"))
        whole.update(b"\n")
    return whole.hexdigest()
