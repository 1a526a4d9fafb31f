"""Sampling and judging the groups of one step, and writing them down.

What: one request per slot with its own derived seed, N completions each, judged while later ones
are sampled (`judging.py`), rewards. A group is formed by its slot, never by prompt text. Not here:
what is done with the rewards. docs/algorithms.md 0.1, 0.2, 11.
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
from rlfe.training.judging import sampled_and_judged
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

    Every rank samples and judges its share of the slots, and gets all of them.

    Raises:
        RlfeError: The sampler or the judge gave back less than was asked for.
    """
    ranks, count = job.ranks, job.recipe.train.prompts_per_step
    mine = groups_of_slots(job, step, range(ranks.rank, count, ranks.size), clock)
    if ranks.size == 1:
        return mine
    job.within(f"step {step + 1}: gathering the rollouts")
    with clock.phase("gather"):
        groups = [group for part in ranks.gather(mine) for group in part]
    return sorted(groups, key=lambda group: group.slot)


def groups_of_slots(job: Job, step: int, slots: Sequence[int], clock: Clock) -> list[Group]:
    """The same for some slots of the step, in the order given."""
    indices = slots_of_step(job, step)
    problem = {str(slot): int(indices[slot]) for slot in slots}
    requests = [_request(job, step, slot, problem[str(slot)]) for slot in slots]
    done, verdicts = sampled_and_judged(
        job,
        requests,
        lambda name, completions: _replies(job, name, problem[name], completions),
        clock,
        f"step {step + 1}",
    )
    _check_all_sampled(step, requests, done)
    _check_all_judged(job, step, done, verdicts)
    return [_group(job, step, slot, problem[str(slot)], done, verdicts) for slot in slots]


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


def _replies(job: Job, slot: str, index: int, completions: Sequence[Completion]) -> list[Reply]:
    return [
        Reply(
            key=f"{slot}/{number}",
            problem=job.data.problems[index],
            prompt=job.data.prompts[index],
            text=completion.text,
            finish=completion.finish,
        )
        for number, completion in enumerate(completions)
    ]


def _check_all_sampled(
    step: int, requests: Sequence[Request], done: Mapping[str, Sequence[Completion]]
) -> None:
    for request in requests:
        count = len(done.get(request.id, ()))
        if count != request.sampling.n:
            raise RlfeError(
                f"the sampler gave {count} of {request.sampling.n} completions for slot "
                f"{request.id} of step {step + 1}",
                hint="The step is not trained on; --resume tries it again.",
            )


def _check_all_judged(
    job: Job,
    step: int,
    done: Mapping[str, Sequence[Completion]],
    verdicts: Mapping[str, Verdict],
) -> None:
    keys = [f"{slot}/{number}" for slot in done for number in range(len(done[slot]))]
    missing = sorted(key for key in keys if key not in verdicts)
    if missing:
        raise RlfeError(
            f"the judge of task {job.task.name} gave no verdict on {len(missing)} of "
            f"{len(keys)} replies of step {step + 1} (first: {missing[0]})",
            hint="A task's judge has to yield one verdict per reply.",
        )


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
    if not job.ranks.first:
        return
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
        "logprobs": np.round(np.array(done.logprobs, np.float64), LOGPROB_DIGITS),
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
