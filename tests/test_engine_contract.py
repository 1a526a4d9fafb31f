"""One contract for every engine present: what the training loop and the evaluation rely on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlfe import config
from rlfe.checkpoints import problems
from rlfe.cli import eval as evaluation
from rlfe.cli import sweep, train
from rlfe.cli.main import run
from rlfe.engines import LEARNERS, SAMPLERS, check_engines, make_engines
from rlfe.engines.base import Learner, Sampler
from rlfe.engines.vllm_settings import installed
from rlfe.errors import RequestError, RlfeError
from rlfe.schema import Engine, Lora, Model, Recipe
from rlfe.types import Batch, Finish, Prompt, Request, Sampling
from tests.tiny_model import write_tiny_model

VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.slow,  # an engine of its own for each test
        pytest.mark.skipif(not installed(), reason="vllm is not installed (rlfe[vllm])"),
        pytest.mark.filterwarnings("ignore"),  # vllm and what it imports warn
    ],
)


class MeanLogp:
    """Minus the mean log-probability of the masked tokens: a loss with a known direction."""

    entropy_gradient = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def needs_gradient(self, batch: Batch) -> np.ndarray:
        return np.ones(len(batch.ids_BL), bool)

    def __call__(self, rows, logp_BL, entropy_BL):
        loss = -logp_BL.sum() / self.tokens
        return loss, {"loss/total": loss.item()}


@pytest.fixture(params=["fake", "transformers", "tinker", VLLM])
def engines(request, tiny_model: Path, tmp_path_factory, one_thread: None):
    learner = "transformers" if request.param == "vllm" else request.param
    engine, lora = Engine(sampler=request.param, learner=learner, device="cpu", threads=1), Lora()
    if request.param == "vllm":  # its attention on a CPU needs wider heads
        tiny_model = write_tiny_model(tmp_path_factory.mktemp("wide") / "tiny", head_dim=64)
    if request.param == "tinker":  # a server of its own, which trains LoRA weights only
        lora = Lora(rank=4)
        request.getfixturevalue("tinker_server")
    recipe = Recipe(engine=engine, model=Model(path=str(tiny_model), dtype="float32"), lora=lora)
    sampler, learner = make_engines(recipe)
    yield sampler, learner
    sampler.close()
    learner.close()


def a_request(sampler: Sampler, name: str, text: str = "abc", **other) -> Request:
    values = {"n": 3, "temperature": 1.0, "max_tokens": 12, "seed": 5} | other
    ids = sampler.tokenizer.encode(Prompt(format="x", text=text))
    return Request(id=name, prompt_ids=ids, sampling=Sampling(**values))


def a_batch(sampler: Sampler, completions, prompt_ids) -> Batch:
    rows = [(*prompt_ids, *done.token_ids) for done in completions]
    width, start = max(len(row) for row in rows), len(prompt_ids)
    ids_BL = np.zeros((len(rows), width), np.int64)
    mask_BL, logp_BL = np.zeros(ids_BL.shape, bool), np.zeros(ids_BL.shape, np.float32)
    for index, (row, done) in enumerate(zip(rows, completions, strict=True)):
        ids_BL[index, : len(row)] = row
        mask_BL[index, start : len(row)] = True
        logp_BL[index, start : len(row)] = done.logprobs
    return Batch(
        ids_BL=ids_BL,
        mask_BL=mask_BL,
        behavior_logp_BL=logp_BL,
        advantage_B=np.ones(len(rows)),
        weight_B=np.ones(len(rows)),
        successes_B=np.ones(len(rows), np.int64),
        group_B=np.zeros(len(rows), np.int64),
        source_B=np.zeros(len(rows), np.int8),
    )


def sampled(sampler: Sampler) -> Batch:
    request = a_request(sampler, "1")
    return a_batch(sampler, dict(sampler.generate([request]))["1"], request.prompt_ids)


def test_a_request_gives_n_whole_completions(engines: tuple[Sampler, Learner]) -> None:
    sampler, _ = engines
    done = dict(sampler.generate([a_request(sampler, "a"), a_request(sampler, "b", n=2)]))
    assert {name: len(found) for name, found in done.items()} == {"a": 3, "b": 2}
    for completion in (*done["a"], *done["b"]):
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 12
        assert all(value <= 0 for value in completion.logprobs)
        ended = completion.token_ids[-1] in sampler.tokenizer.stop_token_ids
        assert completion.finish is (Finish.STOP if ended else Finish.LENGTH)


def test_completions_do_not_depend_on_the_other_requests(engines: tuple[Sampler, Learner]) -> None:
    sampler, _ = engines
    if not sampler.exact:
        pytest.skip(f"{sampler.name} agrees up to rounding only")
    mine = a_request(sampler, "mine", "a longer prompt", seed=9)
    others = [a_request(sampler, str(i), "x" * i, seed=i, n=5) for i in range(1, 6)]
    alone = dict(sampler.generate([mine]))["mine"]
    among = dict(sampler.generate([*others[:3], mine, *others[3:]]))["mine"]
    assert alone == among  # tokens and log-probabilities, bit for bit


def test_another_seed_gives_other_samples(engines: tuple[Sampler, Learner]) -> None:
    sampler, _ = engines
    first = dict(
        sampler.generate([a_request(sampler, "a", seed=1), a_request(sampler, "b", seed=2)])
    )
    assert first["a"] != first["b"]


def test_the_receiver_of_a_snapshot_holds_its_fingerprint(engines) -> None:
    sampler, learner = engines
    snapshot = learner.snapshot(3)
    assert sampler.load(snapshot) == snapshot.fingerprint
    assert dict(sampler.generate([a_request(sampler, "a")]))["a"][0].policy_step == 3


def test_an_update_changes_the_fingerprint(engines: tuple[Sampler, Learner]) -> None:
    sampler, learner = engines
    before = learner.snapshot(0).fingerprint
    batch = sampled(sampler)
    seen = learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
    assert seen.logp_BL.shape == batch.ids_BL.shape
    assert np.isfinite(learner.optim_step(0.1))
    assert learner.snapshot(1).fingerprint != before


def test_fresh_log_probabilities_agree_with_the_sampler(engines: tuple[Sampler, Learner]) -> None:
    sampler, learner = engines
    sampler.load(learner.snapshot(0))
    batch = sampled(sampler)
    difference_BL = (learner.logprobs(batch) - batch.behavior_logp_BL)[batch.mask_BL]
    assert np.abs(difference_BL).max() < 1e-5


def test_state_comes_back_as_it_was(engines: tuple[Sampler, Learner], tmp_path: Path) -> None:
    sampler, learner = engines
    batch = sampled(sampler)
    learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
    learner.optim_step(0.1)
    learner.save_state(tmp_path)
    saved = learner.snapshot(1).fingerprint
    learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
    learner.optim_step(0.1)
    twice = learner.snapshot(2).fingerprint
    learner.load_state(tmp_path)
    assert learner.snapshot(1).fingerprint == saved
    learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
    learner.optim_step(0.1)
    assert learner.snapshot(2).fingerprint == twice  # moments and counts came back too


def test_a_state_with_a_missing_part_is_an_error(engines, tmp_path: Path) -> None:
    _, learner = engines
    with pytest.raises(RlfeError, match="no whole state"):
        learner.load_state(tmp_path)


def test_a_snapshot_survives_a_file(engines: tuple[Sampler, Learner], tmp_path: Path) -> None:
    _, learner = engines
    snapshot = learner.snapshot(7)
    learner.save_snapshot(snapshot, tmp_path / "7")
    back = learner.load_snapshot(tmp_path / "7")
    assert (back.version, back.fingerprint) == (7, snapshot.fingerprint)


def test_an_exported_folder_is_complete(engines: tuple[Sampler, Learner], tmp_path: Path) -> None:
    _, learner = engines
    learner.export(tmp_path)
    assert problems(tmp_path, need_tokenizer_config=True) == []


def test_every_built_engine_is_under_contract() -> None:
    assert set(SAMPLERS) == {"transformers", "vllm", "tinker", "fake"}
    assert set(LEARNERS) == {"transformers", "tinker", "fake"}


def test_every_command_offers_the_engines_that_it_can_use() -> None:
    offered = {
        command: list(next(p for p in command.params if p.name == "engine").type.choices)
        for command in (train.command, evaluation.command, sweep.command)
    }
    assert offered[train.command] == offered[sweep.command] == list(SAMPLERS)
    assert offered[evaluation.command] == [name for name in SAMPLERS if name != "tinker"]


def test_an_unknown_engine_is_refused_in_words(capsys) -> None:
    with pytest.raises(RequestError, match="'transformers', 'tinker' or 'fake'"):
        config.load([], ["engine.learner=jax"])
    assert run(["train", "--recipe", "tiny", "--dry-run", "--engine", "jax"], {}) == 2
    assert "'tinker'" in capsys.readouterr().err
    assert run(["eval", "--base", "model", "--task", "gsm8k", "--engine", "tinker"], {}) == 2
    assert "'tinker' is not one of" in capsys.readouterr().err


@pytest.mark.skipif(installed(), reason="vllm is installed")
def test_vllm_that_is_not_installed_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(RequestError, match='engine "vllm" needs vllm, which is not installed'):
        check_engines(Recipe(engine=Engine(sampler="vllm")))
