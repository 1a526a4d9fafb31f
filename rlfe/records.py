"""Machine-written records: JSON lines that survive being cut, and their compressed form.

Every record is one line written by one call, so a kill leaves at most one cut line at the end,
which reading drops and appending removes. Not here: what the fields mean (`rlfe.types`).
Try: `append_jsonl(path, {"step": 1}); read_jsonl(path)`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rlfe.errors import RlfeError
from rlfe.rundir import disk_error, write_bytes


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no spaces, NaN and infinity as null."""
    return json.dumps(
        plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )


def plain(value: Any) -> Any:
    """The value in JSON's own types; numpy scalars and arrays become numbers and lists."""
    if value is None or isinstance(value, bool | int | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Set):
        return sorted(plain(item) for item in value)
    if isinstance(value, Sequence):
        return list(value) if _is_plain(value) else [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _is_plain(values: Sequence[Any]) -> bool:
    """Whether all are JSON's own numbers: token ids and log-probabilities come by the million."""
    kinds = set(map(type, values))
    if not kinds <= {int, float}:
        return False
    return float not in kinds or all(map(math.isfinite, values))


def append_jsonl(path: Path, record: Any) -> None:
    """Append one line by one write. A line that an earlier kill cut short is removed first.

    Raises:
        RlfeError: The disk is full; the file is as it was before.
    """
    line = (canonical_json(record) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = _whole_size(path)
        file.truncate(size)
        if size and _last_byte(path, size) != b"\n":
            line = b"\n" + line
        try:
            written = file.write(line)
            if written != len(line):
                file.write(line[written:])
        except OSError as error:
            file.truncate(size)
            raise disk_error(error, path, "Every earlier line is kept.") from error


def _last_byte(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1)


def _whole_size(path: Path) -> int:
    """Bytes up to the end of the last whole record."""
    size = path.stat().st_size
    if size == 0 or _last_byte(path, size) == b"\n":
        return size
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    return size if _is_json(data[start:]) else start


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except ValueError:
        return False


def read_jsonl(path: Path) -> list[Any]:
    """All records of a file; a cut last line is dropped, a missing file is empty.

    Raises:
        RlfeError: A line that is not the last one is no JSON.
    """
    if not path.exists():
        return []
    return parse_lines(path.read_bytes(), path)


def parse_lines(data: bytes, path: Path) -> list[Any]:
    """The records of JSON lines; `path` is for the message."""
    lines = data.split(b"\n")
    records: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break  # cut by a kill: the writer ends every line with a newline
            raise RlfeError(
                f"{path}:{number}: not a JSON line: {line[:40]!r}",
                hint="The file was damaged from outside: remove the line to go on.",
            ) from error
    return records


def cut_after(path: Path, step: int) -> int:
    """Drop the records of later steps (before a resume). Returns how many were dropped."""
    records = read_jsonl(path)
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or "step" not in record:
            raise RlfeError(
                f"{path}: record {number} is no step: {str(record)[:40]}",
                hint="The file was damaged from outside: remove the line to go on.",
            )
    kept = [record for record in records if record["step"] <= step]
    if path.exists():
        write_bytes(path, "".join(canonical_json(record) + "\n" for record in kept).encode())
    return len(records) - len(kept)


def write_jsonl_zst(path: Path, records: Iterable[Any]) -> None:
    """Write all records as one compressed file, beside and renamed."""
    import zstandard

    text = "".join(canonical_json(record) + "\n" for record in records)
    write_bytes(path, zstandard.ZstdCompressor(level=6).compress(text.encode()))


def read_jsonl_zst(path: Path) -> list[Any]:
    """All records of a compressed file; RlfeError if it is damaged."""
    import zstandard

    try:
        data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    except zstandard.ZstdError as error:
        raise RlfeError(f"{path} is damaged: {error}", hint="Remove it and run again.") from error
    return parse_lines(data, path)
