"""Validation while training: held-out problems, sampled with the current weights and judged.

What: which problems (disjoint from the training list by id), their samples from generators of
their own, and numbers for the step's record. It changes no training generator, no weight and no
buffer: with and without it a run has identical weights. It leaves the sampler at the current
weights; the loop loads the behaviour policy again at the next step. docs/algorithms.md 13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlfe.engines.base import Tokenizer
from rlfe.errors import RequestError, RlfeError
from rlfe.randomness import derive
from rlfe.schema import Recipe
from rlfe.tasks.base import Reply, Task
from rlfe.tasks.sources import is_file
from rlfe.training.clock import Clock
from rlfe.training.job import Job, TrainingList
from rlfe.training.judging import sampled_and_judged
from rlfe.training.lengths import fitting
from rlfe.training.rewards import as_array, flat_share, reward
from rlfe.types import Completion, Finish, Problem, Request, Sampling, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationList:
    """Held-out problems in the data's order; `problem_prompts` are texts and tokens."""

    data: TrainingList
    max_tokens: tuple[int, ...]  # per problem: what is left beside its prompt, 0 if nothing


def is_due(recipe: Recipe, finished_steps: int) -> bool:
    """Whether to validate after that many steps (0: before training)."""
    chosen = recipe.validate_
    if finished_steps == 0:
        return chosen.every > 0 and chosen.before_train
    return chosen.every > 0 and finished_steps % chosen.every == 0


def validation_list(
    recipe: Recipe, task: Task, tokenizer: Tokenizer, trained: TrainingList
) -> ValidationList | None:
    """The problems to validate on, measured before a model is loaded; None when it is off.

    The first `problems` x `batches` of the split that are not in the training list. A prompt that
    does not fit is refused under `data.fail_on_prompt_too_long`; else it stays, with fewer tokens
    or, without room for one, as a failure: the number of problems does not depend on it.

    Raises:
        RequestError: No problem is left, or a prompt does not fit.
    """
    chosen = recipe.validate_
    if chosen.every == 0:
        return None
    problems = _held_out(recipe, task, trained)[: chosen.problems * chosen.batches]
    if not problems:
        split = chosen.split or "test"
        raise RequestError(
            f'validate.split = "{split}" of task {task.name} has no problem that is not trained on',
            hint=_other_problems(recipe),
        )
    style = recipe.prompt.style or "base"
    prompts = tuple(task.prompt(p, style, recipe.prompt.examples) for p in problems)
    prompt_ids = tuple(tokenizer.encode(prompt) for prompt in prompts)
    if recipe.data.fail_on_prompt_too_long:
        fitting(
            {p.id: len(ids) for p, ids in zip(problems, prompt_ids, strict=True)},
            max_tokens=recipe.train.max_tokens,
            max_len=recipe.model.max_len,
        )
    room = [recipe.model.max_len - len(ids) for ids in prompt_ids]
    return ValidationList(
        data=TrainingList(problems=tuple(problems), prompts=prompts, prompt_ids=prompt_ids),
        max_tokens=tuple(max(0, min(recipe.train.max_tokens, left)) for left in room),
    )


def _other_problems(recipe: Recipe) -> str:
    """Where held-out problems may come from. A file is the same list under every split."""
    if recipe.data.source is not None and is_file(recipe.data.source):
        return "A file has no splits: train on part of it (data.size), or set validate.every = 0."
    return "Name another validate.split, or set validate.every = 0."


def validated(job: Job, held_out: ValidationList, *, finished_steps: int) -> dict[str, object]:
    """Sample and judge the held-out problems with the current weights; `validate/...` metrics.

    Raises:
        RlfeError: The sampler does not hold the learner's weights, or gave back too little.
    """
    snapshot = job.learner.snapshot(finished_steps)
    job.ranks.same(snapshot.fingerprint, "weights")
    received = job.sampler.load(snapshot)
    if received != snapshot.fingerprint:
        raise RlfeError(
            f"validation at step {finished_steps}: the sampler does not hold the current weights",
            hint="The engine kept old weights; --resume tries again.",
        )
    requests = list(_requests(job, held_out, finished_steps))[job.ranks.rank :: job.ranks.size]
    done, verdicts = sampled_and_judged(
        job,
        requests,
        lambda name, completions: _replies(held_out, int(name), completions),
        Clock(),  # all of it is the step's phase `validate`
        f"validation at step {finished_steps}",
    )
    for request in requests:
        if len(done.get(request.id, ())) != request.sampling.n:
            raise RlfeError(
                f"validation at step {finished_steps}: the sampler gave "
                f"{len(done.get(request.id, ()))} of {request.sampling.n} samples of problem "
                f"{held_out.data.problems[int(request.id)].id}"
            )
    parts = job.ranks.gather((done, verdicts))
    done = {name: found for part, _ in parts for name, found in part.items()}
    verdicts = {key: verdict for _, part in parts for key, verdict in part.items()}
    return _metrics(job, held_out, done, verdicts)


def due(job: Job, held_out: ValidationList | None, finished_steps: int) -> dict[str, object]:
    """`validated` if it is due after that many steps, else nothing.

    Before training the names are `validate_before/...`: they share the line of the first step.
    """
    if held_out is None or not is_due(job.recipe, finished_steps):
        return {}
    found = validated(job, held_out, finished_steps=finished_steps)
    if finished_steps > 0:
        return found
    return {name.replace("validate/", "validate_before/"): value for name, value in found.items()}


def _held_out(recipe: Recipe, task: Task, trained: TrainingList) -> list[Problem]:
    known = {problem.id for problem in trained.problems} | set(trained.left_out)
    found = task.problems(recipe.validate_.split or "test")
    return [problem for problem in found if problem.id not in known]


def _requests(job: Job, held_out: ValidationList, finished_steps: int) -> Sequence[Request]:
    chosen = job.recipe.validate_
    return [
        Request(
            id=str(index),
            prompt_ids=held_out.data.prompt_ids[index],
            sampling=Sampling(
                n=chosen.samples,
                temperature=chosen.temperature,
                max_tokens=limit,
                seed=derive(job.seed, "validate", finished_steps, problem.id),
                stop=held_out.data.prompts[index].stop,
                stop_token_ids=job.sampler.tokenizer.stop_token_ids,
                logprobs=False,
            ),
        )
        for index, (problem, limit) in enumerate(
            zip(held_out.data.problems, held_out.max_tokens, strict=True)
        )
        if limit > 0
    ]


def _replies(
    held_out: ValidationList, index: int, completions: Sequence[Completion]
) -> list[Reply]:
    return [
        Reply(
            key=f"{index}/{number}",
            problem=held_out.data.problems[index],
            prompt=held_out.data.prompts[index],
            text=completion.text,
            finish=completion.finish,
        )
        for number, completion in enumerate(completions)
    ]


def _metrics(
    job: Job,
    held_out: ValidationList,
    done: Mapping[str, Sequence[Completion]],
    verdicts: Mapping[str, Verdict],
) -> dict[str, object]:
    replies = [
        reply
        for index, completions in sorted(done.items(), key=lambda item: int(item[0]))
        for reply in _replies(held_out, int(index), completions)
    ]
    kind, threshold = job.recipe.reward.kind, job.recipe.reward.success_threshold
    judged = [reward(verdicts[reply.key], kind=kind) for reply in replies]
    without_room = sum(limit == 0 for limit in held_out.max_tokens)
    failures = [0.0] * (without_room * job.recipe.validate_.samples)
    reward_B = as_array([*judged, *failures])
    scored_B = reward_B[~np.isnan(reward_B)]
    size = job.recipe.validate_.samples
    right_PS = np.array(judged, np.float64).reshape(-1, size) >= threshold  # None: not right
    lengths = [len(c.token_ids) for completions in done.values() for c in completions]
    cut = [reply.finish is Finish.LENGTH for reply in replies]
    shortened = sum(0 < limit < job.recipe.train.max_tokens for limit in held_out.max_tokens)
    return {
        "validate/reward": float(scored_B.mean()) if scored_B.size else None,
        "validate/success": float(np.mean(scored_B >= threshold)) if scored_B.size else None,
        "validate/flat_share": _flat_share(job, right_PS),
        "validate/problems": len(held_out.data.problems),
        "validate/samples": int(reward_B.size),
        "validate/unscored": int(reward_B.size - scored_B.size),
        "validate/length_mean": float(np.mean(lengths)) if lengths else None,
        "validate/truncated": float(np.mean(cut)) if cut else None,
        "validate/shortened": shortened,
        "validate/without_room": without_room,
    }


def _flat_share(job: Job, right_PS: np.ndarray) -> float | None:
    """Expected share of training groups without signal; None where rates are too coarse.

    With one sample every rate is 0 or 1 and every group would look flat.
    """
    size = job.recipe.train.group_size
    if right_PS.size == 0 or right_PS.shape[1] < size:
        return None
    return flat_share(right_PS.mean(axis=1), group_size=size)
