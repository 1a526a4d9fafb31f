"""The run's own account in provenance.json: what runs, on what, how it went on, how it ended.

What: names and facts from the objects and functions that run, not from the recipe's title; the
machine; one entry for each resume. Not here: versions and the first command (`rlfe.rundir`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlfe import recipe_checks
from rlfe.records import plain
from rlfe.rundir import provenance, write_text
from rlfe.training import advantages, filters
from rlfe.training.job import Job
from rlfe.training.objective import describe, loss_settings
from rlfe.training.state import replay_settings
from rlfe.training.stops import Stop

CPU_FACTS = Path("/proc/cpuinfo")


def record_start(job: Job, step: int) -> None:
    """Write what runs; a run that goes on after `step` steps gets an entry in `resumed`."""
    for text in data_notes(job):
        job.warn(text)
    if not job.ranks.first:
        return
    before = _read(job)
    added: dict[str, Any] = {
        "training": {**_engines(job), **_data(job), **_algorithm(job)},
        "notes": [*recipe_checks.notes(job.recipe, job.ranks.size), *data_notes(job)],
    }
    if job.resume:
        now = provenance()
        entry = {name: now[name] for name in ("command", "git_commit", "packages")}
        again = {"step": step, **entry, "hardware": hardware()}
        added["resumed"] = [*before.get("resumed", []), again]
    added["hardware"] = before.get("hardware") or hardware()
    _write(job, before, added)


def record_end(job: Job, stop: Stop | None, reason: str | None) -> None:
    """Write why the run ended early (and by which rule), or that it did not."""
    if not job.ranks.first:
        return
    _write(job, _read(job), {"ended": reason, "ended_by": stop.status if stop else None})


def hardware() -> dict[str, Any]:
    """GPUs that this process sees, CPU and CUDA version; no GPU and None without CUDA."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_available()
    count = torch.cuda.device_count() if torch is not None and cuda else 0
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)] if torch else [],
        "gpu_count": count,
        "cuda": torch.version.cuda if torch is not None and cuda else None,
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
    }


def cpu_model() -> str:
    """As the kernel says it; the architecture where it does not."""
    if CPU_FACTS.is_file():
        for line in CPU_FACTS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def data_notes(job: Job) -> tuple[str, ...]:
    """What the task's source lacks, as the task says it."""
    return tuple(getattr(job.task, "notes", ()))


def _engines(job: Job) -> dict[str, Any]:
    return {
        "sampler": job.sampler.name,
        "learner": job.learner.name,
        "ranks": job.ranks.size,
        "exact": job.sampler.exact and job.learner.exact,
        "sampling_seeds": "one per request: run seed, step, slot",
        "stop_token_ids": job.sampler.tokenizer.stop_token_ids,
    }


def _data(job: Job) -> dict[str, Any]:
    return {
        "prompt_formats": sorted({prompt.format for prompt in job.data.prompts}),
        "problems": len(job.data.problems),
        "prompts_too_long": job.data.left_out,
        "task_version": job.task.version,
        "data_notes": data_notes(job),
    }


def _algorithm(job: Job) -> dict[str, Any]:
    """What the loss, the filter and the buffer were built with."""
    replay = replay_settings(job.recipe)
    loss = loss_settings(job.recipe, replay_weight=replay.weight if replay.active else 0.0)
    return {
        "advantage": advantages.used(job.recipe.advantage.name),
        "objective": describe(loss),
        "aggregation": loss.aggregation,
        "filter": job.recipe.filter.strategy,
        "filter_score": filters.score_name(job.recipe.filter.metric),
        "replay": replay.strategy if replay.active else "none",
    }


def _read(job: Job) -> dict[str, Any]:
    path = job.run.provenance
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return found


def _write(job: Job, before: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    after = {**before, **plain(facts)}
    if after != before:
        write_text(job.run.provenance, json.dumps(after, indent=2, sort_keys=True) + "\n")
