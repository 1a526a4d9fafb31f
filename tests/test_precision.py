"""A learning rate of 1e-6 does not vanish: compute is bfloat16, what is kept is float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlfe.engines.learner import TransformersLearner
from tests.test_engine_contract import MeanLogp
from tests.test_head import a_batch

pytestmark = pytest.mark.usefixtures("one_thread")
RATE = 1e-6


def after_1000_steps(dtype: torch.dtype) -> float:
    """A weight of 0.02 under a gradient of 1 and the shipped AdamW at 1e-6."""
    weight = torch.nn.Parameter(torch.tensor([0.02], dtype=dtype))
    optimizer = torch.optim.AdamW(
        [weight], lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True
    )
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.item()


def test_a_bfloat16_weight_stands_still_where_a_float32_one_moves() -> None:
    assert after_1000_steps(torch.float32) == pytest.approx(0.019, abs=1e-6)
    # half the distance to the next bfloat16 number is 6.1e-5: a step of 1e-6 is rounded away
    assert after_1000_steps(torch.bfloat16) == torch.tensor(0.02).bfloat16().item() == 0.02001953125
    assert torch.tensor(0.019).bfloat16().item() == 0.01904296875  # the sampler's copy moved


@pytest.fixture
def learner(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> TransformersLearner:
    """As on a GPU: bfloat16 autocast, float32 weights."""
    learner = TransformersLearner(tiny_model, dtype="bfloat16", device="cpu")
    monkeypatch.setattr(learner, "_autocast", lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    return learner


def copied(learner: TransformersLearner, dtype: torch.dtype) -> torch.Tensor:
    weights = [p.detach().flatten() for p in learner.model.parameters()]
    return torch.cat(weights).clone().to(dtype)


def test_under_autocast_weights_gradients_and_moments_stay_float32(learner) -> None:
    learner.forward_backward(a_batch(), MeanLogp(30))
    assert {p.grad.dtype for p in learner.model.parameters()} == {torch.float32}
    learner.optim_step(RATE)
    kinds = {p.dtype for p in learner.model.parameters()}
    for state in learner._optimizer.state.values():
        kinds |= {state["exp_avg"].dtype, state["exp_avg_sq"].dtype}
    assert kinds == {torch.float32}


def test_small_updates_add_up_until_the_sampler_sees_them(learner, tiny_model: Path) -> None:
    start, seen = copied(learner, torch.float32), copied(learner, torch.bfloat16)
    twin = in_bfloat16(tiny_model)
    twin_start = torch.cat([p.detach().flatten() for p in twin.parameters()]).clone()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    moved = []
    for _ in range(60):
        learner.forward_backward(a_batch(), MeanLogp(30))
        for own, other in zip(learner.model.parameters(), twin.parameters(), strict=True):
            other.grad = own.grad.bfloat16()  # the same gradients
        optimizer.step()
        learner.optim_step(RATE)
        moved.append((copied(learner, torch.float32) - start).abs().mean().item())
    count = start.numel()
    assert moved[0] == pytest.approx(RATE, rel=0.1)  # Adam's first step is the rate itself
    assert moved[-1] > 30 * RATE
    changed = (copied(learner, torch.bfloat16) != seen).sum().item()
    assert changed / count > 0.15  # 3,817 of 21,920 numbers of the sampler's copy
    stuck = torch.cat([p.detach().flatten() for p in twin.parameters()]) == twin_start
    assert (~stuck).sum().item() / count < 0.003  # 44, all of them tiny
    large = twin_start.abs() > 2**-11  # half a step there is 2**-20, about 1e-6
    assert large.sum().item() / count > 0.99
    assert stuck[large].all()


def in_bfloat16(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)


def test_the_loss_falls_at_1e_6(learner) -> None:
    batch = a_batch()
    before = learner.forward_backward(batch, MeanLogp(30)).sums["loss/total"]
    learner.optim_step(RATE)
    for _ in range(30):
        learner.forward_backward(batch, MeanLogp(30))
        learner.optim_step(RATE)
    after = learner.forward_backward(batch, MeanLogp(30)).sums["loss/total"]
    assert after < before
    assert np.isfinite(after)
