"""vLLM as a sampler. Everything that starts an engine is skipped where vllm is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlfe.engines.adapter import learner_name, stored_name
from rlfe.engines.base import Snapshot
from rlfe.engines.learner import TransformersLearner
from rlfe.engines.vllm import VllmSampler
from rlfe.engines.vllm_settings import (
    Settings,
    engine_arguments,
    fits,
    installed,
    may_share_process,
)
from rlfe.errors import RequestError, RlfeError
from rlfe.types import Batch, Finish, Prompt, Request, Sampling
from tests.tiny_model import write_tiny_model

with_vllm = pytest.mark.skipif(
    not installed(), reason="vllm is not installed (pip install 'rlfe[vllm]')"
)
quiet = pytest.mark.filterwarnings("ignore")  # vllm and what it imports warn at import
LONG = "def add(a, b): return a + b  # longer than a block of the prefix cache, which has 128"
MAX_LEN = 384


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five checkpoints of one architecture; vLLM's CPU attention needs heads of 32 or more."""
    root = tmp_path_factory.mktemp("checkpoints")
    return [
        write_tiny_model(root / f"global_step_{30 * seed}", seed=seed, head_dim=64)
        for seed in range(1, 6)
    ]


@pytest.fixture(scope="module")
def sampler(checkpoints: list[Path]) -> Iterator[VllmSampler]:
    made = VllmSampler(checkpoints[0], device="cpu", max_len=MAX_LEN, same_process=True)
    yield made
    made.close()


def a_request(sampler: VllmSampler, name: str = "a", text: str = LONG * 3, **other) -> Request:
    values = {"n": 1, "temperature": 0.0, "max_tokens": 16, "seed": 5} | other
    ids = sampler.tokenizer.encode(Prompt(format="x", text=text))
    return Request(id=name, prompt_ids=ids, sampling=Sampling(**values))


def tokens(sampler: VllmSampler, *requests: Request) -> dict[str, list[tuple[int, ...]]]:
    done = sampler.generate(requests)
    return {name: [part.token_ids for part in parts] for name, parts in done}


def scored(learner: TransformersLearner, request: Request, parts) -> np.ndarray:
    """Trainer's minus sampler's log-probability of every sampled token."""
    rows = [(*request.prompt_ids, *part.token_ids) for part in parts]
    ids_BL = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask_BL, logp_BL = np.zeros(ids_BL.shape, bool), np.zeros(ids_BL.shape, np.float32)
    for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
        ids_BL[index, : len(row)] = row
        mask_BL[index, len(request.prompt_ids) : len(row)] = True
        logp_BL[index, len(request.prompt_ids) : len(row)] = part.logprobs
    nothing_B = np.zeros(len(rows))
    batch = Batch(
        ids_BL=ids_BL,
        mask_BL=mask_BL,
        behavior_logp_BL=logp_BL,
        advantage_B=nothing_B,
        weight_B=nothing_B,
        successes_B=nothing_B.astype(np.int64),
        group_B=nothing_B.astype(np.int64),
        source_B=nothing_B.astype(np.int8),
    )
    return (learner.logprobs(batch) - logp_BL)[mask_BL]


# without an engine


def test_arguments_leave_nothing_to_the_checkpoint_or_to_defaults(tmp_path: Path) -> None:
    settings = Settings(dtype="bfloat16", on_cpu=False, same_process=False, max_len=1024)
    found = engine_arguments(tmp_path, settings)
    assert found["generation_config"] == "vllm"
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["load_format"] == "safetensors"
    assert "trust_remote_code" not in found
    assert found["gpu_memory_utilization"] == 0.9
    assert found["max_num_seqs"] == 512
    assert found["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"


def test_graphs_are_captured_for_every_size_that_is_decoded(tmp_path: Path) -> None:
    settings = Settings(dtype="bfloat16", on_cpu=False, same_process=False, sequences=768)
    found = engine_arguments(tmp_path, settings)
    assert found["max_num_seqs"] == 768
    assert found["compilation_config"]["max_cudagraph_capture_size"] == 768


def test_a_rank_is_rounded_up_to_one_that_vllm_takes(tmp_path: Path) -> None:
    settings = Settings(dtype="bfloat16", on_cpu=True, same_process=True, lora_rank=20)
    assert engine_arguments(tmp_path, settings)["max_lora_rank"] == 32


def test_a_rank_that_vllm_does_not_take_is_refused(tmp_path: Path) -> None:
    settings = Settings(dtype="bfloat16", on_cpu=True, same_process=True, lora_rank=513)
    with pytest.raises(RequestError, match=r"lora.rank = 513 is more than vLLM takes \(512\)"):
        engine_arguments(tmp_path, settings)


def test_checkpoints_of_one_architecture_fit_one_engine(checkpoints: list[Path]) -> None:
    assert fits(checkpoints[0], checkpoints[1])


def test_another_head_or_another_tokenizer_needs_a_new_engine(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    untied = write_tiny_model(tmp_path / "untied", head_dim=64, tied=False)
    assert not fits(checkpoints[0], untied)
    other = write_tiny_model(tmp_path / "other", head_dim=64)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert not fits(checkpoints[0], other)


def test_adapter_names_go_there_and_back() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    stored = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert stored_name(name) == stored
    assert learner_name(stored) == name


def test_weights_survive_the_way_to_another_process() -> None:
    import torch

    from rlfe.engines.handover import arrived, packed

    weights = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(3, dtype=torch.bfloat16)}
    kind, payload = packed(weights, same_process=False)
    assert kind == "bytes"
    found = arrived(kind, payload, None)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_what_is_read_back_is_norms_and_the_embedding() -> None:
    import torch

    from rlfe.engines.vllm_worker import compared

    given = {
        "model.embed_tokens.weight": torch.ones(10, 4),
        "model.layers.0.input_layernorm.weight": torch.ones(4),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
        "model.layers.1.input_layernorm.weight": torch.ones(4),
        "model.layers.1.self_attn.o_proj.weight": torch.ones(4, 4),
        "model.norm.weight": torch.ones(4),
    }
    held = {name: tensor for name, tensor in given.items() if "q_proj" not in name}
    held["model.embed_tokens.weight"] = torch.ones(64, 4)  # padded
    held["model.layers.1.self_attn.o_proj.weight"] = torch.ones(0)  # packed by the CPU build
    assert compared(given, held) == [
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ]
    held["model.embed_tokens.weight"] = torch.ones(5, 4)  # divided over two GPUs
    assert "model.embed_tokens.weight" not in compared(given, held)


def test_float_logits_are_sums_that_were_not_rounded() -> None:
    import torch

    from rlfe.engines.vllm_worker import _float_logits

    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    head = SimpleNamespace(weight=torch.tensor([[20.0, 0.0625], [1.0, 2.0], [9.0, 9.0]]).bfloat16())
    processor = SimpleNamespace(_gather_logits=lambda logits: logits, org_vocab_size=2)
    found = _float_logits(processor, hidden, head, torch.tensor([0.0, 0.5, 0.0]))
    assert found is not None
    assert found.tolist() == [[20.0625, 3.5]]  # bf16 would say 20.0; the third row is padding


@pytest.mark.skipif(installed(), reason="vllm is installed")
def test_without_vllm_the_engine_is_refused_in_words(checkpoints: list[Path]) -> None:
    with pytest.raises(RequestError, match="needs vllm, which is not installed") as caught:
        VllmSampler(checkpoints[0])
    assert "rlfe[vllm]" in caught.value.hint


# with an engine


@quiet
@with_vllm
def test_one_engine_serves_five_checkpoints(sampler: VllmSampler, checkpoints: list[Path]) -> None:
    sampler.load(checkpoints[0])
    starts, request = sampler.engine_starts, a_request(sampler)
    prints, replies = set(), set()
    for checkpoint in checkpoints:
        begin = time.monotonic()
        prints.add(sampler.load(checkpoint))
        assert time.monotonic() - begin < 1.0
        replies.add(tokens(sampler, request)["a"][0])
    assert sampler.engine_starts == starts
    assert len(prints) == len(replies) == 5


@quiet
@with_vllm
@pytest.mark.parametrize("tied", [True, False])
def test_reloaded_weights_equal_a_fresh_engine(
    sampler: VllmSampler, tied: bool, tmp_path: Path
) -> None:
    first, second = (
        write_tiny_model(tmp_path / f"global_step_{seed}", seed=seed, head_dim=64, tied=tied)
        for seed in (1, 2)
    )
    sampler.load(first)
    starts = sampler.engine_starts
    requests = [a_request(sampler, str(length), (LONG * 4)[:length]) for length in (40, 200, 300)]
    before = tokens(sampler, *requests)  # fills the prefix cache with the first weights' keys
    sampler.load(second)
    assert sampler.verify_reload(requests) == ()
    assert sampler.engine_starts == starts + 1  # the fresh one
    assert tokens(sampler, *requests) != before


@quiet
@with_vllm
def test_a_prefix_cache_that_is_not_reset_is_seen(
    sampler: VllmSampler, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.load(checkpoints[0])
    request = a_request(sampler, max_tokens=64)
    tokens(sampler, request)
    from vllm import LLM

    monkeypatch.setattr(LLM, "reset_prefix_cache", lambda self: True)
    sampler.load(checkpoints[1])
    assert sampler.verify_reload([request]) == ("a",)


@quiet
@with_vllm
def test_an_engine_that_keeps_its_weights_is_caught(
    sampler: VllmSampler, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sampler.load(checkpoints[0])
    monkeypatch.setattr(GPUModelRunner, "reload_weights", lambda self, **_: None)
    with pytest.raises(RlfeError, match="does not hold the weights that it was given"):
        sampler.load(checkpoints[1])


@quiet
@with_vllm
def test_a_folder_that_does_not_fit_gets_an_engine_of_its_own(
    sampler: VllmSampler, checkpoints: list[Path], tmp_path: Path
) -> None:
    sampler.load(checkpoints[0])
    starts = sampler.engine_starts
    sampler.load(write_tiny_model(tmp_path / "global_step_7", head_dim=32))
    done = dict(sampler.generate([a_request(sampler)]))
    assert done["a"][0].policy_step == 7
    sampler.load(checkpoints[0])
    assert sampler.engine_starts == starts + 2


@quiet
@with_vllm
def test_a_snapshot_from_memory_scores_like_the_trainer(
    sampler: VllmSampler, checkpoints: list[Path]
) -> None:
    learner = TransformersLearner(checkpoints[2], device="cpu", temperature=0.6)
    snapshot = learner.snapshot(4)
    sampler.load(checkpoints[0])
    assert sampler.load(snapshot) == snapshot.fingerprint
    request = a_request(sampler, n=8, temperature=0.6, max_tokens=24)
    parts = dict(sampler.generate([request]))["a"]
    assert {part.policy_step for part in parts} == {4}
    difference = scored(learner, request, parts)
    assert len(difference) > 100
    assert np.abs(difference).max() < 1e-4  # both compute in float32


@quiet
@with_vllm
def test_weights_that_do_not_fit_are_an_error(sampler: VllmSampler, checkpoints) -> None:
    import torch

    sampler.load(checkpoints[0])
    wrong = Snapshot(version=1, fingerprint="", weights={"model.norm.weight": torch.ones(7)})
    with pytest.raises(RlfeError, match="cannot take the new weights"):
        sampler.load(wrong)
    assert sampler.load(checkpoints[0]) != ""  # by a fresh engine


@quiet
@with_vllm
def test_a_stop_string_is_cut_from_the_text_and_its_tokens_stay(
    sampler: VllmSampler, checkpoints: list[Path]
) -> None:
    sampler.load(checkpoints[0])
    asked = [a_request(sampler, text=LONG[:length], max_tokens=24) for length in range(5, 45)]
    request, free = max(
        ((one, dict(sampler.generate([one]))["a"][0]) for one in asked),
        key=lambda pair: len(pair[1].text),
    )
    stop = free.text[4:7]
    stopping = replace(request, sampling=replace(request.sampling, stop=(stop,)))
    (cut,) = dict(sampler.generate([stopping]))["a"]
    place = free.text.index(stop)
    assert (cut.text, cut.finish) == (free.text[:place], Finish.STOP)
    assert cut.token_ids == free.token_ids[: place + 3]
    assert len(cut.logprobs) == len(cut.token_ids)


@quiet
@with_vllm
def test_a_token_limit_and_an_end_token_are_told_apart(
    sampler: VllmSampler, checkpoints: list[Path]
) -> None:
    sampler.load(checkpoints[0])
    request = a_request(sampler, n=64, temperature=1.5, max_tokens=40)
    parts = dict(sampler.generate([request]))["a"]
    assert {part.finish for part in parts} == {Finish.STOP, Finish.LENGTH}
    for part in parts:
        ended = part.token_ids[-1] in sampler.tokenizer.stop_token_ids
        assert part.finish is (Finish.STOP if ended else Finish.LENGTH)
        assert ended or len(part.token_ids) == 40
        assert not part.text.endswith(("<eos>", "<end>"))
        assert len(part.logprobs) == len(part.token_ids)
        assert max(part.logprobs) <= 0


@quiet
@with_vllm
def test_the_same_tokens_come_without_log_probabilities(
    sampler: VllmSampler, checkpoints: list[Path]
) -> None:
    sampler.load(checkpoints[0])
    request = a_request(sampler, n=4, temperature=1.0, max_tokens=20)
    plain = replace(request, sampling=replace(request.sampling, logprobs=False))
    full, bare = (dict(sampler.generate([one]))["a"] for one in (request, plain))
    assert [part.token_ids for part in bare] == [part.token_ids for part in full]
    assert [part.logprobs for part in bare] == [()] * 4


@quiet
@with_vllm
def test_a_prompt_without_room_is_refused_by_name_and_the_engine_goes_on(
    sampler: VllmSampler, checkpoints: list[Path]
) -> None:
    sampler.load(checkpoints[0])
    wide = a_request(sampler, "too-wide", LONG * 5)
    with pytest.raises(RlfeError, match=r"request too-wide \(\d+ prompt tokens, max_tokens 16\)"):
        tokens(sampler, a_request(sampler), wide)
    assert list(tokens(sampler, a_request(sampler))) == ["a"]


@quiet
@with_vllm
def test_greedy_samples_of_a_request_are_copies(sampler: VllmSampler, checkpoints) -> None:
    sampler.load(checkpoints[0])
    parts = tokens(sampler, a_request(sampler, n=3))["a"]
    assert len(parts) == 3
    assert len(set(parts)) == 1


@quiet
@with_vllm
def test_a_call_that_is_left_half_way_leaves_nothing_behind(
    sampler: VllmSampler, checkpoints: list[Path]
) -> None:
    sampler.load(checkpoints[0])
    short = a_request(sampler, "short", max_tokens=1)
    long = a_request(sampler, "long", n=4, temperature=1.0, max_tokens=100)
    running = sampler.generate([long, short])
    assert next(running)[0] == "short"  # as they finish, not in order
    running.close()
    assert list(tokens(sampler, a_request(sampler, "next"))) == ["next"]


# each in a process of its own, after those that share one


@quiet
@with_vllm
def test_a_bf16_engine_scores_closer_to_the_trainer_with_float_logits(
    checkpoints: list[Path],
) -> None:
    import torch

    learner = TransformersLearner(checkpoints[0], device="cpu")
    with torch.no_grad():  # what the engine holds
        for tensor in learner.model.parameters():
            tensor.copy_(tensor.bfloat16().float())
    sampler = VllmSampler(checkpoints[0], device="cpu", dtype="bfloat16", max_len=MAX_LEN)
    request = a_request(sampler, n=64, temperature=1.0, max_tokens=32)
    means = []
    for on in (False, True):
        sampler.float_head(on)
        parts = dict(sampler.generate([request]))["a"]
        means.append(np.abs(scored(learner, request, parts)).mean())
    sampler.close()
    assert 0 < means[1] < means[0] < 0.1


@quiet
@with_vllm
def test_an_adapter_is_served_as_the_trainer_computes_it(checkpoints: list[Path]) -> None:
    import torch

    from rlfe.engines.weights import Lora

    lora = Lora(rank=4, alpha=8.0, targets="all-linear", seed=0)
    learner = TransformersLearner(checkpoints[0], device="cpu", lora=lora)
    sampler = VllmSampler(checkpoints[0], device="cpu", max_len=MAX_LEN, lora=lora)
    request = a_request(sampler, n=4, temperature=1.0)
    replies = set()
    for version in (0, 1, 2):
        snapshot = learner.snapshot(version)
        assert sampler.load(snapshot) == snapshot.fingerprint
        parts = dict(sampler.generate([request]))["a"]
        assert np.abs(scored(learner, request, parts)).max() < 1e-4
        replies.add(tokens(sampler, a_request(sampler))["a"][0])
        with torch.no_grad():
            for name, tensor in learner.model.named_parameters():
                if ".lora_" in name:
                    tensor.add_(torch.full_like(tensor, 0.2))
    assert len(replies) > 1
    assert sampler.engine_starts == 1
    sampler.close()


@quiet
@with_vllm
def test_a_process_of_its_own_keeps_our_stdout_and_torch_as_they_are(
    checkpoints: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    sampler = VllmSampler(checkpoints[0], device="cpu", max_len=MAX_LEN)
    learner = TransformersLearner(checkpoints[1], device="cpu")
    snapshot = learner.snapshot(1)
    assert sampler.load(snapshot) == snapshot.fingerprint
    request = a_request(sampler, n=4, temperature=1.0)
    parts = dict(sampler.generate([request]))["a"]
    assert np.abs(scored(learner, request, parts)).max() < 1e-4
    sampler.close()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert capfd.readouterr().out == ""


HOLDER = """
import sys, time
from rlfe.engines.vllm import VllmSampler

if __name__ == "__main__":
    sampler = VllmSampler(sys.argv[1], device="cpu", max_len=256)
    sampler.load(sampler._folder)
    print("ready", flush=True)
    time.sleep(300)
"""


@quiet
@with_vllm
def test_the_engine_ends_with_a_run_that_is_killed(checkpoints: list[Path], tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    command = [sys.executable, str(script), str(checkpoints[0])]
    path = str(Path(__file__).parents[1])
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        import psutil  # comes with vllm

        family = psutil.Process(holder.pid).children(recursive=True)
        holder.kill()
        assert len(family) >= 1
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []


def test_the_engine_shares_our_process_only_on_one_gpu_of_a_run_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert may_share_process("cuda", False, 1)
    assert not may_share_process("cpu", True, 1)
    assert not may_share_process("cuda:1", False, 1)  # chosen by an environment variable
    assert not may_share_process("cuda", False, 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not may_share_process("cuda", False, 1)
