"""`--scorer evalplus`: verdicts by evalplus itself, in a process of its own (no jail).

What: runs `evalplus_peer.py` with an interpreter that has evalplus, on our packaged data files.
What not: part of any reported score; it exists to compare.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfe.errors import RequestError, RlfeError
from rlfe.tasks import packaged
from rlfe.tasks.base import Task
from rlfe.tasks.plus import PlusTask
from rlfe.types import Problem, Status, Verdict

DATASETS = {"mbpp_plus": "mbpp", "humaneval_plus": "humaneval"}
_STATUS = {"pass": Status.PASSED, "fail": Status.FAILED, "timeout": Status.TIMEOUT}


def is_installed() -> bool:
    """Whether this interpreter has evalplus."""
    return importlib.util.find_spec("evalplus") is not None


def score(task: Task, programs: Sequence[tuple[Problem, str]], *, workers: int) -> list[Verdict]:
    """One verdict per program, in order; the status is base and plus together."""
    if not isinstance(task, PlusTask):
        raise RequestError(
            f"evalplus does not score {task.name}", hint=f"It scores {', '.join(DATASETS)}."
        )
    if not is_installed():
        raise RequestError(
            "--scorer evalplus needs evalplus", hint="Install it: pip install 'rlfe[evalplus]'"
        )
    rows = [(task.task_id(problem.id), program) for problem, program in programs]
    verdicts, _ = run(sys.executable, task, rows, workers=workers)
    return [_verdict(base, plus) for base, plus in verdicts]


def _verdict(base: str, plus: str) -> Verdict:
    first = next((part for part in (base, plus) if part != "pass"), "pass")
    facts = {"base": str(_STATUS[base]), "plus": str(_STATUS[plus])}
    return Verdict(status=_STATUS[first], facts=facts)


def run(
    python: str, task: PlusTask, programs: Sequence[tuple[str, str]], *, workers: int
) -> tuple[list[tuple[str, str]], Mapping[str, float]]:
    """((base, plus) as evalplus says per program, seconds of its phases).

    Args:
        python: An interpreter that has evalplus 0.3.1.
        programs: (evalplus task id, program).
    """
    peer = Path(__file__).with_name("evalplus_peer.py")
    with tempfile.TemporaryDirectory(prefix="rlfe-evalplus-") as folder:
        source, target = Path(folder, "samples.jsonl"), Path(folder, "verdicts.jsonl")
        source.write_text(
            "".join(json.dumps({"task_id": t, "solution": p}) + "\n" for t, p in programs)
        )
        arguments = [DATASETS[task.name], str(source), str(target), str(workers)]
        ended = subprocess.run(
            [python, str(peer), *arguments],
            env=_environment(folder),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise RlfeError(f"evalplus ended with {ended.returncode}: {ended.stderr[-400:]}")
        *rows, last = [json.loads(line) for line in target.read_text().splitlines()]
    found: dict[int, Any] = {row["sample"]: (row["base"], row["plus"]) for row in rows}
    return [found[number] for number in range(len(programs))], last["seconds"]


def _environment(folder: str) -> dict[str, str]:
    """evalplus' data from our files, its cache in a folder that goes away."""
    return {
        "HOME": folder,
        "XDG_CACHE_HOME": folder,
        "PATH": "/usr/bin:/bin",
        "MBPP_OVERRIDE_PATH": str(packaged.FOLDER / "MbppPlus-v0.2.0.jsonl.gz"),
        "HUMANEVAL_OVERRIDE_PATH": str(packaged.FOLDER / "HumanEvalPlus-v0.1.10.jsonl.gz"),
    }
