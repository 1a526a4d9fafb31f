"""Verdicts that are known already: in memory for a pool's life, and in a file if one is given.

What: a table from a key that names program, data, rule, limits and interpreter to a verdict. What
not: timeouts and faults of ours are never written to the file, because another run may do better.
Try: `Judge(cache=Path("verdicts.sqlite"))`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sqlite3
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlfe.sandbox.inside.wire import VERSION
from rlfe.types import Status, Verdict

PASSING = frozenset((Status.TIMEOUT, Status.INFRASTRUCTURE))  # may be otherwise the next time


def default_file(environment: Mapping[str, str]) -> Path | None:
    """`$XDG_CACHE_HOME/rlfe/verdicts.sqlite`, or under ~/.cache; None without a home."""
    home = environment.get("HOME")
    cache = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    return Path(cache, "rlfe", "verdicts.sqlite") if cache else None


def key(*parts: str) -> bytes:
    """Digest of what a verdict depends on, the encoding and the interpreter included."""
    text = "\x1f".join((*_about(), *parts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


@functools.cache
def _about() -> tuple[str, ...]:
    has_numpy = importlib.util.find_spec("numpy") is not None
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return (f"wire{VERSION}", version, f"numpy {has_numpy}")


class Verdicts:
    """A table of verdicts; several threads, and several processes on one file, may use it."""

    def __init__(self, path: Path | None = None) -> None:
        self._memory: dict[bytes, Verdict] = {}
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None
        self.trouble = ""  # why the file is not used, if it is not
        if path is not None:
            try:
                self._file = _opened(path)
            except (sqlite3.Error, OSError) as error:
                self.trouble = f"{path}: {error}"

    def get(self, name: bytes) -> Verdict | None:
        """The verdict under a key, if it is known."""
        with self._lock:
            found = self._memory.get(name)
            if found is None:
                row = self._ask("SELECT verdict FROM verdicts WHERE key = ?", (name,))
                if row is not None:
                    found = self._memory[name] = _read(row[0])
            return found

    def put(self, name: bytes, verdict: Verdict) -> None:
        """Keep a verdict; one that another run may overturn does not go to the file."""
        if verdict.status is Status.INFRASTRUCTURE:
            return
        with self._lock:
            self._memory[name] = verdict
            if self._file is not None and verdict.status not in PASSING:
                row = (name, _written(verdict))
                self._ask("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", row)

    def _ask(self, text: str, values: tuple[Any, ...]) -> Any:
        """First row of the answer; a file that fails is not asked again: judging goes on."""
        if self._file is None:
            return None
        try:
            return self._file.execute(text, values).fetchone()
        except sqlite3.Error as error:
            self.trouble, self._file = str(error), None
            return None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    file.execute("PRAGMA journal_mode=WAL")
    file.execute("PRAGMA synchronous=OFF")  # a lost verdict is judged again
    file.execute("CREATE TABLE IF NOT EXISTS verdicts (key BLOB PRIMARY KEY, verdict TEXT)")
    return file


def _written(verdict: Verdict) -> str:
    facts = dict(verdict.facts)
    return json.dumps([str(verdict.status), verdict.detail, verdict.seconds, facts])


def _read(text: str) -> Verdict:
    status, detail, seconds, facts = json.loads(text)
    return Verdict(status=Status(status), detail=detail, seconds=seconds, facts=facts)
