"""Compiled layers and logits: the same numbers, one graph for all layers, errors in words."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from rlfe.engines import compiled, head
from rlfe.engines.compiled import compile_layers
from rlfe.engines.logprobs import scored
from rlfe.errors import RequestError
from tests.test_engine_contract import MeanLogp
from tests.test_head import MODELS, VOCABULARY, a_batch, results
from tests.test_recompute import LORA, a_learner, gradients

pytestmark = [
    pytest.mark.usefixtures("one_thread", "traced"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # the compiler's own
]
COMPILE = torch.compile


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.compile without its slow last part: graphs are traced and run as they are."""
    torch._dynamo.reset()
    counters.clear()
    compiled.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="aot_eager"))
    yield
    torch._dynamo.reset()
    compiled.compiled.cache_clear()


@pytest.mark.parametrize("entropy", [None, False, True])
@pytest.mark.parametrize("name", ["plain", "tied", "capped", "with a bias"])
def test_compiled_logits_give_the_numbers_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, entropy: bool | None
) -> None:
    model = MODELS[name]()
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 7 * VOCABULARY)
    logp, entropies, grads = results(model, "compiled", entropy)
    logp2, entropies2, grads2 = results(model, "full", entropy)
    torch.testing.assert_close(logp, logp2, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, entropies2, atol=2e-5, rtol=1e-5)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, grads2[key], atol=2e-4, rtol=1e-4, msg=key)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("again", "lora"),
    [
        pytest.param(False, None, id="kept"),
        pytest.param(True, None, id="again", marks=SLOW),
        pytest.param(True, LORA, id="again-lora", marks=SLOW),
    ],
)
def test_compiled_layers_give_the_same_gradients(tiny_model: Path, again: bool, lora: Any) -> None:
    found = []
    for compiles in (False, True):
        learner = a_learner(
            tiny_model, compiles=compiles, checkpointing=again, lora=lora, tokens=40
        )
        learner._packs = False
        seen = learner.forward_backward(a_batch(rows=8), MeanLogp(30))
        found.append((seen.logp_BL, gradients(learner)))
    (logp, plain), (logp2, fast) = found
    assert np.allclose(logp, logp2, atol=1e-5)
    assert plain.keys() == fast.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(fast[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_all_layers_share_one_graph_for_any_rows_and_tokens(tiny_model: Path) -> None:
    learner = a_learner(tiny_model, compiles=True, micro_batch=3)
    learner._packs, learner._logits = False, "chunked"
    assert len(learner.model.model.layers) > 1
    for width, rows in ((12, 9), (17, 6), (9, 8)):
        learner.forward_backward(a_batch(rows=rows, width=width), MeanLogp(30))
    assert counters["stats"]["unique_graphs"] == 1
    learner.logprobs(a_batch(rows=6))  # without a gradient: another graph
    assert counters["stats"]["unique_graphs"] == 2


def test_a_few_rows_without_a_gradient_need_no_graph_of_their_own(tiny_model: Path) -> None:
    class Half(MeanLogp):
        def needs_gradient(self, batch: Any) -> np.ndarray:
            return np.arange(len(batch.ids_BL)) % 4 > 0

    found = []
    for compiles in (False, True):
        learner = a_learner(tiny_model, compiles=compiles)
        learner._packs, learner._logits = False, "chunked"
        seen = learner.forward_backward(a_batch(rows=8), Half(30))
        found.append(seen.logp_BL)
    assert counters["stats"]["unique_graphs"] == 1
    assert np.allclose(*found, atol=1e-5)


def test_rows_are_as_wide_as_one_graph_wants_them(tiny_model: Path) -> None:
    found, widths = [], set()
    for compiles in (False, True):
        learner = a_learner(tiny_model, compiles=compiles)
        learner._packs = False
        layer = learner.model.model.layers[0]
        layer.register_forward_pre_hook(lambda _, given: widths.add(given[0].shape[1]))
        found.append(learner.logprobs(a_batch(rows=5, width=17)))
    assert widths == {15, 16}
    assert np.allclose(*found, atol=1e-5)


def test_a_sampler_that_shares_the_model_uses_the_layers_as_they_were(tiny_model: Path) -> None:
    learner = a_learner(tiny_model, compiles=True)
    ids = torch.arange(8)[None]
    fast = learner.model.generate(ids, max_new_tokens=4, do_sample=False)
    assert "unique_graphs" not in counters["stats"]
    plain = a_learner(tiny_model).model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(fast, plain)


def test_what_the_compiler_cannot_do_is_one_clear_error(tiny_model: Path, monkeypatch) -> None:
    def backend(*_: Any) -> Any:
        raise OSError("no C compiler found")

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    learner = a_learner(tiny_model, compiles=True)
    with pytest.raises(RequestError, match=r"compute\.compile: .*no C compiler found") as caught:
        learner.forward_backward(a_batch(), MeanLogp(30))
    assert "--overwrite --set compute.compile=false" in caught.value.hint


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(RequestError, match=r"compute\.compile: Linear has no layers"):
        compile_layers(torch.nn.Linear(2, 2))


def test_logits_are_compiled_once_for_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_NUMBERS", 7 * VOCABULARY)
    model = MODELS["tied"]()
    for rows in (5, 9, 2):
        logp_BL, _ = scored(model, a_batch(rows=rows), 1.0, False, logits="compiled")
        logp_BL.sum().backward()
    assert counters["stats"]["unique_graphs"] == 2  # reading them, and their gradient
