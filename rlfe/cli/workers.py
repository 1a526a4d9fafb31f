"""Running commands of a sweep as processes: so many at a time, a GPU each, a log each.

Ctrl-C reaches the children too (they end their step and save); no new one starts then.
With one job its words go to this terminal; with more, each to its log file.
Try: `rlfe sweep RECIPE --run --jobs 2`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from rlfe.cli import output
from rlfe.cli.checks import gpu_names
from rlfe.records import append_jsonl, read_jsonl

POLL_SECONDS = 0.2


class Task(NamedTuple):
    """A cell to run. `Task("tiny_mbpp_nobuf_lr1e5", ["rlfe", "train", ...])`"""

    name: str
    command: list[str]


class Ended(NamedTuple):
    """How it ended; no log where its words went to this terminal.

    `Ended(0, Path("runs/_sweep/tiny_mbpp_nobuf_lr1e5.log"))`
    """

    code: int
    log: Path | None


@dataclass(slots=True)
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    gpu: str | None
    log: Path | None
    file: IO[bytes] | None
    started: float


def gpu_list(environment: Mapping[str, str]) -> list[str]:
    """The GPUs to share out: CUDA_VISIBLE_DEVICES where it is set, else all of the machine."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip() not in ("", "-1")]
    return [str(number) for number in range(len(gpu_names()))]


def endings(folder: Path) -> dict[str, int]:
    """Exit code of each cell's latest run of a sweep."""
    return {row["cell"]: row["code"] for row in read_jsonl(folder / "ended.jsonl")}


def run_all(
    tasks: Sequence[Task],
    *,
    jobs: int,
    gpus: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
) -> dict[str, Ended]:
    """Run all tasks, `jobs` at a time; a failing one does not stop the others.

    Raises:
        KeyboardInterrupt: After the running ones have ended by themselves.
    """
    waiting, running = list(tasks), list[_Running]()
    free: list[str | None] = list(gpus[:jobs]) if gpus and jobs > 1 else [None] * jobs
    ended: dict[str, Ended] = {}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(waiting.pop(0), free.pop(0), folder, environment, jobs == 1))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free.append(one.gpu)
                ended[one.task.name] = _end(one, folder)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        _stop(running, folder)
        raise
    return ended


def _start(
    task: Task, gpu: str | None, folder: Path, environment: Mapping[str, str], live: bool
) -> _Running:
    log = None if live else folder / f"{task.name}.log"
    changed = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    command = [sys.executable, "-m", *task.command]  # this interpreter, whatever is on the PATH
    place = "" if gpu is None else f" on GPU {gpu}"
    output.note(f"{task.name}: started{place}" + ("" if log is None else f", log {log}"))
    file = None if log is None else log.open("ab")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if file is None else file,
        stderr=None if file is None else subprocess.STDOUT,
        env={**environment, **changed} if environment else None,
    )
    return _Running(task, process, gpu, log, file, time.monotonic())


def _end(one: _Running, folder: Path) -> Ended:
    if one.file is not None:
        one.file.close()
    code, seconds = one.process.returncode, time.monotonic() - one.started
    record_ending(folder, one.task.name, code, seconds)
    return Ended(code, one.log)


def record_ending(folder: Path, name: str, code: int, seconds: float) -> None:
    """Keep how a cell ended, for `endings`, and say it."""
    append_jsonl(folder / "ended.jsonl", {"cell": name, "code": code, "seconds": seconds})
    output.note(f"{name}: exit {code} after {seconds:.0f} s")


def _stop(running: Sequence[_Running], folder: Path) -> None:
    output.note(f"interrupted: {len(running)} running cells end their step (again: stop at once)")
    try:
        for one in running:
            one.process.wait()
    except KeyboardInterrupt:
        for one in running:
            one.process.kill()
    for one in running:
        one.process.wait()
        _end(one, folder)
