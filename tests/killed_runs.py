"""Runs a training run in children that are killed at random moments, then to its end.

`python -m tests.killed_runs MODEL FOLDER KILLS SEED 'JSON changes'` prints one JSON line: at
which step each child died. A program of its own: children are forked after the slow imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.training_doubles import a_run


def child(model: Path, folder: Path, changes: dict[str, object]) -> int:
    """Fork a process that trains, resuming what is there; returns its id."""
    process = os.fork()
    if process == 0:
        try:
            a_run(model, folder, changes, resume=True)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return process


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main(model: str, folder: str, kills: str, seed: str, changes: str) -> None:
    torch.set_num_threads(1)
    torch.nn.functional.silu(torch.ones(2))  # everything is loaded before the first fork
    draw, place, settings = random.Random(int(seed)), Path(folder), json.loads(changes)
    died = []
    while len(died) < int(kills):
        process, wanted = child(Path(model), place, settings), steps_done(place)
        deadline = time.monotonic() + 60
        moved = draw.randrange(0, 3)  # steps to let it do before the random moment
        while steps_done(place) in (wanted, *range(wanted, wanted + moved)):
            if moved == 0 or time.monotonic() > deadline or os.waitpid(process, os.WNOHANG)[0]:
                break
            time.sleep(0.005)
        time.sleep(draw.random() * 0.3)
        try:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            break  # it had ended
        died.append(steps_done(place))
    last = child(Path(model), place, settings)
    _, status = os.waitpid(last, 0)
    print(json.dumps({"died": died, "exit": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
