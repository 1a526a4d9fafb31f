"""The processes that train one run together, and every place where they wait for each other.

What: who this process is (`rank` of `size`), values passed between ranks, and waits that end with
one error which names the phase (and the rank where that is known) instead of a stack trace of the
library below. `Ranks()` is one process alone: every exchange gives back what it was given. Not
here: weights and gradients (`sharded.py`), starting the processes (`rlfe.cli.launching`).

Small values and arrays travel over gloo on the CPU, whatever the weights travel over. Try:
`Ranks().gather(3) == [3]`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlfe.errors import RequestError, RlfeError

T = TypeVar("T")

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for what a process has to say
FAILURE = "rlfe/failure"  # key of the store: the rank that speaks for a failure of all
MARGIN_SECONDS = 60  # by which the library's own time-outs come after ours
CHECK_SECONDS = 0.5  # between two looks at the deadline
GO_ON = "Go on with the same command and --resume."


class PeerError(RlfeError):
    """Another rank ended or does not answer."""


class Ranks:
    """One process alone. `TorchRanks` is the same over several."""

    rank, size, local, local_size = 0, 1, 0, 1
    group: Any = None  # of torch.distributed, over the CPU
    phase = "the start"

    @property
    def first(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        return [value]

    def share(self, value: T) -> T:
        """The first rank's value, on every rank."""
        return value

    def meet(self) -> None:
        """Wait until every rank is here."""

    def added(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Each array summed over the ranks."""
        return list(arrays)

    def close(self) -> None:
        """Leave together."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around a run: an error of the library below says in which phase whom was lost."""
        yield

    @contextmanager
    def waiting(self, whom: str = "another rank") -> Iterator[Callable[[], None]]:
        """Around calls that wait for other ranks; call what it yields after each part."""
        yield lambda: None

    def once(self, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, or the RlfeError that it raises, on every rank."""
        found: Any = None
        if self.first:
            try:
                found = (work(), None)
            except RlfeError as refused:
                found = (None, refused)
        answer, problem = self.share(found)
        if problem is not None:
            raise problem
        value: T = answer
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return any(self.gather(flag))

    def same(self, value: object, what: str) -> None:
        """RlfeError unless every rank holds the same value."""
        held = self.gather(value)
        differ = [rank for rank, other in enumerate(held) if other != held[0]]
        if differ:
            raise RlfeError(
                f"rank {differ[0]} holds other {what} than rank 0 ({self.phase})",
                hint="Start every rank with the same versions, data and settings.",
            )


def member(environment: Mapping[str, str]) -> TorchRanks | None:
    """This process's place among those that torchrun started; None if it is alone.

    Raises:
        RequestError: The environment names a place in part.
    """
    if int(environment.get("WORLD_SIZE") or 1) == 1:
        return None
    lacks = [name for name in NEEDED if not environment.get(name)]
    if lacks:
        raise RequestError(
            f"WORLD_SIZE = {environment['WORLD_SIZE']}, but {', '.join(lacks)} is not set",
            hint="Start several processes with rlfe train --gpus N or with torchrun -m rlfe train.",
        )
    return TorchRanks(environment)


class TorchRanks(Ranks):
    """A rank of a torch.distributed run; `join` before anything is exchanged.

    Args:
        environment: What torchrun sets; see `NEEDED`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.local = int(environment["LOCAL_RANK"])
        self.local_size = int(environment["LOCAL_WORLD_SIZE"])
        self.phase = "the start"
        self._speaks: bool | None = None
        self._error_file = environment.get(ERROR_FILE)
        self._timeout, self._deadline, self._whom = timedelta(), 0.0, "another rank"
        with self._translated():
            self._store = next(iter(rendezvous("env://")))[0]

    def join(self, device: str, *, minutes: float, expired: Callable[[RlfeError], None]) -> None:
        """Meet the other ranks for the first time.

        Args:
            device: `cuda` or `cpu`: where the weights are.
            minutes: How long a rank waits for the others.
            expired: Called from another thread when it waited longer; ends this process.
        """
        import torch
        import torch.distributed as dist

        self._timeout, later = timedelta(minutes=minutes), timedelta(seconds=MARGIN_SECONDS)
        limit = self._timeout + later
        if device == "cuda":
            torch.cuda.set_device(self.local)
        with self._translated():
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
            self.group = dist.new_group(backend="gloo", timeout=limit)
        threading.Thread(target=self._watch, args=(expired,), daemon=True).start()
        self.meet()

    def speaks(self, text: str) -> bool:
        """Whether this rank reports a failure: the first one that asks, of all ranks."""
        if self._speaks is None:
            mine = str(self.rank)
            try:
                self._speaks = self._store.compare_set(FAILURE, "", mine).decode() == mine
            except RuntimeError:  # nobody is left to ask
                self._speaks = True
            if self._speaks and self._error_file:
                said = {"message": text, "timestamp": int(time.time())}
                Path(self._error_file).write_text(json.dumps(said))
        return self._speaks

    @contextmanager
    def guarded(self) -> Iterator[None]:
        with self._translated():
            yield

    def close(self) -> None:
        import torch.distributed as dist

        self.phase = "the end"
        self.meet()
        dist.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        import torch.distributed as dist

        self.meet()
        found: list[Any] = [None] * self.size
        with self._translated(), self.waiting():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def share(self, value: T) -> T:
        import torch.distributed as dist

        self.meet()
        found: list[Any] = [value]
        with self._translated(), self.waiting():
            dist.broadcast_object_list(found, src=0, group=self.group)
        shared: T = found[0]
        return shared

    def meet(self) -> None:
        import torch.distributed as dist

        with self._translated(), self.waiting("rank 0" if self.rank else "another rank"):
            dist.monitored_barrier(self.group, timeout=self._timeout, wait_all_ranks=True)

    def added(self, *arrays: np.ndarray) -> list[np.ndarray]:
        import torch
        import torch.distributed as dist

        self.meet()
        tensors = [torch.from_numpy(np.array(array)) for array in arrays]
        with self._translated(), self.waiting():
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)
        return [tensor.numpy() for tensor in tensors]

    @contextmanager
    def waiting(self, whom: str = "another rank") -> Iterator[Callable[[], None]]:
        before = (self._deadline, self._whom)

        def beat() -> None:
            # after the barrier's own limit, which knows more about who is missing
            limit = self._timeout.total_seconds() + 2 * CHECK_SECONDS
            self._deadline, self._whom = time.monotonic() + limit, whom

        beat()
        try:
            yield beat
        finally:
            self._deadline, self._whom = before

    def _watch(self, expired: Callable[[RlfeError], None]) -> None:
        """End a wait that nothing else ends: a CUDA collective blocks the main thread."""
        while True:
            time.sleep(CHECK_SECONDS)
            if 0 < self._deadline < time.monotonic():
                expired(self._late(self._whom))
                return

    def _late(self, who: str = "another rank") -> PeerError:
        minutes = self._timeout.total_seconds() / 60
        return PeerError(
            f"rank {self.rank} waited {minutes:g} minutes for {who} in {self.phase} "
            "(run.timeout_minutes)",
            hint=f"{who.capitalize()} hangs or is that much slower. {GO_ON}",
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of torch.distributed in words; every other error as it is."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not _is_ours(error):
                raise
            raise self._lost(str(error), time.monotonic() - start) from error

    def _lost(self, text: str, seconds: float) -> PeerError:
        """The barrier says the same of a rank that ended and of one that is late."""
        missing = re.search(r"[Rr]anks? ([\d, ]+?) failed to pass monitoredBarrier", text)
        whom = "another rank"
        if missing is not None:
            whom = ("ranks " if "," in missing[1] else "rank ") + missing[1].strip()
        waited = missing is not None and seconds >= self._timeout.total_seconds()
        if waited or re.search(r"[Tt]imed? ?out", text):
            return self._late(whom)
        return PeerError(f"rank {self.rank} lost {whom} in {self.phase}", hint=GO_ON)


def _is_ours(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it: gloo's errors have no class of their own."""
    distributed = sys.modules.get("torch.distributed")
    known = distributed is not None and isinstance(error, distributed.DistError)
    return known or "gloo" in str(error) or "monitoredBarrier" in str(error)


def end_now(code: int) -> None:
    """End this process without waiting for what other ranks never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
