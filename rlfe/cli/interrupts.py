"""Ctrl-C while other threads work: the first ends what is being done, the second ends at once.

A thread that waits for a judged batch cannot be interrupted, and Python joins it at exit; so the
second signal leaves the process as a kill would. What is on disk is whole at any moment
(`rlfe.eval.store`), and children of the judge and of vLLM end with their parent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rlfe.cli import output

INTERRUPTED = 130


@contextmanager
def second_stops_at_once(what: str) -> Iterator[None]:
    """Until the block ends, Ctrl-C says `what` it waits for, and another one waits for nothing.

    After an interrupt the second signal keeps its meaning: the waiting may be at exit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(INTERRUPTED)

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, leave)
        output.note(f"interrupted: {what} (again: stop at once)")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        signal.signal(signal.SIGINT, before)
        raise
    signal.signal(signal.SIGINT, before)
