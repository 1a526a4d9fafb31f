"""Two gloo ranks give the gradient of one process: both count the whole batch, gradients add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlfe.training.batching import select
from rlfe.training.losses import (
    AGGREGATIONS,
    Denominators,
    LossSettings,
    denominators,
    micro_batch,
    micro_batch_loss,
)
from rlfe.types import Batch

VOCABULARY, WIDTH, ROWS, RANKS = 7, 6, 9, 2


def ragged_batch() -> Batch:
    """Nine rows of different lengths, three of them replay, one without a masked token."""
    rng = np.random.default_rng(0)
    length_B = np.array([6, 1, 3, 0, 5, 2, 6, 4, 1])
    return Batch(
        ids_BL=rng.integers(0, VOCABULARY, (ROWS, WIDTH)),
        mask_BL=np.arange(WIDTH)[None] < length_B[:, None],
        behavior_logp_BL=-rng.exponential(1.0, (ROWS, WIDTH)),
        advantage_B=rng.normal(0, 1, ROWS),
        weight_B=np.ones(ROWS),
        successes_B=np.ones(ROWS, np.int64),
        group_B=np.arange(ROWS),
        source_B=np.array([0, 0, 1, 0, 0, 1, 0, 0, 1], np.int8),
        reference_logp_BL=-rng.exponential(1.0, (ROWS, WIDTH)),
    )


def chosen(aggregation: str) -> LossSettings:
    return LossSettings(
        max_tokens=WIDTH,
        aggregation=aggregation,
        kl_beta=0.1,
        entropy_coef=0.01,
        replay_weight=0.1,
    )


def gradient(batch: Batch, settings: LossSettings, counts: Denominators, rows: int) -> torch.Tensor:
    """Gradient of a table of logits by the token before, in micro-batches of `rows`."""
    logits = torch.nn.Parameter(
        torch.linspace(-1, 1, VOCABULARY * VOCABULARY).double().sin().view(VOCABULARY, VOCABULARY)
    )
    for start in range(0, len(batch.ids_BL), rows):
        part = slice(start, start + rows)
        ids_BL = torch.as_tensor(batch.ids_BL[part])
        before_BL = torch.nn.functional.pad(ids_BL, (1, 0))[:, :-1]
        logp_BLV = torch.log_softmax(logits[before_BL], dim=-1)
        logp_BL = logp_BLV.gather(-1, ids_BL[..., None])[..., 0]
        entropy_BL = -(logp_BLV.exp() * logp_BLV).sum(-1)
        micro = micro_batch(batch, part, dtype=torch.float64)
        loss, _ = micro_batch_loss(logp_BL, entropy_BL, micro, settings, counts)
        loss.backward()
    assert logits.grad is not None
    return logits.grad


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    mine = select(ragged_batch(), np.arange(ROWS)[rank::RANKS])
    total = denominators(ragged_batch())  # every rank knows all rows
    found = {}
    for aggregation in AGGREGATIONS:
        grad = gradient(mine, chosen(aggregation), total, rows=2)
        dist.all_reduce(grad)
        found[aggregation] = grad
    if rank == 0:
        torch.save(found, f"{folder}/gradients.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=RANKS)
    return torch.load(folder / "gradients.pt", weights_only=True)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_ranks_give_the_gradient_of_one(of_two_ranks, aggregation):
    batch = ragged_batch()
    alone = gradient(batch, chosen(aggregation), denominators(batch), rows=ROWS)
    difference = (of_two_ranks[aggregation] - alone).abs().max() / alone.abs().max()
    assert alone.abs().max() > 1e-3
    assert difference < 1e-9
