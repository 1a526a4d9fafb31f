"""What `rlfe train` refuses before a model is loaded, for the real command and for its dry run.

The dry run does the same checks as far as they need no network and no library that is missing, and
says what it left out: a plan may be made on a laptop. Not here: settings that contradict each
other (`rlfe.recipe_checks`), and whether the run's folder is free (`rlfe.rundir`).
Try: `rlfe train --recipe tiny --dry-run`.
"""

from __future__ import annotations

from rlfe.engines import check_engines, make_tokenizer, missing
from rlfe.engines.base import Tokenizer
from rlfe.engines.devices import choose
from rlfe.engines.source import local_folder
from rlfe.engines.tokenizer import need_tokenizer
from rlfe.schema import Recipe
from rlfe.tasks import get, sources
from rlfe.tasks.base import Task
from rlfe.training.job import TrainingList, chosen_problems, training_list
from rlfe.training.replay import check_feasible
from rlfe.training.state import replay_settings
from rlfe.training.validation import validation_list


def checked(recipe: Recipe) -> tuple[Task, TrainingList]:
    """The task and the problems to train on, after every refusal that needs no model in memory.

    Raises:
        RequestError: A library, a task, a problem, a prompt's length or a buffer does not fit.
        NotFoundError: There is no such model or data.
    """
    check_engines(recipe)
    choose(recipe.engine)
    task = task_of(recipe)
    return task, _measured(recipe, task, make_tokenizer(recipe))


def checked_dry(recipe: Recipe) -> list[str]:
    """The refusals of `checked` without network; returns what could not be checked, in words.

    Raises:
        RequestError, NotFoundError: As `checked`, but for libraries that are not installed.
    """
    lacks = missing(recipe)
    found = [f"{name} is not installed: the real command needs it" for name in lacks]
    fake = recipe.engine.sampler == "fake"
    folder = None if fake else local_folder(recipe.model.path)
    if folder is not None:
        need_tokenizer(folder)
    task = task_of(recipe)
    source = recipe.data.source
    if source is not None and recipe.task.module is None and not sources.is_file(source):
        return [*found, f"prompts not measured: {source} is not looked up in a dry run"]
    if folder is None and not fake:
        _counted(recipe, task)
        return [*found, f"prompts not measured: {recipe.model.path} is no folder on this machine"]
    if "transformers" in lacks:
        _counted(recipe, task)
        return [*found, "prompts not measured: transformers is not installed"]
    _measured(recipe, task, make_tokenizer(recipe))
    return found


def task_of(recipe: Recipe) -> Task:
    """The task that the recipe trains on."""
    return get(
        recipe.task.name,
        recipe.task.module,
        mode=recipe.reward.mode,
        cpu_seconds=recipe.reward.timeout_seconds,
        fraction=recipe.reward.kind == "fraction",
        data=recipe.data,
        thinking=recipe.prompt.thinking,
    )


def _measured(recipe: Recipe, task: Task, tokenizer: Tokenizer) -> TrainingList:
    data = training_list(recipe, task, tokenizer)
    validation_list(recipe, task, tokenizer, data)  # refuses what does not fit
    check_feasible(replay_settings(recipe), problems=len(data.problems))
    return data


def _counted(recipe: Recipe, task: Task) -> None:
    """What holds whatever the prompts' lengths: the problems exist and can fill the buffer."""
    problems = chosen_problems(recipe, task)
    check_feasible(replay_settings(recipe), problems=len(problems))
