"""What a run carries from step to step, and its resumable form in `state/`.

What: buffer, snapshots, counters, fingerprints; saved beside and renamed, loaded whole or not at
all. Not here: random numbers, which derive from the step, and kept checkpoints (`saving.py`).
`state/` is local: never pushed, never loaded from another user's folder. docs/algorithms.md 14.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlfe.config import dump, flat
from rlfe.engines.base import Copying, Later
from rlfe.errors import RequestError, RlfeError
from rlfe.records import canonical_json, cut_after, plain
from rlfe.rundir import FREE_KEYS, provenance, write_text
from rlfe.schema import Recipe
from rlfe.training.folders import new_folder_of_all
from rlfe.training.job import Job
from rlfe.training.replay import ReplayBuffer, ReplaySettings
from rlfe.training.staleness import SnapshotQueue
from rlfe.training.stops import StopCounters, StopRules

SCHEMA = "rlfe.state/1"
FACTS, BUFFER, LEARNER, SNAPSHOTS = "state.json", "replay.npz", "learner", "snapshots"
FRESH_START = "Start the run again with --overwrite."


@dataclass(slots=True, kw_only=True)
class Progress:
    """Everything that changes from step to step; `step` is the number of finished steps.

    fingerprint, updated: of the last version, and whether the last step changed the weights.
    """

    step: int
    buffer: ReplayBuffer | None
    queue: SnapshotQueue
    stops: StopCounters
    fingerprint: str | None = None
    updated: bool = False


def fresh(job: Job) -> Progress:
    """Before the first step."""
    recipe = job.recipe
    settings = replay_settings(recipe)
    rules = StopRules(
        reward_below=recipe.stop.reward_below,
        window=recipe.stop.window,
        empty_stop_steps=recipe.filter.empty_stop_steps,
        max_nonfinite=recipe.train.max_nonfinite,
    )
    return Progress(
        step=0,
        buffer=ReplayBuffer(settings) if settings.active else None,
        queue=SnapshotQueue(lag=recipe.lag.steps),
        stops=StopCounters(rules),
    )


def replay_settings(recipe: Recipe) -> ReplaySettings:
    """The recipe's `[replay]` with the success threshold."""
    numbers = {name: getattr(recipe.replay, name) for name in type(recipe.replay).model_fields}
    return ReplaySettings(success_threshold=recipe.reward.success_threshold, **numbers)


def save(job: Job, progress: Progress) -> None:
    """Replace `state/` as a whole; the earlier one stays until the new one is complete."""
    write = _captured(job, progress, job.learner.save_state)
    with new_folder_of_all(job.ranks, job.run.state) as folder:
        write(folder)


def save_later(job: Job, progress: Progress, learner: Copying) -> Later:
    """What `save` would write now, from copies: later steps change nothing of it."""
    return _captured(job, progress, learner.save_state_later())


def _captured(job: Job, progress: Progress, save_learner: Later) -> Later:
    """Writes a state; of `progress` nothing is read later, and snapshots never change."""
    older = [s for s in progress.queue.held() if s.version < progress.step]
    needed = [s for s in older if s.version >= progress.step - job.recipe.lag.steps]
    entries, arrays = (None, {}) if progress.buffer is None else progress.buffer.state_dict()
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "step": progress.step,
        "config": plain(flat(job.recipe)),
        "config_sha256": hashlib.sha256(dump(job.recipe).encode()).hexdigest(),
        "data_sha256": job.data.sha256(),
        "task": _task_facts(job),
        "packages": provenance()["packages"],
        "fingerprint": progress.fingerprint,
        "updated": progress.updated,
        "stops": progress.stops.state(),
        "snapshots": {str(s.version): s.fingerprint for s in needed},
        "replay": entries,
    }

    def write(folder: Path) -> None:
        if job.ranks.first:
            (folder / LEARNER).mkdir()
            (folder / SNAPSHOTS).mkdir()
        job.ranks.meet()
        save_learner(folder / LEARNER)
        job.ranks.meet()
        for snapshot in needed:
            job.learner.save_snapshot(snapshot, folder / SNAPSHOTS / str(snapshot.version))
        if job.ranks.first:
            if entries is not None:
                np.savez(folder / BUFFER, allow_pickle=False, **arrays)
            text = canonical_json({**facts, "files": _sizes(folder)})
            write_text(folder / FACTS, text + "\n")

    return write


def resumed(job: Job) -> Progress:
    """The saved progress, with the records of later steps removed; fresh if none was saved yet.

    Raises:
        RlfeError: A part of the state is missing or damaged.
        RequestError: It belongs to other settings or other data.
    """
    progress = fresh(job)
    if job.run.state.is_dir():
        _load(job, progress)
    else:
        _refuse_lost_state(job)
    if job.ranks.first:
        _cut(job, progress.step)
    return progress


def _cut(job: Job, step: int) -> None:
    """Drop the records of steps after `step`."""
    cut_after(job.run.metrics, step)
    for file in (job.run.path / "rollouts").glob("step_*.jsonl.zst"):
        if file > job.run.rollouts(step):
            file.unlink()


def first_state_step(recipe: Recipe) -> int:
    """The first step after which a state is saved."""
    return min(recipe.save.state_every or recipe.save.every, recipe.train.steps)


def _refuse_lost_state(job: Job) -> None:
    """A run that had a state and has none now is not started afresh in silence."""
    last = max([0, *job.run.steps()])
    if last > first_state_step(job.recipe):
        raise RlfeError(
            f"{job.run.path} has checkpoints up to step {last} but no state/: it cannot go on "
            "as the same run",
            hint=FRESH_START,
        )


def _load(job: Job, progress: Progress) -> None:
    folder = job.run.state
    facts = _facts(folder)
    _check_files(folder, facts["files"])
    _check_same(job, facts)
    progress.step = facts["step"]
    progress.fingerprint, progress.updated = facts["fingerprint"], facts["updated"]
    progress.stops.load(facts["stops"])
    job.learner.load_state(folder / LEARNER)
    for version in sorted(facts["snapshots"], key=int):
        progress.queue.push(job.learner.load_snapshot(folder / SNAPSHOTS / version))
    if progress.buffer is not None:
        with np.load(folder / BUFFER, allow_pickle=False) as arrays:
            progress.buffer.load_state(facts["replay"], arrays)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_bytes())
    except FileNotFoundError:
        raise RlfeError(f"{folder} lacks {FACTS}: it is no whole state", hint=FRESH_START) from None
    except ValueError:
        raise RlfeError(f"{folder / FACTS} is damaged", hint=FRESH_START) from None
    if facts.get("schema") != SCHEMA:
        raise RlfeError(
            f"{folder} has schema {facts.get('schema')}, this version reads {SCHEMA}",
            hint="Resume with the version of rlfe that wrote it (see provenance.json).",
        )
    return facts


def _check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    found = _sizes(folder)
    missing = [name for name in sizes if name not in found]
    if missing:
        raise RlfeError(
            f"{folder} lacks {', '.join(missing)}: it is no whole state", hint=FRESH_START
        )
    changed = [name for name, size in sizes.items() if found[name] != size]
    if changed:
        raise RlfeError(f"{folder / changed[0]} has another size than was saved", hint=FRESH_START)


def _check_same(job: Job, facts: Mapping[str, Any]) -> None:
    then, now = facts["config"], plain(flat(job.recipe))
    differ = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    differ = [key for key in differ if not key.startswith(FREE_KEYS)]
    if differ:
        lines = [f"  {key}: {then.get(key)!r} then, {now.get(key)!r} now" for key in differ]
        raise RequestError(
            f"{job.run.state} was saved under other settings:\n" + "\n".join(lines),
            hint="Resume with the settings of the run's config.toml.",
        )
    if facts["data_sha256"] != job.data.sha256():
        raise RequestError(
            f"{job.run.path} was trained on another list of problems or prompts",
            hint="Resume with the same data and tokenizer, or start a new run with --name.",
        )
    _check_same_task(job, facts.get("task", {}))
    changed = [
        f"{name} {version} then, {now_version} now"
        for name, now_version in provenance()["packages"].items()
        if (version := facts["packages"].get(name)) not in (None, now_version)
    ]
    if changed:
        job.warn(f"other package versions than the run began with: {'; '.join(changed)}")


def _task_facts(job: Job) -> dict[str, str]:
    """What decides on a reply: the judging rule, and the data that the tests come from."""
    return {"version": job.task.version, "data_sha256": job.task.data_sha256()}


def _check_same_task(job: Job, then: Mapping[str, str]) -> None:
    """Tests and judging rule do not show in prompts, so they are compared on their own."""
    words = {"version": "judging rule", "data_sha256": "problems or tests"}
    lines = [
        f"  {words[key]} ({key}): {then.get(key)} then, {now} now"
        for key, now in _task_facts(job).items()
        if then.get(key) != now
    ]
    if lines:
        raise RequestError(
            f"{job.run.path}: task {job.task.name} is not the one it was trained on:\n"
            + "\n".join(lines),
            hint="Put the task's file or data back, or start a new run with --name.",
        )


def _sizes(folder: Path) -> dict[str, int]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != FACTS]
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
