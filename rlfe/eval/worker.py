"""What a sampler of a spread evaluation does: draw the blocks of a unit, judge, hand back.

It keeps its engine and its judge over units, and draws one unit while the one before is judged. It
writes no results: the process that gave the unit out is the only writer. Nothing here knows Ray.
Not here: which unit comes next (`units.py`). Try: `Worker(parcel).run(unit)`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfe import __version__, remote
from rlfe.errors import RequestError, RlfeError
from rlfe.eval.jobs import Job, Target
from rlfe.eval.judging import JudgeOnDemand, JudgeThread, Report
from rlfe.eval.places import HubPlaces, Stamp, stamp
from rlfe.eval.runner import Watch, sample_missing
from rlfe.eval.samplers import Samplers, make_engine, same_engine, tokenizer_hash
from rlfe.eval.store import BlockKey, Judged, Sample, Store
from rlfe.eval.units import Unit
from rlfe.hub_calls import Patience
from rlfe.types import CheckpointRef
from rlfe.weights import weights_hash

if TYPE_CHECKING:
    from rlfe.engines.base import Sampler
    from rlfe.sandbox.pool import Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Everything that a sampler needs to know, sent once.

    `references` are the checkpoints that lie on the Hub, by target text; `stamps` what the weight
    files of the others look like where the evaluation was started.
    """

    jobs: tuple[Job, ...]
    references: Mapping[str, CheckpointRef]
    stamps: Mapping[str, Stamp]
    cache: Path
    workers: int | None = None
    require_isolation: bool = False
    keep: bool = False
    engine_per_checkpoint: bool = False
    verify_reload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A drawn block; `verdicts` is None where judging failed through our fault."""

    key: BlockKey
    samples: tuple[Sample, ...]
    verdicts: tuple[Judged, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What comes back of a unit, and whose samples these are.

    `same_files`: the weight files look like those where the evaluation was started.
    """

    unit: int
    blocks: tuple[Block, ...]
    weights: str
    tokenizer: str
    same_files: bool
    report: Report
    tier: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request cannot be met, on any try: `Refused(error=RequestError("..."))`."""

    error: RlfeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The unit failed here; another sampler may do better."""

    why: str


class Gathered(Store):
    """A store without a file: keeps texts, which are written elsewhere."""

    def __init__(self, rule: str) -> None:
        super().__init__(Path("nowhere"), rule, texts=True)

    def add_block(self, problem: str, block: int, samples: Sequence[Sample]) -> None:
        self._take_block((problem, block), list(samples))

    def add_verdicts(self, verdicts: Mapping[BlockKey, Sequence[Judged]]) -> None:
        for key, row in verdicts.items():
            self._take_verdicts(key, list(row))


class Worker:
    """One sampler and its judge.

    Args:
        judge_workers: Processes that judge here; None: the cores.
        make: Builds the engine of a job; None: the one that its recipe names.
    """

    def __init__(
        self,
        parcel: Parcel,
        judge_workers: int | None = None,
        make: Callable[[Job], Sampler] | None = None,
    ) -> None:
        self._parcel, self.host = parcel, socket.gethostname()
        never = parcel.engine_per_checkpoint
        self._samplers = Samplers(
            make or make_engine,
            (lambda a, b: a.target == b.target) if never else same_engine,
            verify=parcel.verify_reload,
        )
        self._judges = JudgeOnDemand(lambda: _judge(parcel, parcel.workers or judge_workers))
        self._places = HubPlaces(weights_hash, keep=True, patience=Patience())
        self._engine, self._prepare = threading.Lock(), threading.Lock()
        self._weights: dict[str, str] = {}

    def hello(self) -> tuple[str, str]:
        """Name of this machine and version of rlfe here."""
        return self.host, __version__

    def run(self, unit: Unit) -> Result | Refused | Failed:
        """Draw and judge a unit; what went wrong comes back as a value that names this machine."""
        try:
            return self._run(unit)
        except RlfeError as error:
            if type(error) is RlfeError or error.exit_code == 7:  # not the request's fault
                return Failed(why=f"node {self.host}: {error.what}")
            return Refused(error=type(error)(f"node {self.host}: {error.what}", hint=error.hint))
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            return Failed(why=f"node {self.host}: {type(error).__name__}: {text}")

    def forget(self, target: str) -> None:
        """Remove the weights of a checkpoint that was fetched from the Hub."""
        reference = self._parcel.references.get(target)
        if reference is not None and not self._parcel.keep:
            folder = remote.cache_folder(self._parcel.cache, reference) / reference.subfolder
            for file in folder.glob("*.safetensors"):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        self._samplers.close()
        self._judges.__exit__()

    def _run(self, unit: Unit) -> Result:
        job, report = self._here(self._parcel.jobs[unit.job]), Report()
        with self._prepare:  # one at a time: the second finds what the first has made
            weights = self._identity(job, unit.weights)
            judge = self._judges.for_task(job.task)
        store = Gathered(job.rule)
        waited = 0.0
        for key, samples in unit.unjudged:
            store.blocks[key] = list(samples)
        with JudgeThread(job, store, judge, report) as judging:
            judging.submit([key for key, _ in unit.unjudged])
            if unit.missing:
                with self._engine:
                    self._load(job, report)
                    start = time.monotonic()
                    sample_missing(
                        job, store, self._samplers, unit.missing, judging, Watch(), report
                    )
                    report.sample_seconds = time.monotonic() - start
                    waited = report.wait_seconds
        report.wait_seconds = waited  # what comes after holds up nothing
        return Result(
            unit=unit.number,
            blocks=tuple(_blocks(store)),
            weights=weights,
            tokenizer=tokenizer_hash(job.target.path),
            same_files=self._same_files(job.target),
            report=report,
            tier=judge.tier if judge is not None else {},
        )

    def _load(self, job: Job, report: Report) -> None:
        before = self._samplers.loads, self._samplers.engines
        self._samplers.on(job)
        report.loads = self._samplers.loads - before[0]
        report.engines = self._samplers.engines - before[1]

    def _here(self, job: Job) -> Job:
        """The job with its checkpoint where it lies, or will lie, on this machine.

        Raises:
            RequestError: Its problems are others here.
        """
        if job.task.data_sha256() != job.facts["data_sha256"]:
            raise RequestError(
                f"{job.task.name} has other problems here than where the evaluation was started",
                hint="Install the same rlfe, and the same file of an own task, on all nodes.",
            )
        reference = self._parcel.references.get(job.target.text)
        if reference is None:
            return job
        one = self._places.adopt(reference, remote.cache_folder(self._parcel.cache, reference))
        return replace(job, target=replace(job.target, path=one.path))

    def _identity(self, job: Job, known: str | None) -> str:
        """Hash of the checkpoint's weights, which are there afterwards.

        Raises:
            RequestError: This machine does not see the folder.
        """
        target = job.target
        if target.text in self._parcel.references:
            self._places.ready(target)
        elif not (target.path / "config.json").is_file():
            raise RequestError(
                f"there is no checkpoint at {target.path}",
                hint="Keep runs on a file system that all nodes share, or score hf:// checkpoints.",
            )
        if target.text not in self._weights:
            if known is None or not self._same_files(target):
                known = weights_hash(target.path)
            self._weights[target.text] = known
        return self._weights[target.text]

    def _same_files(self, target: Target) -> bool:
        """Also where the commit on the Hub says so."""
        if target.text in self._parcel.references:
            return True
        return stamp(target.path) == self._parcel.stamps[target.text]


def _judge(parcel: Parcel, workers: int | None) -> Judge:
    from rlfe.sandbox.pool import Judge

    return Judge(workers=workers, require_isolation=parcel.require_isolation)


def _blocks(store: Store) -> Sequence[Block]:
    found = []
    for key, samples in store.blocks.items():
        row = store.verdicts.get(key)
        verdicts = None if row is None else tuple(row)
        found.append(Block(key=key, samples=tuple(samples), verdicts=verdicts))
    return found
