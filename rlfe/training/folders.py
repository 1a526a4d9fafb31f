"""A folder that every rank writes into, and that appears as a whole.

`rlfe.rundir.new_folder` for several ranks: the first makes it and renames it, when all have
written. On several machines the run's folder has to lie on a file system that they share. Try:
`with new_folder_of_all(Ranks(), path) as folder: ...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlfe.engines.ranks import Ranks
from rlfe.errors import RlfeError
from rlfe.rundir import disk_error, disk_full, new_folder


@contextmanager
def new_folder_of_all(ranks: Ranks, path: Path) -> Iterator[Path]:
    """Yield the same empty folder on every rank; it is at `path` when the last one has left.

    Raises:
        RlfeError: The disk is full, or a rank does not see what the first one made.
    """
    if ranks.first:
        with new_folder(path) as folder:
            ranks.share(folder)
            yield folder
            ranks.meet()
    else:
        folder = ranks.share(path)
        _need(folder, ranks)
        try:
            yield folder
        except BaseException as error:
            if disk_full(error):
                raise disk_error(error, path, "What was saved before is kept.") from error
            raise
        ranks.meet()
    ranks.meet()


def _need(folder: Path, ranks: Ranks) -> None:
    if not folder.is_dir():
        raise RlfeError(
            f"rank {ranks.rank} does not see {folder}, which rank 0 made",
            hint="Give --runs-dir on a file system that all machines share.",
        )
