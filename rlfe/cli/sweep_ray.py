"""`rlfe sweep --ray`: cells as processes on the nodes of a Ray cluster, each with its GPUs.

A cell is the same `rlfe train` as elsewhere, started by an actor that holds the cell's GPUs and
dies with it, and it is resumed on another node when its node is gone. The folder of the runs has to
be the same on all nodes; each cell's words go to `<runs-dir>/_sweep/<cell>.log`.
Try: `rlfe sweep lr-ladder --ray`.
"""

from __future__ import annotations

import ctypes
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlfe.budget import used_gpus
from rlfe.cli import output
from rlfe.cli.workers import Ended, Task, record_ending
from rlfe.errors import RequestError
from rlfe.ray_cluster import Cluster, Needs, reason
from rlfe.schema import Recipe

MAX_LOSSES = 3  # nodes that one cell may lose
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where cells run, the same on all nodes; `proof` is a file that is there if it is."""

    folder: Path
    proof: Path


class Answer(NamedTuple):
    """How a cell ended: `Answer(0, "gpu07", "")`; `unseen` is a path that its node lacks."""

    code: int
    host: str
    unseen: str


class CellRunner:
    """Runs one cell on a node; an actor, so that it can be told to stop."""

    def __init__(self, place: Place) -> None:
        self._place, self.host = place, socket.gethostname()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def hello(self) -> str:
        """Name of the machine."""
        return self.host

    def run(self, command: Sequence[str], log: Path) -> Answer:
        """Run it to its end, its words going to `log`; it dies with this process."""
        for path in (self._place.folder, self._place.proof):
            if not path.exists():
                return Answer(1, self.host, str(path))
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self._place.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it once, through `stop`
                preexec_fn=_before_start,
            )
            if self._stopped:
                self.stop()
            return Answer(self._process.wait(), self.host, "")

    def stop(self) -> None:
        """Let the cell end its step and save."""
        self._stopped = True
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)


def _before_start() -> None:
    """A cell whose node is lost is resumed elsewhere: it must not go on beside that.

    Ray's processes block Ctrl-C, and children inherit that.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class _Running:
    task: Task
    actor: Any
    hello: Any
    answer: Any = None
    started: float = field(default_factory=time.monotonic)
    host: str = ""
    losses: int = 0


@dataclass(slots=True)
class _Sweep:
    """The state of `run_on_ray`."""

    found: Cluster
    needs: Needs
    place: Place
    folder: Path
    variables: Mapping[str, str]
    running: list[_Running] = field(default_factory=list)
    ended: dict[str, Ended] = field(default_factory=dict)

    def start(self, task: Task, losses: int = 0) -> None:
        import ray

        actor = (
            ray.remote(CellRunner)
            .options(
                num_cpus=self.needs.cpus,
                num_gpus=self.needs.gpus,
                max_concurrency=2,
                runtime_env={"env_vars": dict(self.variables)} if self.variables else None,
            )
            .remote(self.place)
        )
        one = _Running(task, actor, actor.hello.remote(), losses=losses)
        self.running.append(one)

    def log(self, task: Task) -> Path:
        return (self.folder / f"{task.name}.log").absolute()

    def poll(self) -> None:
        """Take what has happened; returns after a moment if nothing has."""
        import ray

        refs = {(one.answer or one.hello): one for one in self.running}
        ready, _ = ray.wait(list(refs), num_returns=1, timeout=POLL_SECONDS)
        for ref in ready:
            try:
                self._heard(refs[ref], ray.get(ref))
            except ray.exceptions.RayError as error:
                self._lost(refs[ref], reason(error))

    def _heard(self, one: _Running, said: Any) -> None:
        if one.answer is None:
            one.host, one.started = said, time.monotonic()
            one.answer = one.actor.run.remote(one.task.command, self.log(one.task))
            output.note(f"{one.task.name}: started on {said}, log {self.log(one.task)}")
            return
        if said.unseen:
            raise RequestError(
                f"node {said.host} does not see {said.unseen}",
                hint="Start the sweep in a folder, with a --runs-dir, that all nodes share.",
            )
        self.running.remove(one)
        self._end(one, said.code)

    def _end(self, one: _Running, code: int) -> None:
        import ray

        ray.kill(one.actor)
        record_ending(self.folder, one.task.name, code, time.monotonic() - one.started)
        self.ended[one.task.name] = Ended(code, self.log(one.task))

    def _lost(self, one: _Running, why: str) -> None:
        self.running.remove(one)
        losses = one.losses + 1
        place = f"node {one.host}" if one.host else "a node"
        if losses >= MAX_LOSSES:
            output.warn(f"{one.task.name}: lost {losses} times, the last with {place} ({why})")
            self._end(one, 1)
            return
        output.warn(f"{one.task.name}: lost with {place} ({why}), goes on elsewhere")
        self.found.room(self.needs)
        command = one.task.command
        again = command if "--resume" in command else [*command, "--resume"]
        self.start(one.task._replace(command=again), losses)

    def stop(self) -> None:
        """Let what runs end its step, what waits not start."""
        begun = [one for one in self.running if one.answer is not None]
        output.note(f"interrupted: {len(begun)} running cells end their step (again: stop at once)")
        self.running = begun
        for one in begun:
            one.actor.stop.remote()
        try:
            while self.running:
                self.poll()
        except KeyboardInterrupt:
            return  # the actors end with this process, and their cells with them


def run_on_ray(
    found: Cluster,
    tasks: Sequence[Task],
    *,
    needs: Needs,
    folder: Path,
    environment: Mapping[str, str],
) -> dict[str, Ended]:
    """Run all tasks on the cluster, as many at a time as fit; a failing one stops no other.

    Raises:
        RequestError: No node is large enough, or one does not see the folders.
        KeyboardInterrupt: After the running ones have ended by themselves.
    """
    places = found.room(needs)
    folder.mkdir(parents=True, exist_ok=True)
    proof = (folder / f".seen-{secrets.token_hex(4)}").absolute()
    proof.touch()
    variables = {k: v for k, v in environment.items() if k.startswith("RLFE_")}
    sweep = _Sweep(found, needs, Place(folder=Path.cwd(), proof=proof), folder, variables)
    each = f"{needs.gpus} GPUs" if needs.gpus else f"{needs.cpus} CPUs"
    output.note(f"Ray: {len(tasks)} cells, {places} at a time with {each} each")
    try:
        for task in tasks:
            sweep.start(task)
        while sweep.running:
            sweep.poll()
    except KeyboardInterrupt:
        sweep.stop()
        raise
    finally:
        proof.unlink(missing_ok=True)
    return sweep.ended


def cell_needs(recipes: Sequence[Recipe], gpus: int | None, found: Cluster) -> Needs:
    """What a cell takes: the GPUs that are asked for, else those that its engine computes on.

    Raises:
        RequestError: A recipe names its GPUs; Ray chooses them.
    """
    named = [recipe.engine.devices for recipe in recipes if recipe.engine.devices]
    if named:
        raise RequestError(
            f'engine.devices = "{named[0]}": Ray chooses the GPUs of a cell',
            hint="Leave engine.devices out; --gpus says how many.",
        )
    engines = [recipe.engine for recipe in recipes]
    on_cpu = all(engine.device == "cpu" or engine.sampler == "fake" for engine in engines)
    if gpus is None:
        gpus = 0 if on_cpu or not found.gpus else max(used_gpus(engine) for engine in engines)
    return Needs(cpus=1 if gpus else max(engine.threads or 1 for engine in engines), gpus=gpus)
