"""Writing behind the training: what a step keeps goes to the disk while the next steps run.

What: one thread that works in order, so that what was handed over first is whole first; at most one
step's folders are in flight; after a failure nothing more is written, and the failure is the run's
error at its next step. Not here: what is written (`saving.py`), how a folder appears as a whole
(`rlfe.rundir.new_folder`). Try: `Writer(print).submit(1, lambda: lambda: print("written"))`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Work = Callable[[], object]


class Writer:
    """Runs works in a thread, one after the other.

    Args:
        log: Where a failure is noted, for it may come while the run fails of something else.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._failed, self._step = log, False, -1
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlfe-writing")
        self._open: list[Future[None]] = []

    def submit(self, step: int, prepare: Callable[[], Work]) -> None:
        """Hand over a work of a step.

        `prepare` makes or starts the copies that the work writes. It is called here, and only when
        all works of other steps have ended: two steps' copies would not fit.

        Raises what an earlier work raised.
        """
        if step == self._step:
            self.check()
        else:
            self.wait()
        self._step = step
        self._open.append(self._pool.submit(self._run, prepare()))

    def check(self) -> None:
        """Raise what a work raised; waits for none."""
        while self._open and self._open[0].done():
            self._open.pop(0).result()

    def wait(self) -> None:
        """Wait for all works; raises what one of them raised."""
        while self._open:
            self._open[0].result()
            self._open.pop(0)

    def close(self) -> None:
        """Let what was handed over be written; raises nothing."""
        self._pool.shutdown(wait=True)

    def _run(self, work: Work) -> None:
        if self._failed:
            return  # a state must not outlive the checkpoint that belongs to it
        try:
            work()
        except BaseException as error:
            self._failed = True
            self._log(f"writing failed: {error}")
            raise
