"""`rlfe train --gpus N`: torchrun's launcher, started by the command itself.

What: N processes of this machine, each `python -m rlfe train ...` as a rank; Ctrl-C and SIGTERM
passed on so that the running step is saved; one error if a rank was killed. The library is the
one behind `torchrun --standalone`. Not here: several machines (torchrun's own command line), what
a rank does (`ranks.py`). Try: `rlfe train --recipe tiny --gpus 2 --set engine.device=cpu`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from rlfe.cli import output
from rlfe.engines.environment import changed
from rlfe.engines.ranks import GO_ON
from rlfe.errors import RlfeError

FOLDER = "_RLFE_LAUNCHER"  # where launcher and ranks leave each other word
STOP = "stop"


def stop_file(environment: Mapping[str, str]) -> Path | None:
    """The file whose existence asks a rank to stop; None where nobody launched it."""
    folder = environment.get(FOLDER)
    return Path(folder) / STOP if folder else None


def launched(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank that `launch` started."""
    return FOLDER in environment


def launch(words: Sequence[str], count: int) -> int:
    """Run `rlfe WORDS` as `count` ranks; returns the exit code of the run.

    Raises:
        RlfeError: A rank was killed, and none was left that could say so.
        KeyboardInterrupt: The user asked twice to stop.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with TemporaryDirectory(prefix="rlfe-ranks-") as folder:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGHUP",  # the others are ours: a step takes longer than it waits
        )
        with _environment(folder, count), _stopping(Path(folder) / STOP), _quiet():
            try:
                elastic_launch(settings, sys.executable)("-m", "rlfe", *words)
            except ChildFailedError as error:
                return _exit_code(error, Path(folder))
    return 0


def _exit_code(error: Any, folder: Path) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:  # it has said why
        return int(failure.exitcode)
    if any(folder.rglob("error.json")):  # another rank has
        return 1
    raise RlfeError(f"rank {rank} was ended by {failure.signal_name()}", hint=GO_ON)


@contextmanager
def _environment(folder: str, count: int) -> Iterator[None]:
    """What the ranks find in their environment; what the user has set stays."""
    threads = max(1, (os.cpu_count() or 1) // count)
    values = {
        FOLDER: folder,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),  # we say it in words
    }
    with changed(values):
        yield


@contextmanager
def _stopping(stop: Path) -> Iterator[None]:
    """First SIGINT or SIGTERM: the ranks end their step and save. Second: they stop at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can take signals
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        output.note("stopping after this step, which is saved; Ctrl-C again stops at once")

    before = {number: signal.signal(number, interrupt) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """The launcher's own account of a failure is a stack trace; ours is one error."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


STOPPING = (signal.SIGINT, signal.SIGTERM)
