"""What one process or several ranks compute from the same calls, for `test_sharded.py`.

`python -m tests.sharded_ranks MODEL FOLDER NAME...` runs the named programs and writes what each
saw to FOLDER/NAME_RANKS.pt; under torchrun as a rank. No test itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlfe.engines.learner import TransformersLearner
from rlfe.engines.ranks import Ranks, TorchRanks, end_now, member
from rlfe.engines.weights import Lora
from rlfe.training.batching import joined, select
from rlfe.training.losses import LossSettings
from rlfe.training.objective import StepLoss
from rlfe.types import Batch

STEPS = 3
COMPILE = torch.compile
LORA = Lora(rank=4, alpha=8, targets="all-linear", seed=1)


def rows(lengths: list[int], *, seed: int, source: int = 0) -> Batch:
    """Rows with prompts of 3 to 9 tokens and completions of these lengths (0: nothing masked)."""
    rng = np.random.default_rng(seed)
    count, width = len(lengths), 9 + max(lengths)
    start_B = rng.integers(3, 10, count)
    place_L = np.arange(width)[None]
    end_B = start_B + np.array(lengths)
    return Batch(
        ids_BL=rng.integers(7, 100, (count, width)),
        mask_BL=(place_L >= start_B[:, None]) & (place_L < end_B[:, None]),
        behavior_logp_BL=(-rng.exponential(3.0, (count, width))).astype(np.float32),
        advantage_B=np.where(rng.random(count) < 0.25, 0.0, rng.normal(0, 1, count)),
        weight_B=np.ones(count),
        successes_B=np.full(count, -1 if source else 1),
        group_B=np.full(count, -1) if source else np.arange(count) // 4,
        source_B=np.full(count, source, np.int8),
    )


def with_reference(learner: Any, batch: Batch) -> Batch:
    return replace(batch, reference_logp_BL=learner.logprobs(batch, "reference"))


def settings(**changes: Any) -> LossSettings:
    return LossSettings(max_tokens=40, **changes)


def learner_of(model: Path, ranks: Ranks, **changes: Any) -> Any:
    values = {"dtype": "float32", "device": "cpu", "threads": 1, "eps": 1e-5, "tokens": 96}
    if isinstance(ranks, TorchRanks):
        from rlfe.engines.sharded import ShardedLearner

        return ShardedLearner(model, ranks=ranks, **(values | changes))
    learner = TransformersLearner(model, **(values | changes))
    learner._packs = False
    return learner


def trained(learner: Any, batch: Batch, loss: LossSettings) -> dict[str, Any]:
    """Some steps on one batch: what every pass and step answered, and the weights after them."""
    seen: dict[str, Any] = {"sums": [], "norms": [], "logp": [], "entropy": []}
    for _ in range(STEPS):
        found = learner.forward_backward(batch, StepLoss(loss, batch))
        seen["sums"].append(dict(found.sums))
        seen["logp"].append(torch.from_numpy(found.logp_BL))
        seen["entropy"].append(torch.from_numpy(found.entropy_BL))
        seen["norms"].append(learner.optim_step(0.01))
    snapshot = learner.snapshot(STEPS)
    seen["weights"], seen["fingerprint"] = snapshot.weights, snapshot.fingerprint
    return seen


def uneven(model: Path, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Odd number of rows of very different lengths, some flat, one without a token."""
    batch = rows([1, 30, 4, 17, 0, 9, 23], seed=1)
    return trained(learner_of(model, ranks), batch, settings())


def replayed(model: Path, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Replay rows beside the fresh ones, KL to the base model, an entropy term."""
    batch = joined(rows([5, 12, 8], seed=2), rows([20, 2], seed=3, source=1), pad_id=0)
    loss = settings(kl_beta=0.1, entropy_coef=0.01, replay_weight=0.3)
    learner = learner_of(model, ranks)
    batch = with_reference(learner, batch)
    seen = trained(learner, batch, loss)
    old = learner.snapshot(7)
    learner.forward_backward(batch, StepLoss(loss, batch))
    learner.optim_step(0.01)
    seen["of a snapshot"] = torch.from_numpy(learner.logprobs(batch, old))
    seen["of the base"] = torch.from_numpy(learner.logprobs(batch, "reference"))
    seen["entropies"] = torch.from_numpy(learner.entropies(batch))
    part = select(batch, np.array([3, 4]))
    seen["norms"].append(learner.gradient_norm(part, StepLoss(loss, part)))
    return seen


def compiled(model: Path, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Layers and logits through torch.compile, layers computed again for the gradient."""
    batch = rows([1, 30, 4, 17, 0, 9, 23], seed=1)
    torch.compile = partial(COMPILE, backend="aot_eager")
    try:
        learner = learner_of(model, ranks, compiles=True, checkpointing=True)
        return trained(learner, batch, settings())
    finally:
        torch.compile = COMPILE


def few(model: Path, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Fewer rows than ranks, and no gradient at all in the second half."""
    learner = learner_of(model, ranks)
    seen = trained(learner, rows([6], seed=5), settings())
    flat = replace(rows([6, 3], seed=6), advantage_B=np.zeros(2))
    found = learner.forward_backward(flat, StepLoss(settings(), flat))
    seen["logp"].append(torch.from_numpy(found.logp_BL))
    seen["norms"].append(learner.optim_step(0.01))
    return seen


def lora(model: Path, ranks: Ranks, folder: Path) -> dict[str, Any]:
    learner = learner_of(model, ranks, lora=LORA)
    batch = with_reference(learner, rows([1, 30, 4, 17, 9], seed=8))
    seen = trained(learner, batch, settings(kl_beta=0.1))
    seen["merge"] = exported(learner, ranks, folder / f"lora_{ranks.size}", batch)
    return seen


def whole(model: Path, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A kept checkpoint and a state, and a fresh learner that goes on from the state."""
    batch = rows([1, 30, 4, 17, 9], seed=8)
    learner = learner_of(model, ranks)
    seen = trained(learner, batch, settings())
    exported(learner, ranks, folder / f"whole_{ranks.size}", batch)
    saved(learner, ranks, folder / f"state_{ranks.size}")
    again = learner_of(model, ranks)
    again.load_state(folder / f"state_{ranks.size}")
    seen["loaded"] = again.snapshot(STEPS).fingerprint
    seen["after"] = [trained(each, batch, settings()) for each in (learner, again)]
    return seen


def crossed(model: Path, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Goes on from the state that the other number of ranks wrote."""
    learner = learner_of(model, ranks)
    learner.load_state(folder / f"state_{3 - ranks.size}")
    loaded = learner.snapshot(STEPS).fingerprint
    batch = rows([1, 30, 4, 17, 9], seed=8)
    return {"loaded": loaded, **trained(learner, batch, settings())}


def exported(learner: Any, ranks: Ranks, folder: Path, batch: Batch) -> float | None:
    if ranks.first:
        folder.mkdir()
    ranks.meet()
    facts = learner.export(folder, batch)
    ranks.meet()
    found: float | None = facts.get("save/merge_delta")
    return found


def saved(learner: Any, ranks: Ranks, folder: Path) -> None:
    if ranks.first:
        folder.mkdir()
    ranks.meet()
    learner.save_state(folder)
    ranks.meet()


PROGRAMS: dict[str, Callable[[Path, Ranks, Path], dict[str, Any]]] = {
    "uneven": uneven,
    "compiled": compiled,
    "replayed": replayed,
    "few": few,
    "lora": lora,
    "whole": whole,
    "crossed": crossed,
}


def main(model: str, folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    ranks = member(os.environ) or Ranks()
    if isinstance(ranks, TorchRanks):
        ranks.join("cpu", minutes=5, expired=lambda problem: end_now(1))
    for name in names:
        seen = PROGRAMS[name](Path(model), ranks, Path(folder))
        ranks.same(seen.get("fingerprint"), "weights")
        if ranks.first:
            torch.save(seen, Path(folder) / f"{name}_{ranks.size}.pt")
    if isinstance(ranks, TorchRanks):
        ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
