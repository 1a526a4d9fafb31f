"""The Tinker engine against the loopback server: numbers, refusals, faults.

The server does its own arithmetic (`tests/tinker_model.py`); the wire is checked against the
client package's types on its side. Whole runs: `tests/test_tinker_run.py`; a real server:
`tests/test_tinker_skyrl.py`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlfe import config
from rlfe.engines import make_engines
from rlfe.engines.learner import TransformersLearner
from rlfe.engines.weights import Lora
from rlfe.errors import (
    NetworkError,
    NotAllowedError,
    NotFoundError,
    QuotaError,
    RequestError,
    RlfeError,
)
from rlfe.schema import Recipe
from rlfe.training.losses import LossSettings
from rlfe.training.objective import StepLoss
from rlfe.training.staleness import check_arrival
from rlfe.types import Batch, Finish, Request, Sampling
from tests.test_engine_contract import MeanLogp, a_request, sampled

pytest.importorskip("tinker", reason="tinker is not installed (rlfe[tinker])")

import tinker

from rlfe.engines.tinker import completions, sampling_params
from rlfe.engines.tinker_learner import TinkerLearner, trained_parts
from rlfe.engines.tinker_service import OPENING, Service, settings, shown, translated
from tests import tinker_server as loopback
from tests.tinker_server import Fault, Server

RANK, LR, SEED = 4, 1e-3, 7
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
Engines = tuple[Any, Any]


@pytest.fixture
def open_engines(tinker_server: Server, tiny_model: Path, one_thread: None):
    """Makes (sampler, learner) at the server."""
    opened: list[Any] = []

    def make(**changes: Any) -> Engines:
        flags = {
            **{"engine.sampler": "tinker", "engine.learner": "tinker", "engine.device": "cpu"},
            **{"model.path": str(tiny_model), "model.dtype": "float32", "lora.rank": RANK},
            **{"optim.grad_clip": 0.0, **changes},
        }
        recipe: Recipe = config.load([], flags=flags).recipe
        opened.extend(make_engines(recipe))
        return opened[-2], opened[-1]

    yield make
    for each in opened:
        each.close()


def clipped(batch: Batch) -> tuple[Batch, StepLoss]:
    """A batch with advantages of both signs, stale ratios and a replay row, and its loss."""
    rng = np.random.default_rng(0)
    drift = np.where(batch.mask_BL, rng.normal(0, 0.2, batch.ids_BL.shape), 0).astype(np.float32)
    batch = dataclasses.replace(
        batch,
        behavior_logp_BL=batch.behavior_logp_BL + drift,
        advantage_B=np.array([3.0, -1.0, 0.0]),
        successes_B=np.array([1, 1, -1]),
        source_B=np.array([0, 0, 1], np.int8),
    )
    return batch, StepLoss(LossSettings(max_tokens=12, replay_weight=0.1), batch)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_one_gradient_step_agrees_with_the_local_engine(
    open_engines: Callable[..., Engines],
    tinker_server: Server,
    tiny_model: Path,
    tmp_path: Path,
    reduction: str,
) -> None:
    tinker_server.reduction = reduction
    sampler, _ = open_engines(**{"service.reduction": reduction})
    lora = Lora(rank=RANK, alpha=32, targets="all-linear", seed=SEED)
    remote = TinkerLearner(
        Service(), tiny_model, model=str(tiny_model), lora=lora, adam=ADAM, reduction=reduction
    )
    local = TransformersLearner(
        tiny_model, dtype="float32", lora=lora, betas=(0.9, 0.95), eps=1e-12, grad_clip=0.0
    )
    batch, loss = clipped(sampled(sampler))
    for _ in range(2):  # the second step sees the moments of the first
        there, here = remote.forward_backward(batch, loss), local.forward_backward(batch, loss)
        assert there.logp_BL == pytest.approx(here.logp_BL, abs=5e-6)  # float32, another order
        for name in ("loss/policy", "loss/replay", "loss/total"):
            assert there.sums[name] == pytest.approx(here.sums[name], rel=1e-5, abs=1e-6)
        assert there.entropy_BL is None
        assert remote.optim_step(LR) == pytest.approx(local.optim_step(LR), rel=1e-4)
    trained = next(iter(tinker_server.models.values())).weights
    held = {n: p for n, p in local.model.named_parameters() if p.requires_grad}
    assert trained.keys() == held.keys()
    for name, weight in trained.items():  # Adam's steps are LR each: 1 % of one
        assert weight.detach().numpy() == pytest.approx(held[name].detach().numpy(), abs=LR / 100)
    remote.close()


def test_an_exported_checkpoint_scores_like_the_service(
    open_engines: Callable[..., Engines], tmp_path: Path
) -> None:
    sampler, learner = open_engines(**{"optim.lr": 0.05})
    batch = sampled(sampler)
    learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
    learner.optim_step(0.05)
    folder = tmp_path / "export"
    folder.mkdir()
    assert learner.export(folder, batch)["save/merge_delta"] < 1e-4
    merged = TransformersLearner(folder, dtype="float32")
    trained = learner.logprobs(batch)
    assert merged.logprobs(batch) == pytest.approx(trained, abs=1e-4)
    assert np.abs(trained - learner.logprobs(batch, "reference")).max() > 0.1


def test_a_snapshot_keeps_its_weights(open_engines: Callable[..., Engines]) -> None:
    sampler, learner = open_engines()
    old, batch = learner.snapshot(0), sampled(sampler)
    before = learner.logprobs(batch)
    learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
    learner.optim_step(0.1)
    assert learner.logprobs(batch, old) == pytest.approx(before, abs=1e-5)
    assert np.abs(learner.logprobs(batch) - before).max() > 0.1
    assert "v000000" in old.weights


def test_the_optimiser_step_is_submitted_while_the_backward_pass_runs(
    open_engines: Callable[..., Engines], tinker_server: Server, monkeypatch: Any
) -> None:
    sampler, learner = open_engines()
    batch, seen = sampled(sampler), []
    plain = loopback.weighted_loss

    def waiting(name: str, logp: Any, inputs: Any) -> Any:
        if inputs["weights"].any():  # the backward pass, not the scoring one
            until = time.monotonic() + 20
            while "optim_step" not in tinker_server.requests and time.monotonic() < until:
                time.sleep(0.01)
            seen.append("optim_step" in tinker_server.requests)
        return plain(name, logp, inputs)

    learner.forward_backward(batch, MeanLogp(40))  # the first one is checked before the step
    learner.optim_step(LR)
    tinker_server.requests.clear()
    monkeypatch.setattr(loopback, "weighted_loss", waiting)
    learner.forward_backward(batch, MeanLogp(40))
    learner.optim_step(LR)
    assert seen == [True] * 3  # at each of the three rows


def test_all_prompts_are_submitted_before_the_first_is_answered(
    open_engines: Callable[..., Engines], tinker_server: Server, monkeypatch: Any
) -> None:
    sampler, _ = open_engines()
    plain, counts = loopback.Model.sample, []

    def waiting(*arguments: Any) -> Any:
        until = time.monotonic() + 20
        while tinker_server.requests.count("asample") < 6 and time.monotonic() < until:
            time.sleep(0.01)
        counts.append(tinker_server.requests.count("asample"))
        return plain(*arguments)

    monkeypatch.setattr(loopback.Model, "sample", waiting)
    done = dict(sampler.generate([a_request(sampler, str(i), n=1) for i in range(6)]))
    assert len(done) == 6
    assert counts == [6] * 6


def test_a_loss_that_is_not_finite_changes_nothing(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    sampler, learner = open_engines()
    batch = sampled(sampler)
    before = learner.logprobs(batch)

    class Broken(MeanLogp):
        def __call__(self, rows: Any, logp_BL: Any, entropy_BL: Any) -> Any:
            return logp_BL.sum() * math.nan, {}

    learner.forward_backward(batch, Broken(1))
    assert math.isnan(learner.optim_step(LR))
    assert "optim_step" not in tinker_server.requests
    assert learner.logprobs(batch) == pytest.approx(before, abs=0)


def test_a_norm_that_is_not_told_is_none(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    tinker_server.told_norm = False
    sampler, learner = open_engines()
    batch = sampled(sampler)
    learner.forward_backward(batch, MeanLogp(40))
    assert learner.optim_step(LR) is None


def test_a_sampler_of_other_weights_is_caught(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    sampler, learner = open_engines()
    snapshot = learner.snapshot(0)
    assert sampler.load(snapshot) == snapshot.fingerprint
    other = learner.snapshot(1).weights
    plain = tinker_server.create_sampling_session

    def sabotaged(data: Any) -> Any:
        found = plain(data)
        tinker_server.samplers[found.sampling_session_id] = (other, tinker_server.name)
        return found

    tinker_server.create_sampling_session = sabotaged  # type: ignore[method-assign]
    with pytest.raises(RlfeError, match="does not hold version 0"):
        check_arrival(sent=snapshot.fingerprint, received=sampler.load(snapshot), version=0)


def test_passing_errors_are_tried_again(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    tinker_server.faults = [
        Fault("asample", status=429),
        Fault("optim_step", status=500),
        Fault("retrieve_future", status=503, skip=1),
        Fault("forward_backward", status=502),
    ]
    sampler, learner = open_engines()
    batch = sampled(sampler)
    learner.forward_backward(batch, MeanLogp(40))
    assert math.isfinite(learner.optim_step(LR))
    assert [fault.times for fault in tinker_server.faults] == [0, 0, 0, 0]


def test_a_server_that_hangs_ends_the_wait_with_the_phase(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    sampler, _ = open_engines(**{"service.timeout_seconds": 1.0})
    sampler._service._pause = 0.2
    tinker_server.faults = [Fault("asample", pause=30)]
    with pytest.raises(NetworkError, match=r"no reply within 1 s while sampling"):
        list(sampler.generate([a_request(sampler, "a")]))


def test_a_server_that_is_gone_ends_the_wait_with_the_phase(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    sampler, learner = open_engines()
    snapshot = learner.snapshot(0)
    sampler._service._pause, sampler._service._silent = 0.1, 0.5
    tinker_server.gone = True
    with pytest.raises(NetworkError, match="was lost while opening tinker://") as caught:
        sampler.load(snapshot)
    assert caught.value.exit_code == 7
    assert "--resume" in caught.value.hint


def test_a_snapshot_that_the_service_lost_is_not_found(
    open_engines: Callable[..., Engines], tmp_path: Path
) -> None:
    sampler, learner = open_engines()
    snapshot = dataclasses.replace(learner.snapshot(0), weights="tinker://gone/sampler_weights/x")
    with pytest.raises(NotFoundError, match="no such checkpoint") as caught:
        sampler.load(snapshot)
    assert caught.value.exit_code == 5


def test_a_server_that_averages_is_refused_before_a_step(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    tinker_server.reduction = "mean"
    sampler, learner = open_engines()
    batch = sampled(sampler)
    with pytest.raises(RlfeError, match="does not take custom losses") as caught:
        learner.forward_backward(batch, MeanLogp(40))
    assert 'service.reduction = "mean"' in caught.value.hint
    assert "optim_step" not in tinker_server.requests


def test_a_server_that_sums_is_not_taken_for_one_that_averages(
    open_engines: Callable[..., Engines],
) -> None:
    sampler, learner = open_engines(**{"service.reduction": "mean"})
    batch = sampled(sampler)
    with pytest.raises(RlfeError, match="reports loss:sum: it sums"):
        learner.forward_backward(batch, MeanLogp(40))


def test_a_wrong_sum_is_noticed(
    open_engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loopback.weighted_loss
    monkeypatch.setattr(loopback, "weighted_loss", lambda *given: plain(*given) / 2)
    sampler, learner = open_engines()
    batch = sampled(sampler)
    with pytest.raises(RlfeError, match="it reports"):
        learner.forward_backward(batch, MeanLogp(40))


def test_a_server_whose_weights_do_not_move_is_noticed(
    open_engines: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback.Model, "step", lambda self, params: 1.0)
    sampler, learner = open_engines()
    batch = sampled(sampler)
    for _ in range(3):
        learner.forward_backward(batch, MeanLogp(40))
        learner.optim_step(LR)
    learner.forward_backward(batch, MeanLogp(40))
    with pytest.raises(RlfeError, match="4 optimiser steps at the service changed no log-prob"):
        learner.optim_step(LR)


def test_a_server_that_samples_from_the_live_weights_is_noticed_under_a_lag(
    open_engines: Callable[..., Engines], tinker_server: Server
) -> None:
    tinker_server._sampler = lambda path: next(iter(tinker_server.models.values()))  # type: ignore
    sampler, learner = open_engines(**{"lag.steps": 4})
    learner.snapshot(0)
    batch = sampled(sampler)
    for _ in range(3):
        learner.forward_backward(batch, MeanLogp(40))
        learner.optim_step(LR)
    learner.forward_backward(batch, MeanLogp(40))
    with pytest.raises(RlfeError, match="the service does not keep tinker://"):
        learner.optim_step(LR)


def test_keys_addresses_and_models_are_refused_in_words(
    open_engines: Callable[..., Engines], tinker_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="does not train no/such-model") as caught:
        open_engines(**{"service.model": "no/such-model"})
    assert "service.model" in caught.value.hint
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    with pytest.raises(NotAllowedError, match="refuses the key in TINKER_API_KEY"):
        open_engines()
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(NotAllowedError, match="TINKER_API_KEY is not set"):
        open_engines()
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"nothing answers at http://127.0.0.1:9"):
        open_engines()
    monkeypatch.setenv("TINKER_BASE_URL", f"{tinker_server.url}/elsewhere")
    with pytest.raises(NotFoundError, match="is no Tinker API"):
        open_engines()


def test_the_environment_is_read_as_it_is_meant() -> None:
    assert settings({"TINKER_API_KEY": "k", "TINKER_BASE_URL": "http://h:1/"}) == (
        "http://h:1",
        "k",
    )
    assert settings({"TINKER_API_KEY": "k"})[0].startswith("https://tinker.thinkingmachines.dev/")
    with pytest.raises(RequestError, match="is no address"):
        settings({"TINKER_API_KEY": "k", "TINKER_BASE_URL": "localhost:8000"})
    assert shown("http://me:secret@host:1/x") == "http://host:1/x"


@pytest.mark.parametrize(
    ("kind", "status", "ours"),
    [
        (tinker.AuthenticationError, 401, NotAllowedError),
        (tinker.PermissionDeniedError, 403, NotAllowedError),
        (tinker.RateLimitError, 429, QuotaError),
        (tinker.InternalServerError, 500, NetworkError),
        (tinker.NotFoundError, 404, NotFoundError),
        (tinker.BadRequestError, 400, RlfeError),
    ],
)
def test_each_refusal_has_its_exit_code(kind: Any, status: int, ours: type[RlfeError]) -> None:
    import httpx

    response = httpx.Response(status, request=httpx.Request("POST", "http://h"))
    outer = ValueError("Error retrieving result")
    outer.__cause__ = kind("told", response=response, body=None)
    found = translated(outer, "sampling", "http://h")
    assert type(found) is ours
    assert "while sampling: told" in found.what
    if ours is RlfeError:
        assert type(translated(outer, OPENING, "http://h")) is NotFoundError


class Spelling:
    """A tokenizer of letters: token 0 ends, others are code points."""

    stop_token_ids = (0,)

    def decode(self, tokens: Any) -> str:
        return "".join(chr(token) for token in tokens if token)

    def token_of(self, text: str) -> int | None:
        return 1 if text == "<end>" else None


def a_sampling(**other: Any) -> Sampling:
    return Sampling(**{"n": 1, "temperature": 1.0, "max_tokens": 8, "seed": 5, **other})


def one(sampling: Sampling, tokens: list[int], reason: str, logprobs: Any = ...) -> Any:
    row = [-0.5] * len(tokens) if logprobs is ... else logprobs
    sequence = SimpleNamespace(tokens=tokens, logprobs=row, stop_reason=reason)
    request = Request(id="1", prompt_ids=(1,), sampling=sampling)
    return completions(request, SimpleNamespace(sequences=[sequence]), Spelling(), 3)[0]


def test_end_tokens_and_stop_strings_end_a_completion_wherever_the_server_did() -> None:
    a, b = ord("a"), ord("b")
    plain = one(a_sampling(), [a, b, 0], "stop")
    assert (plain.token_ids, plain.text, plain.finish) == ((a, b, 0), "ab", Finish.STOP)
    assert plain.policy_step == 3
    beyond = one(a_sampling(stop=("##",)), [a, 0, b, b], "length")  # strings switched it off there
    assert (beyond.token_ids, beyond.text, beyond.finish) == ((a, 0), "a", Finish.STOP)
    assert len(beyond.logprobs) == 2
    string = one(a_sampling(stop=("bb",)), [a, b, b], "stop")
    assert (string.token_ids, string.text, string.finish) == ((a, b, b), "a", Finish.STOP)
    assert one(a_sampling(), [a, b], "length").finish is Finish.LENGTH
    special = one(a_sampling(stop=("<end>",)), [a, 1], "stop")
    assert (special.text, special.finish) == ("a", Finish.STOP)


def test_samples_without_log_probabilities_are_refused() -> None:
    with pytest.raises(RlfeError, match="no log-probability"):
        one(a_sampling(), [1, 2], "length", logprobs=None)
    request = Request(id="1", prompt_ids=(1,), sampling=a_sampling(n=2))
    with pytest.raises(RlfeError, match="gave 0 samples, 2 were asked for"):
        completions(request, SimpleNamespace(sequences=[]), Spelling(), 0)


def test_sampling_settings_are_all_given() -> None:
    found = sampling_params(a_sampling(seed=2**61 + 9, top_k=0, stop_token_ids=(4,)), Spelling())
    assert found.stop == [0, 4]
    assert (found.top_k, found.top_p, found.temperature, found.max_tokens) == (-1, 1.0, 1.0, 8)
    assert 0 <= found.seed < 2_000_000_000
    assert sampling_params(a_sampling(stop=("\n",)), Spelling()).stop == ["\n"]
    with pytest.raises(RequestError, match=r"min_p = 0.1"):
        sampling_params(a_sampling(min_p=0.1), Spelling())


def test_targets_are_the_parts_that_the_api_knows() -> None:
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert trained_parts("all-linear") == (True, True)
    assert trained_parts(attention) == (True, False)
    assert trained_parts(("gate_proj", "up_proj", "down_proj")) == (False, True)
    with pytest.raises(RequestError, match=r"lora.targets = \('q_proj',\)"):
        trained_parts(("q_proj",))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora.rank": 0}, "lora.rank = 0"),
        ({"lora.alpha": 64.0}, "fixed alpha of 32"),
        ({"entropy.coef": 0.001}, "not of the whole vocabulary"),
        ({"filter.metric": "entropy", "filter.strategy": "top_p"}, 'filter.metric = "entropy"'),
        ({"diagnostics.grad_every": 5}, "without applying it"),
        ({"train.temperature": 0.7}, "scores at temperature 1"),
        ({"service.reduction": "mean", "optim.grad_clip": 1.0}, "do not clip"),
        ({"engine.sampler": "vllm"}, '"tinker" goes with itself only'),
    ],
)
def test_what_the_api_cannot_do_is_refused_before_any_work(
    changes: dict[str, Any], said: str
) -> None:
    engine = {"engine.sampler": "tinker", "engine.learner": "tinker", "lora.rank": 4}
    good = config.load([], flags=engine).recipe
    assert config.check(good) is not None
    with pytest.raises(RequestError) as caught:
        config.check(config.load([], flags={**engine, **changes}).recipe)
    assert said in caught.value.what


def test_gradients_and_entropies_alone_are_refused(
    open_engines: Callable[..., Engines],
) -> None:
    sampler, learner = open_engines()
    with pytest.raises(RequestError, match="no entropies"):
        learner.entropies(sampled(sampler))
    with pytest.raises(RequestError, match="without applying it"):
        learner.gradient_norm(sampled(sampler), MeanLogp(1))
    with pytest.raises(RequestError, match="not from a folder"):
        sampler.load(Path("runs/x/global_step_4"))
    assert torch.is_grad_enabled()
