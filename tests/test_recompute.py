"""Layers computed again, and the second try after memory ran out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlfe.engines.learner import TransformersLearner
from rlfe.engines.microbatches import Budget
from rlfe.engines.recompute import recompute_layers
from rlfe.engines.sharded import ShardedLearner
from rlfe.engines.weights import Lora
from rlfe.errors import RequestError, RlfeError
from tests.test_engine_contract import MeanLogp
from tests.test_head import a_batch

pytestmark = pytest.mark.usefixtures("one_thread")
LORA = Lora(rank=2, alpha=4, targets="all-linear", seed=0)


def a_learner(folder: Path, **other: Any) -> TransformersLearner:
    return TransformersLearner(folder, **({"dtype": "float32", "device": "cpu"} | other))


def gradients(learner: TransformersLearner) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in learner._trained.items() if p.grad is not None}


def calls_of(layer: Any) -> list[bool]:
    """One entry for each time that the layer's attention is computed: whether for a gradient."""
    calls: list[bool] = []
    layer.self_attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_layers_computed_again_give_the_same_bits(tiny_model: Path, lora: Lora | None) -> None:
    found = {}
    for again in (False, True):
        learner = a_learner(tiny_model, checkpointing=again, lora=lora)
        calls = calls_of(learner.model.model.layers[1])
        seen = learner.forward_backward(a_batch(), MeanLogp(30))
        found[again] = (seen.logp_BL, gradients(learner), len(calls))
        assert not learner.model.training
    assert np.array_equal(found[False][0], found[True][0])
    assert found[False][1].keys() == found[True][1].keys()
    for name, gradient in found[False][1].items():
        assert torch.equal(gradient, found[True][1][name])
    assert (found[False][2], found[True][2]) == (found[False][2], 2 * found[False][2])


def test_nothing_is_computed_again_without_a_gradient(tiny_model: Path) -> None:
    learner = a_learner(tiny_model, checkpointing=True, micro_batch=5)
    learner._packs = False
    calls = calls_of(learner.model.model.layers[0])
    learner.logprobs(a_batch())
    assert calls == [False]


def test_dropout_stays_off_in_layers_that_are_computed_again(tmp_path: Path) -> None:
    import transformers

    config = transformers.OPTConfig(
        vocab_size=104, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        dropout=0.5, word_embed_proj_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    ids = torch.arange(12)[None]
    plain = model(input_ids=ids).logits
    assert recompute_layers(model) == 2
    again = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(plain, again)
    again.sum().backward()


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(RequestError, match="Linear has no layers for it"):
        recompute_layers(torch.nn.Linear(2, 2))


class Short(MeanLogp):
    """A loss whose pass runs out of memory when it holds more than `rows` rows, `times` times."""

    def __init__(self, rows: int, times: int = 99) -> None:
        super().__init__(30)
        self.limit, self.times = rows, times

    def __call__(self, rows: Any, logp_BL: Any, entropy_BL: Any) -> Any:
        if len(rows.ids_BL) > self.limit and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return super().__call__(rows, logp_BL, entropy_BL)


def test_running_out_of_memory_halves_the_budget_and_repeats_from_scratch(tiny_model) -> None:
    batch = a_batch(rows=8)
    even = a_learner(tiny_model, micro_batch=2)
    expected = even.forward_backward(batch, MeanLogp(30))
    learner = a_learner(tiny_model, micro_batch=4)
    seen = learner.forward_backward(batch, Short(2))
    assert np.array_equal(seen.logp_BL, expected.logp_BL)
    assert seen.sums == expected.sums
    for name, gradient in gradients(even).items():
        assert torch.equal(gradient, gradients(learner)[name])
    (note,) = learner.work().notes
    assert note == (
        "out of memory with train.micro_batch_rollouts = 4: going on with "
        "train.micro_batch_rollouts = 2, which is to be set"
    )
    assert learner.work().notes == ()


def test_a_failure_in_the_middle_leaves_no_half_gradient(tiny_model: Path) -> None:
    class Late(Short):
        calls = 0

        def __call__(self, rows: Any, logp_BL: Any, entropy_BL: Any) -> Any:
            self.calls += 1
            self.limit = 0 if self.calls == 2 else 99  # the second micro-batch fails
            return super().__call__(rows, logp_BL, entropy_BL)

    batch = a_batch(rows=8)
    even = a_learner(tiny_model, micro_batch=2)
    even.forward_backward(batch, MeanLogp(30))
    learner = a_learner(tiny_model, micro_batch=4)
    learner.forward_backward(batch, Late(99))
    for name, gradient in gradients(even).items():
        assert torch.equal(gradient, gradients(learner)[name])


def test_a_second_time_is_one_clear_error_and_the_gradients_before_it_stay(tiny_model) -> None:
    batch = a_batch(rows=8)
    learner = a_learner(tiny_model, tokens=48)
    learner._packs = False
    learner.forward_backward(batch, MeanLogp(30))
    before = gradients(learner)
    with pytest.raises(RlfeError, match=r"compute\.token_budget = 24, which is half") as caught:
        learner.forward_backward(batch, Short(0))
    assert "Tried to allocate 2.00 GiB." in str(caught.value)
    assert "more" not in str(caught.value)
    assert "compute.gradient_checkpointing=true" in caught.value.hint
    for name, gradient in gradients(learner).items():
        assert torch.equal(gradient, before[name])
    with pytest.raises(RlfeError, match="which is half"):  # once per run, not once per call
        learner.forward_backward(batch, Short(0))


def test_scoring_is_tried_again_too(tiny_model: Path) -> None:
    learner, batch = a_learner(tiny_model), a_batch(rows=8)
    expected = learner.logprobs(batch)
    scored, failures = learner._scored, [torch.OutOfMemoryError("none left")]

    def short(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return scored(*arguments)

    learner._scored = short
    assert np.allclose(learner.logprobs(batch), expected, atol=1e-6)
    assert learner.work().notes[0].startswith("out of memory with compute.token_budget = 2048")


def test_an_optimiser_step_without_memory_is_one_clear_error(tiny_model, monkeypatch) -> None:
    learner = a_learner(tiny_model)
    learner.forward_backward(a_batch(), MeanLogp(30))

    def step() -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(learner._optimizer, "step", step)
    with pytest.raises(RlfeError, match="out of memory in the optimiser step: none left"):
        learner.optim_step(0.1)


def test_one_of_several_ranks_does_not_try_again(tiny_model: Path) -> None:
    class Rank(TransformersLearner):
        _within_memory = ShardedLearner._within_memory

    rank = Rank(tiny_model, dtype="float32", device="cpu")
    with pytest.raises(RlfeError, match="out of memory in a pass of one of several ranks: CUDA"):
        rank.forward_backward(a_batch(), Short(0, times=1))
    assert gradients(rank) == {}


def test_half_of_a_budget_is_at_least_one_row() -> None:
    budget = Budget(1, 2048)
    budget.halve()
    assert (budget.rows, budget.tokens, budget.halved) == (1, 1024, True)
