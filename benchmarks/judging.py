"""Judging speed against evalplus on the same samples in the same run.

What: light MBPP+ tasks, 40 % wrong programs, 5 % endless loops (`--loops`), the others right; a
share is distinct, as samples of a model are; wall and CPU time, peak memory, verdicts compared.
Before it: CPU time of each distinct program beside its bare tests, and the rewards of a step.
What not: the heavy tasks (`--whole` judges all 378). Peer: evalplus 0.3.1, same workers.
Try: `python benchmarks/judging.py --tasks 4 --samples 20 --evalplus-python PATH`.
"""

from __future__ import annotations

import argparse
import marshal
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlfe.sandbox.inside import wire
from rlfe.sandbox.parts import Part
from rlfe.sandbox.pool import Judge
from rlfe.tasks.base import Reply
from rlfe.tasks.evalplus_scorer import run
from rlfe.tasks.mbpp import Mbpp
from rlfe.tasks.plus import MbppPlus
from rlfe.types import Finish, Problem
from tests.judging_programs import mutants

LIGHT_SECONDS = 0.06  # of the longest call of the reference
LOOP = "while True:\n        pass\n"


def samples(
    task: MbppPlus, tasks: int, count: int, distinct: float, loops: float = 0.05
) -> list[tuple[Problem, str]]:
    """`count` programs for each of `tasks` light problems, in a fixed shuffled order."""
    chosen = [p for p in task.problems("test") if _is_light(task, p)]
    step = max(1, len(chosen) // tasks)
    chosen = chosen[::step][:tasks]
    picked = [(p, text) for p in chosen for text in _programs(p, count, distinct, loops)]
    random.Random(0).shuffle(picked)
    return picked


def _is_light(task: MbppPlus, problem: Problem) -> bool:
    times = task._references[problem.id]
    calls = [*times["base"]["seconds"].values(), *times["plus"]["seconds"].values()]
    return max(calls, default=0.0) < LIGHT_SECONDS and len(mutants(problem.answer, 4)) == 4


def _programs(problem: Problem, count: int, distinct: float, loops: float) -> list[str]:
    wrong, endless = round(count * 0.40), round(count * loops)
    right = count - wrong - endless
    bad = mutants(problem.answer, 40)
    made = []
    for number, kind in (
        (right, lambda i: f"{problem.answer}\n# {i}\n"),
        (wrong, lambda i: f"{bad[i % len(bad)]}\n# {i}\n"),
        (endless, lambda i: f"def {problem.entry_point}(*given):\n    # {i}\n    {LOOP}"),
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


def _children_seconds(judge: Judge) -> float:
    """CPU time of the pool's workers and of the programs that have ended in them."""
    ticks = 0
    for worker in judge._workers:
        fields = Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def bare_seconds(parts: tuple[Part, ...], text: str) -> float:
    """CPU time of loading a program and of its calls, up to the first wrong one, and no more."""
    clock, total = time.process_time, 0.0
    for part in parts:
        started = clock()
        namespace: dict[str, object] = {}
        exec(compile(text, "<program>", "exec", dont_inherit=True), namespace)
        function = namespace[part.entry]
        total += clock() - started
        for index, data in enumerate(part.inputs):
            given = marshal.loads(data)
            started = clock()
            try:
                value = function(*given)  # type: ignore[operator]
            except Exception:
                return total + clock() - started
            total += clock() - started
            answer = wire.result(value, exact=index in part.exact, digest_only=index in part.digest)
            if not part.check(index, answer):
                return total
    return total


def overhead(task: MbppPlus, asked: list[tuple[Problem, str]], judge: Judge) -> tuple[float, float]:
    """CPU seconds of a distinct program beyond its bare tests: (mean, median over the tasks).

    All of it is counted: child, fork server, comparison. Both sides run in turns, task by task.
    """
    programs: dict[str, dict[str, Problem]] = {}
    for problem, text in asked:
        if LOOP not in text:
            programs.setdefault(problem.id, {})[text] = problem
    extra = [(_extra_seconds(task, texts, judge), len(texts)) for texts in programs.values()]
    mean = sum(seconds for seconds, _ in extra) / sum(size for _, size in extra)
    return mean, statistics.median(seconds / size for seconds, size in extra)


def _extra_seconds(task: MbppPlus, texts: dict[str, Problem], judge: Judge) -> float:
    """CPU seconds in all; each side is the least of three, because the machine may be shared."""
    parts = task.parts(next(iter(texts.values())), judge)
    judged, bare = [], []
    for turn in range(3):
        named = [
            (str(i), p, f"{text}\n# turn {turn}\n") for i, (text, p) in enumerate(texts.items())
        ]
        before = time.process_time() + _children_seconds(judge)
        for _ in task.judge_programs(named, judge):
            pass
        judged.append(time.process_time() + _children_seconds(judge) - before)
        bare.append(sum(bare_seconds(parts, text) for text in texts))
    return min(judged) - min(bare)


def rewards(workers: int) -> tuple[float, float]:
    """(programs a second, CPU seconds each) for one step of 64 problems x 8 replies, no loops."""
    task, replies = Mbpp(), []
    for problem in [p for p in task.problems("train") if len(mutants(p.answer, 4)) == 4][:64]:
        prompt, bad = task.prompt(problem, "chat"), mutants(problem.answer, 4)
        for number in range(8):
            program = problem.answer if number < 4 else bad[number % 4]
            replies.append(
                Reply(
                    key=f"{problem.id} {number}", problem=problem, prompt=prompt,
                    text=f"Here it is.\n\n```python\n{program}\n# {number}\n```\n",
                    finish=Finish.STOP,
                )
            )  # fmt: skip
    found = []
    for _ in range(3):
        with Judge(workers=workers) as judge:
            started = time.monotonic()
            before = time.process_time() + _children_seconds(judge)
            assert len(list(task.judge(replies, judge))) == 512
            cpu = time.process_time() + _children_seconds(judge) - before
            found.append((512 / (time.monotonic() - started), cpu / 512))
    return max(speed for speed, _ in found), min(seconds for _, seconds in found)


def whole(task: MbppPlus, count: int, distinct: float, loops: float) -> list[tuple[Problem, str]]:
    """`count` programs for each of the 378: 55 % right, the others wrong; loops in every fourth."""
    picked = []
    for place, problem in enumerate(task.problems("test")):
        endless = round(4 * count * loops) if place % 4 == 0 else 0
        bad = mutants(problem.answer, 40) or [f"def {problem.entry_point}(*given):\n    return 7\n"]
        for number, kind in (
            (round(count * 0.55), lambda i, p=problem: f"{p.answer}\n# {i}\n"),
            (count - round(count * 0.55) - endless, lambda i, b=bad: f"{b[i % len(b)]}\n# {i}\n"),
            (endless, lambda i, p=problem: f"def {p.entry_point}(*x):\n    # {i}\n    {LOOP}"),
        ):
            pool = max(1, round(number * distinct))
            picked += [(problem, kind(i % pool)) for i in range(number)]
    return picked


def main() -> None:
    """Print both sides and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--distinct", type=float, default=0.25, help="share of distinct programs")
    parser.add_argument("--loops", type=float, default=0.05, help="share of endless loops")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--evalplus-python", help="interpreter with evalplus 0.3.1; none: skip it")
    parser.add_argument("--whole", action="store_true", help="judge all 378 problems instead")
    options = parser.parse_args()
    task = MbppPlus()
    if options.whole:
        asked = whole(task, options.samples, options.distinct, 0.01)
        distinct = len({(p.id, text) for p, text in asked})
        verdicts, measured = ours(task, asked, options.workers)
        right = sum(both for _, both in verdicts)
        print(
            f"{len(asked)} samples of 378 problems, {distinct} distinct, {options.workers} workers"
            f": wall {measured['wall']:.0f} s  cpu {measured['cpu']:.0f} s  {right} right"
        )
        return
    speed, cpu = rewards(options.workers)
    print(
        f"rewards   512 of a step: {speed:.0f} programs/s on {options.workers} workers, "
        f"{1e3 * cpu:.2f} ms CPU each"
    )
    asked = samples(task, options.tasks, options.samples, options.distinct, options.loops)
    distinct = len({(p.id, text) for p, text in asked})
    print(f"{len(asked)} samples, {distinct} distinct, {options.workers} workers")
    with Judge(workers=1) as judge:
        mean, middle = overhead(task, asked, judge)
    print(
        f"overhead  {1e3 * mean:.2f} ms CPU a distinct program (median task {1e3 * middle:.2f} ms)"
    )
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
