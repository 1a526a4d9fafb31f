"""The estimate of GPU memory and the count of FLOPs: literal numbers of a 1.7B shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlfe import config
from rlfe.engines.flops import Flops, flops_of, known_peak, measured_peak
from rlfe.engines.memory import Shape, estimate, needs_checkpointing, ways_out
from rlfe.engines.weights import Lora, load_model
from tests.test_head import a_model

QWEN3_1P7B = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
H200 = 150_754_820_096  # bytes, as nvidia-smi says it (143,771 MiB)


def a_recipe(**changes):
    flags = {name.replace("__", "."): value for name, value in changes.items()}
    return config.load([], flags={"model.path": "x", "engine.sampler": "vllm", **flags}).recipe


def test_the_weights_of_qwen3_1p7b() -> None:
    # the model's own count is 1,720,574,976: 28 x 256 numbers of norms on queries and keys more
    assert Shape.of(QWEN3_1P7B).parameters == 1_720_567_808


def test_activations_per_token_of_qwen3_1p7b() -> None:
    shape = Shape.of(QWEN3_1P7B)
    layer = 26 * 2048 + 10 * 2048 + 10 * 1024 + 8 * 6144
    assert layer == 133_120
    assert shape.activations(2, checkpointing=False) == 28 * layer == 3_727_360
    assert shape.activations(2, checkpointing=True) == 28 * 4 * 2048 + layer == 362_496


def test_compiled_layers_keep_what_was_measured() -> None:
    """On an H200 an update took 49.1 GiB with 8,192 tokens a pass and 65.3 with 16,384
    (docs/results/training-speed), recomputing in passes of 16,384 and 32,768 34.0 and 38.0."""
    shape = Shape.of(QWEN3_1P7B)
    layer = 12 * 2048 + 6 * 2048 + 6 * 1024 + 6 * 6144
    kept = shape.activations(2, checkpointing=False, compiled=True)
    assert kept == 28 * layer == 2_236_416
    assert kept * 8192 / 2**30 == pytest.approx(65.3 - 49.1, rel=0.06)
    again = shape.activations(2, checkpointing=True, compiled=True)
    assert again * 16384 / 2**30 == pytest.approx(38.0 - 34.0, rel=0.2)
    recipe = a_recipe(engine__sleep=True, compute__compile=True)
    found = estimate(recipe, QWEN3_1P7B).parts
    assert sum(found.values()) - found["snapshots"] - found["overhead"] == pytest.approx(
        65.3 * 2**30, rel=0.06
    )


def test_the_parts_of_a_full_fine_tune() -> None:
    found = estimate(a_recipe(engine__gpu_share=0.35), QWEN3_1P7B)
    assert found.parts == {
        "weights": 6_882_271_232,
        "copies in lower precision": 3_441_135_616,
        "gradients": 6_882_271_232,
        "AdamW": 13_764_542_464,
        "activations": 16384 * 3_727_360,
        "logits": 3 * 2**30 + 8 * 151936 * 2048,
        "snapshots": 3_441_135_616,
        "overhead": 2_000_000_000,
    }
    assert found.total / 1e9 == pytest.approx(103.19, abs=0.01)
    assert not found.fits(H200)
    assert found.needed(H200) == found.total + int(0.35 * H200)


def test_64_times_8_rollouts_of_3072_tokens_fit_beside_the_sampler() -> None:
    recipe = a_recipe(engine__gpu_share=0.35, compute__gradient_checkpointing=True)
    assert (recipe.train.prompts_per_step, recipe.train.group_size) == (64, 8)
    assert recipe.train.max_tokens == 3072
    found = estimate(recipe, QWEN3_1P7B)
    assert found.total / 1e9 == pytest.approx(48.06, abs=0.01)
    assert found.fits(H200)
    assert ways_out(recipe, QWEN3_1P7B, H200) == []


def test_ways_out_name_what_they_save() -> None:
    recipe = a_recipe(engine__gpu_share=0.5)
    assert ways_out(recipe, QWEN3_1P7B, H200) == [
        "compute.gradient_checkpointing=true (saves 55.1 GB)",
        "compute.compile=true (saves 24.4 GB)",
        "compute.token_budget=8192 (saves 30.5 GB)",
        "engine.sleep=true (saves 75.4 GB while the learner works)",
        "engine.gpu_share=0.31",
        "lora.rank=32",
    ]


def test_lag_reference_lora_and_whole_logits_cost_what_they_hold() -> None:
    plain = estimate(a_recipe(), QWEN3_1P7B).parts
    lag = estimate(a_recipe(lag__steps=4), QWEN3_1P7B).parts
    assert lag["snapshots"] == 5 * plain["snapshots"]
    assert estimate(a_recipe(kl__beta=0.1), QWEN3_1P7B).parts["reference"] == 3_441_135_616
    lora = estimate(a_recipe(lora__rank=32), QWEN3_1P7B).parts
    assert lora["gradients"] == 4 * 34_865_152  # 32 (14 h + 2 q + 2 k + 3 f) in 28 layers
    assert "reference" not in estimate(a_recipe(lora__rank=32, kl__beta=0.1), QWEN3_1P7B).parts
    whole = estimate(a_recipe(compute__logits="full"), QWEN3_1P7B).parts
    assert whole["logits"] == 16 * 16384 * 151936 + 8 * 151936 * 2048
    own = estimate(a_recipe(engine__sampler="transformers"), QWEN3_1P7B)
    assert (own.parts["sampler"], own.sampler_share) == (3_441_135_616, 0.0)
    rows = estimate(a_recipe(train__micro_batch_rollouts=16), QWEN3_1P7B).parts
    assert rows["activations"] == 16 * 4096 * 3_727_360


def test_an_unknown_architecture_is_not_guessed() -> None:
    assert estimate(a_recipe(), {"model_type": "fake"}) is None


def test_auto_stays_off_on_a_cpu() -> None:
    assert needs_checkpointing(a_recipe(engine__device="cpu")) is False


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_the_shape_counts_what_the_model_has(kind: str) -> None:
    model = a_model(kind, tie_word_embeddings=False)
    facts = json.loads(model.config.to_json_string(use_diff=False))
    own = sum(p.numel() for name, p in model.named_parameters() if "q_norm" not in name)
    own -= sum(p.numel() for name, p in model.named_parameters() if "k_norm" in name)
    assert Shape.of(facts).parameters == own


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_what_waits_for_the_backward_pass_is_what_the_formula_says(kind: str) -> None:
    """Bytes that autograd keeps under bfloat16 autocast, by tensors with the row's 48 tokens."""
    model = a_model(kind, "sdpa", tie_word_embeddings=False)
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if 48 in tensor.shape and tensor.numel() >= 48 * 16:  # no rotary table, no statistics
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        model.base_model(input_ids=torch.zeros((1, 48), dtype=torch.long), use_cache=False)
    facts = json.loads(model.config.to_json_string(use_diff=False))
    last_norm = 8 * 32
    expected = 48 * (Shape.of(facts).activations(2, checkpointing=False) + last_norm)
    assert sum(kept.values()) == expected


# --- FLOPs


def test_flops_of_a_pass() -> None:
    flops = Flops(body=10.0, trained_body=10.0, head=4.0, trained_head=4.0, attention=2.0)
    length_R = np.array([3, 1])
    forward = flops.of(length_R, tokens=4, scored=2, graded=False)
    assert forward == 2 * (10 * 4 + 4 * 2) + 2 * 2 * (9 + 1) == 136
    assert flops.of(length_R, tokens=4, scored=2, graded=True) == 3 * 136
    frozen = Flops(body=10.0, trained_body=1.0, head=4.0, trained_head=0.0, attention=2.0)
    assert frozen.of(length_R, tokens=4, scored=2, graded=True) == 2 * 96 + 2 * 4 + 3 * 40


def test_6_n_and_attention_of_qwen3_1p7b() -> None:
    """One row of 1,024 tokens, all with logits: 6 N d + 6 layers width d^2."""
    body, head = 28 * 50_331_648, 151936 * 2048
    flops = Flops(body=body, trained_body=body, head=head, trained_head=head, attention=28 * 2048)
    found = flops.of(np.array([1024]), tokens=1024, scored=1024, graded=True)
    assert found == 6 * (body + head) * 1024 + 6 * 28 * 2048 * 1024**2 == 10_931_228_639_232


def test_flops_are_counted_from_the_model(tiny_model: Path) -> None:
    cpu = torch.device("cpu")
    found = flops_of(load_model(tiny_model, torch.float32, cpu, None))
    # q 32x32, k and v 32x16, o 32x32, three of 32x64; the tied head is 104x32
    body = 2 * (2 * 1024 + 2 * 512 + 3 * 2048)
    assert (found.body, found.trained_body, found.head) == (body, body, 104 * 32)
    assert (found.trained_head, found.attention) == (104 * 32, 2 * 32)
    lora = Lora(rank=2, alpha=2, targets=("q_proj",), seed=0)
    found = flops_of(load_model(tiny_model, torch.float32, cpu, lora))
    assert (found.body - body, found.trained_body, found.trained_head) == (256, 256, 0)


def test_peaks_by_name_and_by_trial() -> None:
    assert known_peak("NVIDIA H200") == known_peak("NVIDIA H100 80GB HBM3") == 989.5e12
    assert known_peak("NVIDIA H100 PCIe") == 756e12
    assert known_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert known_peak("Some GPU") is None
    assert measured_peak(torch.device("cpu"), size=64) > 1e6
