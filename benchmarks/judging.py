"""Judging speed against evalplus on the same samples in the same run.

What: light MBPP+ tasks, 55 % right programs, 40 % wrong ones, 5 % endless loops, of which a share
is distinct, as samples of a model are; wall and CPU time, peak memory, verdicts compared. What not:
the heavy tasks (run `rlfe judge` for a whole evaluation). Peer: evalplus 0.3.1, same workers.
Try: `python benchmarks/judging.py --tasks 4 --samples 20 --evalplus-python PATH`.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlfe.sandbox.pool import Judge
from rlfe.tasks.evalplus_scorer import run
from rlfe.tasks.plus import MbppPlus
from rlfe.types import Problem
from tests.judging_programs import mutants

LOOP = "while True:\n        pass\n"


def samples(task: MbppPlus, tasks: int, count: int, distinct: float) -> list[tuple[Problem, str]]:
    """`count` programs for each of `tasks` light problems, in a fixed shuffled order."""
    chosen = [p for p in task.problems("test") if _is_light(task, p)]
    step = max(1, len(chosen) // tasks)
    picked = [(p, text) for p in chosen[::step][:tasks] for text in _programs(p, count, distinct)]
    random.Random(0).shuffle(picked)
    return picked


def _is_light(task: MbppPlus, problem: Problem) -> bool:
    times = task._references[problem.id]
    light = not any(times[part]["seconds"] for part in ("base", "plus"))
    return light and len(mutants(problem.answer, 4)) == 4


def _programs(problem: Problem, count: int, distinct: float) -> list[str]:
    wrong, loops = round(count * 0.40), max(1, round(count * 0.05))
    right = count - wrong - loops
    bad = mutants(problem.answer, 40)
    made = []
    for number, kind in (
        (right, lambda i: f"{problem.answer}\n# {i}\n"),
        (wrong, lambda i: f"{bad[i % len(bad)]}\n# {i}\n"),
        (loops, lambda i: f"def {problem.entry_point}(*given):\n    # {i}\n    {LOOP}"),
    ):
        pool = max(1, round(number * distinct))
        made += [kind(i % pool) for i in range(number)]
    return made


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    own, others = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def ours(
    task: MbppPlus, asked: list[tuple[Problem, str]], workers: int
) -> tuple[list[tuple[bool, bool]], dict[str, float]]:
    """Verdicts (base, base and plus) and measures of rlfe, start included."""
    started, before = time.monotonic(), cpu_seconds()
    with Judge(workers=workers) as judge:
        first = 0.0
        found = {}
        programs = [(str(i), p, text) for i, (p, text) in enumerate(asked)]
        for key, verdict in task.judge_programs(programs, judge):
            first = first or time.monotonic() - started
            found[key] = (verdict.facts["base"] == "passed", verdict.correct)
        memory = sum(_resident(worker._process.pid) for worker in judge._workers)
    wall, cpu = time.monotonic() - started, cpu_seconds() - before
    verdicts = [found[str(i)] for i in range(len(asked))]
    return verdicts, {"wall": wall, "cpu": cpu, "first": first, "workers_mib": memory}


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Print both sides and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--distinct", type=float, default=0.25, help="share of distinct programs")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--evalplus-python", help="interpreter with evalplus 0.3.1; none: skip it")
    options = parser.parse_args()
    task = MbppPlus()
    asked = samples(task, options.tasks, options.samples, options.distinct)
    distinct = len({(p.id, text) for p, text in asked})
    print(f"{len(asked)} samples, {distinct} distinct, {options.workers} workers")
    verdicts, measured = ours(task, asked, options.workers)
    loops = sum(LOOP in text for text in {text for _, text in asked})
    print(
        f"rlfe      wall {measured['wall']:8.2f} s  cpu {measured['cpu']:8.2f} s  "
        f"first verdict {measured['first']:.2f} s  workers {measured['workers_mib']:.0f} MiB  "
        f"({loops} distinct loops)"
    )
    if not options.evalplus_python:
        return
    before = cpu_seconds()
    started = time.monotonic()
    programs = [(task.task_id(p.id), text) for p, text in asked]
    theirs, phases = run(options.evalplus_python, task, programs, workers=options.workers)
    wall, cpu = time.monotonic() - started, cpu_seconds() - before
    print(f"evalplus  wall {wall:8.2f} s  cpu {cpu:8.2f} s  (preparing {phases['prepare']:.1f} s)")
    same = sum(
        (base == "pass", base == more == "pass") == verdict
        for (base, more), verdict in zip(theirs, verdicts, strict=True)
    )
    print(f"ratio     wall {wall / measured['wall']:8.1f} x  cpu {cpu / measured['cpu']:8.1f} x")
    print(f"verdicts  {same} of {len(asked)} equal")


if __name__ == "__main__":
    main()
