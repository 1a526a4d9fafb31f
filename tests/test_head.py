"""Chunked log-probabilities against the whole logits: values, gradients, architectures, memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlfe.engines import head
from rlfe.engines.learner import TransformersLearner
from rlfe.engines.logprobs import scored
from rlfe.engines.weights import Lora
from rlfe.errors import RequestError
from rlfe.types import Batch
from tests.tiny_model import write_tiny_model

VOCABULARY, WIDTH = 104, 32


def a_batch(rows: int = 5, width: int = 12, seed: int = 0) -> Batch:
    """Right-padded rows of different lengths whose first two tokens are the prompt."""
    source = np.random.default_rng(seed)
    length_B = source.integers(4, width + 1, rows)
    place_L = np.arange(width)
    return Batch(
        ids_BL=source.integers(0, VOCABULARY, (rows, width)),
        mask_BL=(place_L >= 2) & (place_L < length_B[:, None]),
        behavior_logp_BL=np.zeros((rows, width), np.float32),
        advantage_B=np.ones(rows),
        weight_B=np.ones(rows),
        successes_B=np.ones(rows, np.int64),
        group_B=np.zeros(rows, np.int64),
        source_B=np.zeros(rows, np.int8),
    )


def a_model(kind: str, attention: str = "eager", **facts: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.5, **facts,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (
            getattr(transformers, f"{kind}ForCausalLM")
            ._from_config(config, attn_implementation=attention)
            .eval()
        )


MODELS = {
    "plain": lambda: a_model("Llama", tie_word_embeddings=False),
    "tied": lambda: a_model("Qwen3", tie_word_embeddings=True),
    "capped": lambda: a_model("Gemma2", final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "scaled": lambda: a_model("Cohere", logit_scale=0.25),
    "divided": lambda: a_model("Granite", logits_scaling=4.0),
    "with a bias": lambda: with_bias(a_model("Llama", tie_word_embeddings=False)),
}


def with_bias(model: Any) -> Any:
    bias = torch.linspace(-1, 1, VOCABULARY)
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


def results(model: Any, way: str, entropy: bool | None, temperature: float = 0.7) -> Any:
    """Values and all gradients of a loss of both outputs."""
    batch = a_batch()
    model.zero_grad()
    logp_BL, entropy_BL = scored(model, batch, temperature, entropy, logits=way)
    weight_BL = torch.linspace(-1, 2, logp_BL.numel()).view(logp_BL.shape)
    (logp_BL * weight_BL + entropy_BL * weight_BL.flip(0)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logp_BL.detach(), entropy_BL.detach(), grads


@pytest.mark.parametrize("entropy", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_numbers_and_gradients_of_the_whole(monkeypatch, name, entropy) -> None:
    model = MODELS[name]()
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 7 * VOCABULARY)  # chunks of different sizes
    logp, entropies, grads = results(model, "chunked", entropy)
    logp2, entropies2, grads2 = results(model, "full", entropy)
    torch.testing.assert_close(logp, logp2, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, entropies2, atol=2e-5, rtol=1e-5)
    assert set(grads) == set(grads2)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, grads2[key], atol=2e-4, rtol=1e-4, msg=key)


def test_only_what_stands_behind_the_head_is_a_tail() -> None:
    tails = {name: head.tail_of(make()) for name, make in MODELS.items()}
    assert {name for name, tail in tails.items() if tail} == {"capped", "scaled", "divided"}
    model = MODELS["capped"]()
    value = head.tail_of(model)(torch.tensor([[0.0, 3.0, -300.0]]))
    assert value[0].tolist() == pytest.approx([0.0, 3 * np.tanh(1.0), -3.0], abs=1e-6)


def test_gradients_agree_with_finite_differences(monkeypatch) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 2 * 5)
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    measure = head.Measure(temperature=0.5, entropy=True, dtype=torch.float32, tail=None)
    ids = torch.tensor([1, 4, 0])

    def value(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logp, entropy = head.measured(h, w, None, ids, measure)
        return (logp * torch.tensor([1.0, -2.0, 0.5])).sum() + 3 * (entropy**2).sum()

    for which in (0, 1):
        given = [hidden.clone(), weight.clone()]
        given[which].requires_grad_()
        value(*given).backward()
        for place in [(0, 1), (2, 3)]:
            step = torch.zeros_like(given[which])
            step[place] = 1e-2
            moved = [
                value(*[g.detach() + sign * step if i == which else g for i, g in enumerate(given)])
                for sign in (1, -1)
            ]
            slope = (moved[0] - moved[1]).item() / 2e-2
            assert given[which].grad[place].item() == pytest.approx(slope, abs=2e-2, rel=1e-2)


class Widest(TorchDispatchMode):
    """The most rows of vocabulary width that any single result held."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,):
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out


def test_logits_of_a_whole_batch_never_exist(monkeypatch) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 40 * VOCABULARY)
    model, batch = MODELS["tied"](), a_batch(rows=64)
    held = {}
    for way in ("full", "chunked"):
        with Widest() as seen:
            logp_BL, _ = scored(model, batch, 1.0, False, logits=way)
            logp_BL.sum().backward()
        held[way] = seen.rows
    assert held == {"full": 389, "chunked": 39}  # ten even chunks
    assert batch.mask_BL.sum() == 389


def test_lower_precision_rounds_the_factors_and_keeps_their_sums() -> None:
    a = torch.tensor([[1.0, 2**-9]]).bfloat16()
    b = torch.tensor([[1.0], [1.0]]).bfloat16()
    assert head.product(a, b).item() == 1 + 2**-9  # in bfloat16 the sum would be 1
    assert (a @ b).item() == 1.0


def test_under_autocast_logits_are_float32_sums_of_rounded_factors() -> None:
    model, batch = MODELS["plain"](), a_batch()
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logp_BL, _ = scored(model, batch, 1.0, None)
    rows, columns = np.nonzero(batch.mask_BL)
    hidden = seen[-1][rows, columns - 1].bfloat16().double()
    logits = hidden @ model.lm_head.weight.bfloat16().double().t()
    expected = torch.log_softmax(logits, -1)[range(len(rows)), batch.ids_BL[rows, columns]]
    assert (logp_BL[rows, columns] - expected).abs().max() < 1e-5
    rounded = torch.log_softmax(logits.bfloat16().double(), -1)
    assert (rounded[range(len(rows)), batch.ids_BL[rows, columns]] - expected).abs().max() > 1e-3


def test_a_head_with_an_adapter_takes_the_full_way(tmp_path: Path, one_thread: None) -> None:
    model = write_tiny_model(tmp_path / "model", tied=False)
    lora = Lora(rank=2, alpha=2, targets=("lm_head",), seed=0)
    learner = TransformersLearner(model, dtype="float32", device="cpu", lora=lora)
    assert not isinstance(learner.model.get_output_embeddings(), torch.nn.Linear)
    base = TransformersLearner(model, dtype="float32", device="cpu")
    batch = a_batch()
    assert np.allclose(learner.logprobs(batch), base.logprobs(batch), atol=1e-5)


def test_liger_that_is_not_there_is_refused_in_words(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(RequestError, match=r'compute\.logits = "liger" cannot be used'):
        scored(MODELS["plain"](), a_batch(), 1.0, None, logits="liger")
