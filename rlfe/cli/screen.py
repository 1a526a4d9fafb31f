"""What a user sees of a running training, and how the user stops it.

Not here: when the loop asks. Try: Ctrl-C in `rlfe train --recipe tiny`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlfe.cli import output

if TYPE_CHECKING:
    from rlfe.training.job import Job
    from rlfe.types import StepRecord


class Screen:
    """Shows each step, and remembers that the user wants to stop. `Screen(bar, steps=4)`

    Args:
        stop: A file whose existence asks to stop, too; None: there is none.
    """

    def __init__(self, bar: output.Progress, *, steps: int, stop: Path | None = None) -> None:
        self._bar, self._steps, self._file = bar, steps, stop
        self._stop, self._shown = False, 0

    def step(self, record: StepRecord) -> None:
        from rlfe.training.tracking import step_line

        output.note(step_line(record, steps=self._steps))
        self._bar.advance(record.step - self._shown)
        self._shown = record.step

    def within(self, text: str) -> None:
        self._bar.advance(0, text)

    def warn(self, text: str) -> None:
        output.warn(text)

    def stopping(self) -> bool:
        return self._stop or (self._file is not None and self._file.exists())

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """First Ctrl-C or SIGTERM: save after this step. Second: stop at once."""
        if self.stopping():
            raise KeyboardInterrupt
        self._stop = True
        if signum == signal.SIGINT:  # SIGTERM comes from a scheduler, or after a rank was lost
            output.note("stopping after this step, which is saved; Ctrl-C again stops at once")


@contextmanager
def watched(job: Job, bar: output.Progress, stop: Path | None = None) -> Iterator[None]:
    """Show the job's steps on the bar; SIGINT and SIGTERM end it after a step."""
    screen = Screen(bar, steps=job.recipe.train.steps, stop=stop)
    job.watch = screen
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can take signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, screen.interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
