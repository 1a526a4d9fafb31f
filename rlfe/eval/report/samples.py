"""A few samples for the drill-down: one right and one wrong reply where problems changed most.

A page of 34 checkpoints could hold a million replies; it holds what fits a budget of characters,
first the problems whose rate moved most between base and last step. All others stay in the run's
evals folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlfe.eval.report.gather import Group, Point, Run
from rlfe.eval.settings import BLOCK, sample_key
from rlfe.eval.store import Judged, Sample, Store

BUDGET = 700_000  # characters of all shown replies
LONGEST = 700  # characters of one
PROBLEMS = 30  # a checkpoint and task
ROW_FACTS = ("n", "limit", "mode", "judge")  # of a settings entry; the rest shaped the samples


def shown_samples(
    runs: Sequence[Run], groups: Sequence[Group], runs_dir: Path | None = None
) -> dict[str, list[dict[str, Any]]]:
    """`task|settings|problem` -> samples of base and last step, within the budget."""
    found: dict[str, list[dict[str, Any]]] = {}
    left = BUDGET
    done: set[tuple[str, str, int]] = set()
    for group in groups:
        if group.task.endswith("_base") or not group.facts:
            continue
        for run in runs:
            base, series = group.at(run.cell.model, 0), group.series(run.name)
            if not series:
                continue
            ends = [(series[-1], run.dir.path / "evals")]
            if base is not None:
                root = runs_dir or run.dir.path.parent
                ends.append((base, root / "_base" / run.cell.model / "evals"))
            wanted = _moved(group, base, series[-1])
            for point, evals in ends:
                if (group.settings, point.cell, point.step) in done:
                    continue
                done.add((group.settings, point.cell, point.step))
                left = _take(found, group, point, evals, wanted, left)
    return found


def _moved(group: Group, base: Point | None, last: Point) -> list[str]:
    """Problems whose rate moved most, then the first ones."""
    start_P = base.correct_P if base is not None else np.zeros_like(last.correct_P)
    order = np.argsort(-np.abs(last.correct_P - start_P), kind="stable")[:PROBLEMS]
    return [group.problems[index] for index in order]


def _take(
    found: dict[str, list[dict[str, Any]]],
    group: Group,
    point: Point,
    evals: Path,
    wanted: Sequence[str],
    left: int,
) -> int:
    """Add samples of one checkpoint; returns the characters that are left."""
    store = read_store(evals, group, point)
    for problem in wanted:
        for sample, verdict in _one_of_each(store, problem, group.n):
            text = sample.text[:LONGEST]
            if len(text) > left:
                return left
            left -= len(text)
            entry = {
                "cell": point.cell,
                "step": point.step,
                "status": verdict.status,
                "detail": verdict.detail,
                "text": printable(text),
            }
            for task in _tasks_of(group):
                found.setdefault(f"{task}|{group.settings}|{problem}", []).append(entry)
    return left


def _tasks_of(group: Group) -> tuple[str, ...]:
    """The task and, for plus tasks, the base row beside it: both show the same samples."""
    if group.task.endswith("_plus"):
        return group.task, group.task.removesuffix("_plus") + "_base"
    return (group.task,)


def read_store(evals: Path, group: Group, point: Point) -> Store:
    """The samples behind a point, texts included; empty where they are not at hand."""
    facts: Mapping[str, Any] = {k: v for k, v in group.facts.items() if k not in ROW_FACTS}
    folder = evals / group.task / sample_key(facts)
    files = sorted(folder.glob(f"step_{point.step:06d}.*jsonl.zst"))
    rule = str(group.facts.get("judge", ""))
    if not files:
        return Store(folder / "absent", rule)
    return Store.read(files[0], rule, texts=True, beside=files[1:])


def _one_of_each(store: Store, problem: str, n: int) -> list[tuple[Sample, Judged]]:
    """The first right and the first wrong sample of a problem."""
    pairs: dict[bool, tuple[Sample, Judged]] = {}
    for block in range(-(-n // BLOCK)):
        samples = store.blocks.get((problem, block), [])
        verdicts = store.verdicts.get((problem, block), [])
        if len(samples) == len(verdicts):
            for sample, verdict in zip(samples, verdicts, strict=True):
                pairs.setdefault(verdict.status == "passed", (sample, verdict))
    return list(pairs.values())


def printable(text: str) -> str:
    """The text without lone surrogates, which no file can hold."""
    return text.encode("utf-8", "replace").decode()
