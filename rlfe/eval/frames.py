"""JSON lines in zstd frames, one frame a call: what a kill leaves is whole frames and one cut one.

Every frame carries a checksum; reading stops at the first that is cut or broken, and opening for
appending drops it. `zstd -dc` reads such a file. Not here: what the lines mean.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from rlfe.errors import RequestError
from rlfe.rundir import disk_error

CHUNK = 1 << 16  # small, because a decompressor hands back what follows a frame as a copy


class FrameFile:
    """A file that one process appends to; its threads may share it.

    Raises:
        RequestError: Another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: BinaryIO | None = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        try:
            _lock(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def truncate(self, size: int) -> None:
        """Drop what stands behind the last whole frame."""
        assert self._file is not None
        self._file.truncate(size)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the lines as one frame.

        Raises:
            RlfeError: The disk is full; the file is as it was before.
        """
        assert self._file is not None, "the file is closed"
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        frame = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(text.encode())
        with self._lock:
            start = os.fstat(self._file.fileno()).st_size
            try:
                written = self._file.write(frame)
                if written < len(frame):  # a disk that runs full takes a part, then refuses
                    self._file.write(frame[written:])
            except OSError as error:
                self._file.truncate(start)
                raise disk_error(error, self.path, "Every finished block is kept.") from error

    def close(self) -> None:
        """Flush to disk and give the lock back; may be called twice."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def frames(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (text, offset behind it) of every whole frame; stops at the first cut or broken one."""
    position, rest = 0, b""
    with path.open("rb") as file:
        while True:
            frame, parts = zstandard.ZstdDecompressor().decompressobj(), []
            while not frame.eof:
                chunk = rest or file.read(CHUNK)
                rest = b""
                if not chunk:
                    return
                try:
                    parts.append(frame.decompress(chunk))
                except zstandard.ZstdError:
                    return
                position += len(chunk)
            rest = frame.unused_data
            position -= len(rest)
            yield b"".join(parts).decode(), position


def _lock(file: BinaryIO, path: Path) -> None:
    """Refuse a second writer. Advisory, freed by the system when the process dies."""
    try:
        import fcntl
    except ImportError:  # Windows: evaluation is refused before it gets here
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RequestError(
            f"another process is writing {path}",
            hint="Wait for it, or split the work with --shard.",
        ) from None
