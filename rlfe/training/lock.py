"""One process per run folder: a second one that would write into it is refused.

The lock is the operating system's (`flock`), so a killed process leaves none behind; the file in
`.rlfe/` only carries it. Not on network file systems without locks, and not on Windows, where
training is refused anyway. Try: start `rlfe train` twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlfe.errors import RequestError
from rlfe.rundir import RunDir

NAME = "training.lock"


@contextmanager
def held(run: RunDir) -> Iterator[None]:
    """Hold the run's lock.

    Raises:
        RequestError: Another process trains in that folder.
    """
    import fcntl

    run.private.mkdir(parents=True, exist_ok=True)
    with (run.private / NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(
                f"another process is training in {run.path}",
                hint="Wait for it, stop it with Ctrl-C, or give --name for a second run.",
            ) from None
        yield


def refuse_if_held(run: RunDir) -> None:
    """The same refusal without taking the lock, before a folder is replaced."""
    if (run.private / NAME).exists():
        with held(run):
            pass
