"""Sampling and judging the groups of one step, and writing them down.

What: one request per slot with its own derived seed, N completions each, verdicts, rewards. A
group is formed by its slot, never by prompt text. Not here: what is done with the rewards.
docs/algorithms.md 0.1, 0.2, 11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlfe.errors import RlfeError
from rlfe.randomness import derive, problems_of_step
from rlfe.records import write_jsonl_zst
from rlfe.tasks.base import Reply
from rlfe.training.clock import Clock
from rlfe.training.job import Job
from rlfe.training.rewards import reward
from rlfe.types import Completion, Group, Request, Rollout, Sampling, Verdict

LOGPROB_DIGITS = 6  # of the stored text; training uses the full numbers


def slots_of_step(job: Job, step: int) -> np.ndarray:
    """Index into the training list for each slot of step `step` (0-based)."""
    return problems_of_step(
        run_seed=job.seed,
        step=step,
        prompts_per_step=job.recipe.train.prompts_per_step,
        count=len(job.data.problems),
        order=job.recipe.data.order,
    )


def sampled_groups(job: Job, step: int, clock: Clock) -> list[Group]:
    """The judged groups of a step, in slot order; each has exactly `group_size` rollouts.

    Raises:
        RlfeError: The sampler or the judge gave back less than was asked for.
    """
    indices = slots_of_step(job, step)
    with clock.phase("sample"):
        requests = [_request(job, step, slot, int(i)) for slot, i in enumerate(indices)]
        done: dict[str, list[Completion]] = {}
        for name, completions in job.sampler.generate(requests):
            done[name] = completions
            job.watch.within(f"step {step + 1}: sampled {len(done)}/{len(requests)} groups")
    for request in requests:
        count = len(done.get(request.id, ()))
        if count != request.sampling.n:
            raise RlfeError(
                f"the sampler gave {count} of {request.sampling.n} completions for slot "
                f"{request.id} of step {step + 1}",
                hint="The step is not trained on; --resume tries it again.",
            )
    with clock.phase("score"):
        verdicts = _verdicts(job, step, indices, done)
    return [_group(job, step, slot, int(i), done, verdicts) for slot, i in enumerate(indices)]


def _request(job: Job, step: int, slot: int, index: int) -> Request:
    train = job.recipe.train
    sampling = Sampling(
        n=train.group_size,
        temperature=train.temperature,
        max_tokens=train.max_tokens,
        seed=derive(job.seed, "sample", step, slot),
        stop=job.data.prompts[index].stop,
        stop_token_ids=job.sampler.tokenizer.stop_token_ids,
    )
    return Request(id=str(slot), prompt_ids=job.data.prompt_ids[index], sampling=sampling)


def _verdicts(
    job: Job, step: int, indices: np.ndarray, done: Mapping[str, Sequence[Completion]]
) -> dict[str, Verdict]:
    replies = [
        Reply(
            key=f"{slot}/{number}",
            problem=job.data.problems[index],
            prompt=job.data.prompts[index],
            text=completion.text,
            finish=completion.finish,
        )
        for slot, index in enumerate(indices.tolist())
        for number, completion in enumerate(done[str(slot)])
    ]
    verdicts = dict(job.task.judge(replies, job.judge))
    missing = [reply.key for reply in replies if reply.key not in verdicts]
    if missing:
        raise RlfeError(
            f"the judge of task {job.task.name} gave no verdict on {len(missing)} of "
            f"{len(replies)} replies of step {step + 1} (first: {missing[0]})",
            hint="A task's judge has to yield one verdict per reply.",
        )
    return verdicts


def _group(
    job: Job,
    step: int,
    slot: int,
    index: int,
    done: Mapping[str, Sequence[Completion]],
    verdicts: Mapping[str, Verdict],
) -> Group:
    problem_id = job.data.problems[index].id
    rollouts = [
        Rollout(
            problem_id=problem_id,
            index=number,
            prompt_ids=job.data.prompt_ids[index],
            completion=completion,
            verdict=verdicts[f"{slot}/{number}"],
            reward=reward(verdicts[f"{slot}/{number}"], kind=job.recipe.reward.kind),
        )
        for number, completion in enumerate(done[str(slot)])
    ]
    return Group(problem_id=problem_id, step=step, slot=slot, rollouts=tuple(rollouts))


def write_rollouts(
    job: Job, step: int, groups: Sequence[Group], advantages: Mapping[int, np.ndarray]
) -> None:
    """rollouts/step_NNNNNN.jsonl.zst: every sampled rollout; `advantages` by kept slot."""
    write_jsonl_zst(
        job.run.rollouts(step + 1),
        (
            _record(group, rollout, step, advantages.get(group.slot))
            for group in groups
            for rollout in group.rollouts
        ),
    )


def _record(
    group: Group, rollout: Rollout, step: int, advantage_G: np.ndarray | None
) -> dict[str, Any]:
    done, verdict = rollout.completion, rollout.verdict
    return {
        "step": step + 1,
        "slot": group.slot,
        "index": rollout.index,
        "problem_id": rollout.problem_id,
        "prompt_tokens": len(rollout.prompt_ids),
        "token_ids": done.token_ids,
        "logprobs": [round(value, LOGPROB_DIGITS) for value in done.logprobs],
        "text": done.text,
        "finish": done.finish,
        "reward": rollout.reward,
        "status": verdict.status,
        "detail": verdict.detail,
        "kept": advantage_G is not None,
        "advantage": None if advantage_G is None else float(advantage_G[rollout.index]),
        "version": step,
        "behavior_version": done.policy_step,
    }
