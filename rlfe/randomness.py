"""Every random number of a run derives from (seed, label, step, ...), never from global state.

So two arms with one seed see the same problems, a resumed step draws what the unbroken one drew,
and a library that resets the global generator changes nothing (docs/algorithms.md 0.2). Labels
never name the arm, the learning rate, the lag or the advantage.

Try it: `derive(0, "data", 0) == 13182660425791531`.
"""

from __future__ import annotations

import hashlib

import numpy as np

SCHEME = "rlfe1"  # part of every derived seed; a new scheme gets a new name
SEPARATOR = "\x1f"


def derive(run_seed: int, label: str, *parts: int | str) -> int:
    """A 62-bit seed from the run seed, a label and what follows.

    SHA-256 of the parts joined by U+001F (integers in decimal), first 8 bytes big-endian, shifted
    right by 2 bits so that the value fits signed 64-bit seeds of every engine.
    """
    text = SEPARATOR.join([SCHEME, str(int(run_seed)), label, *(_text(part) for part in parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def generator(run_seed: int, label: str, *parts: int | str) -> np.random.Generator:
    """A PCG64 generator seeded by `derive` of the same arguments."""
    return np.random.Generator(np.random.PCG64(derive(run_seed, label, *parts)))


def problems_of_step(
    *, run_seed: int, step: int, prompts_per_step: int, count: int, order: str = "epochs"
) -> np.ndarray:
    """Indices into the training list for each slot of a step, int64 of shape [prompts_per_step].

    `epochs`: the endless row of epoch permutations, `prompts_per_step` at a time; an epoch's last
    problems and the next epoch's first share a step. `with_replacement`: each slot for itself
    (imitates the public code of study 1). `step` is 0-based.
    """
    assert count >= 1, f"count has to be at least 1, got {count}"
    assert step >= 0, f"step has to be at least 0, got {step}"
    assert prompts_per_step >= 1, f"prompts_per_step has to be at least 1, got {prompts_per_step}"
    if order == "with_replacement":
        slots = range(prompts_per_step)
        return np.array([_any_problem(run_seed, step, slot, count) for slot in slots], np.int64)
    if order != "epochs":
        raise ValueError(f'unknown data order "{order}"; known: epochs, with_replacement')
    first, last = step * prompts_per_step, (step + 1) * prompts_per_step
    epochs = range(first // count, (last - 1) // count + 1)
    row = np.concatenate([_permutation(run_seed, epoch, count) for epoch in epochs])
    offset = first - epochs[0] * count
    return row[offset : offset + prompts_per_step]


def epoch_of_step(*, step: int, prompts_per_step: int, count: int) -> float:
    """Epochs seen when step (0-based) has ended: 5 steps of 64 on 320 problems -> 1.0."""
    return (step + 1) * prompts_per_step / count


def _permutation(run_seed: int, epoch: int, count: int) -> np.ndarray:
    return generator(run_seed, "data", epoch).permutation(count).astype(np.int64)


def _any_problem(run_seed: int, step: int, slot: int, count: int) -> int:
    return int(generator(run_seed, "data", step, slot).integers(count))


def _text(part: int | str) -> str:
    return part if isinstance(part, str) else str(int(part))
