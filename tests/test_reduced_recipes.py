"""Every shipped recipe trains in a reduced form: its algorithm, a tiny model, two steps, a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlfe.config import load, shipped
from rlfe.engines import make_engines, make_tokenizer
from rlfe.records import read_jsonl
from rlfe.rundir import RunDir
from rlfe.sweeps import cells
from rlfe.training.job import Job, training_list
from rlfe.training.loop import train
from rlfe.types import Problem
from tests.training_doubles import Letters

# What makes it small; everything else is the recipe's.
SMALL = {
    "model.dtype": "float32",
    "model.max_len": 256,
    "engine.sampler": "transformers",
    "engine.learner": "transformers",
    "engine.device": "cpu",
    "engine.threads": 1,
    "data.source": None,
    "data.ids": [],
    "train.steps": 2,
    "train.prompts_per_step": 4,
    "train.max_tokens": 8,
    "train.micro_batch_rollouts": None,
    "replay.rollouts": 4,
    "replay.min_eligible": 1,
    "validate.problems": 2,
    "save.every": 1,
    "track.loggers": ["console"],
}


class HeldOut(Letters):
    """Training and test problems with different ids, in whatever split a recipe names."""

    def problems(self, split: str) -> Any:
        return tuple(
            Problem(id=f"{split}/{i}", task=self.name, split=split, prompt="ab" * (i + 1))
            for i in range(5)
        )


def arms() -> list[tuple[str, tuple[str, ...]]]:
    """Each recipe, and of a sweep one cell per algorithm (not per rate, base model or seed)."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for name in shipped():
        for cell in cells([name]):
            recipe = cell.recipe
            kind = f"{recipe.replay.strategy} {recipe.advantage.name} {recipe.lag.steps}"
            found.setdefault((name, kind), cell.overrides)
    return [(name, overrides) for (name, _), overrides in found.items()]


@pytest.mark.parametrize(("name", "overrides"), arms(), ids=lambda value: str(value)[:60])
def test_the_reduced_recipe_trains(
    tiny_model: Path, tmp_path: Path, one_thread: None, name: str, overrides: tuple[str, ...]
) -> None:
    flags = {**SMALL, "model.path": str(tiny_model)}
    given = {key: value for key, value in flags.items() if value is not None}
    none = [f"{key}=none" for key, value in flags.items() if value is None]
    resolved = load([name], [*overrides, *none], {}, given)
    recipe, task = resolved.recipe, HeldOut()
    run = RunDir(tmp_path / "run")
    run.create(recipe, resolved.origins)
    data = training_list(recipe, task, make_tokenizer(recipe))
    sampler, learner = make_engines(recipe)
    job = Job(recipe=recipe, run=run, task=task, data=data, sampler=sampler, learner=learner)
    assert train(job).status == "done"
    lines = read_jsonl(run.metrics)
    assert [line["optim/skipped"] for line in lines] == [0, 0]
    assert [line["lag"] for line in lines] == [0, min(1, recipe.lag.steps)]
    assert run.steps() == [1, 2]
