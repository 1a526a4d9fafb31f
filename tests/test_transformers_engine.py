"""The transformers engine: tokenising, drawing, sampling, learning, and what it writes."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rlfe.checkpoints import problems
from rlfe.engines.drawing import draw, uniforms
from rlfe.engines.fingerprint import fingerprint
from rlfe.engines.generation import cut
from rlfe.engines.learner import TransformersLearner
from rlfe.engines.packing import sequences
from rlfe.engines.tokenizer import HfTokenizer, end_token_ids
from rlfe.engines.transformers import TransformersSampler, packed
from rlfe.engines.weights import Lora
from rlfe.errors import NotFoundError, RequestError, RlfeError
from rlfe.training.batching import joined
from rlfe.types import Batch, Finish, Message, Prompt, Request, Sampling
from rlfe.weights import read_header
from tests.test_engine_contract import MeanLogp, a_batch, a_request
from tests.tiny_model import write_tiny_model

LORA = Lora(rank=4, alpha=8, targets="all-linear", seed=1)


@pytest.fixture
def sampler(tiny_model: Path, one_thread: None) -> TransformersSampler:
    return TransformersSampler(tiny_model, device="cpu")


def small_batch(ids_BL: np.ndarray, mask_BL: np.ndarray) -> Batch:
    count = len(ids_BL)
    return Batch(
        ids_BL=ids_BL,
        mask_BL=mask_BL,
        behavior_logp_BL=np.zeros(ids_BL.shape, np.float32),
        advantage_B=np.ones(count),
        weight_B=np.ones(count),
        successes_B=np.ones(count, np.int64),
        group_B=np.zeros(count, np.int64),
        source_B=np.zeros(count, np.int8),
    )


def trained(folder: Path, **other) -> tuple[TransformersLearner, object]:
    """A learner after two large updates, and the batch that it saw."""
    values = {"dtype": "float32", "device": "cpu"} | other
    learner = TransformersLearner(folder, **values)
    sampler = TransformersSampler(folder, device="cpu", lora=other.get("lora"))
    request = a_request(sampler, "1", "some prompt", n=4)
    batch = a_batch(sampler, dict(sampler.generate([request]))["1"], request.prompt_ids)
    for _ in range(2):
        learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
        learner.optim_step(0.01)
    return learner, batch


# --- tokenizer


def test_a_base_prompt_has_one_bos(tiny_model: Path) -> None:
    tokenizer = HfTokenizer(tiny_model)
    assert tokenizer.encode(Prompt(format="x", text="ab"))[0] == 0
    ids = tokenizer.encode(Prompt(format="x", text="<bos>ab"))
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "ab"


def test_a_chat_prompt_goes_through_the_template_and_opens_the_reply(tiny_model: Path) -> None:
    prompt = Prompt(format="x", messages=(Message(role="user", text="hi"),), text="So")
    tokenizer = HfTokenizer(tiny_model)
    ids = tokenizer.encode(prompt)
    assert (ids[0], tokenizer.decode(ids)) == (3, "hi\nSo")
    assert 4 in ids  # <assistant>


def test_the_thinking_switch_reaches_the_template_only_when_set(tiny_model: Path) -> None:
    prompt = Prompt(format="x", messages=(Message(role="user", text="hi"),))
    first = {switch: HfTokenizer(tiny_model, thinking=switch).encode(prompt)[0] for switch in
             (None, True, False)}  # fmt: skip
    assert first == {None: 3, True: 3, False: 5}


def test_a_chat_prompt_without_a_template_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    prompt = Prompt(format="x", messages=(Message(role="user", text="hi"),))
    with pytest.raises(RequestError, match="no chat template"):
        HfTokenizer(tmp_path / "base").encode(prompt)


def test_end_tokens_are_the_union_of_the_three_files(tiny_model: Path) -> None:
    assert end_token_ids(151645, {"eos_token_id": 151643}, {"eos_token_id": [151643, 7]}) == (
        7,
        151643,
        151645,
    )
    assert end_token_ids(None, None, None) == ()
    assert HfTokenizer(tiny_model).stop_token_ids == (1, 6)


def test_a_model_folder_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere does not exist"):
        HfTokenizer(tmp_path / "nowhere")


def test_a_model_folder_without_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match="no tokenizer"):
        HfTokenizer(tmp_path / "bare")


def test_a_damaged_weight_file_is_one_clear_error(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(RlfeError, match="cannot load the model"):
        TransformersSampler(tmp_path / "cut", device="cpu")


# --- drawing


def settings(**other) -> Sampling:
    return Sampling(**({"n": 1, "temperature": 1.0, "max_tokens": 1, "seed": 0} | other))


def shares(sampling: Sampling, probability: list[float], draws: int = 4001) -> list[float]:
    logits_RV = torch.tensor(probability).log().expand(draws, -1)
    uniform_R = torch.linspace(0, 1 - 1e-9, draws, dtype=torch.float64)
    token_R, _ = draw(logits_RV, uniform_R, sampling)
    return [round(float((token_R == token).float().mean()), 2) for token in range(len(probability))]


def test_draws_follow_the_distribution() -> None:
    assert shares(settings(), [0.5, 0.3, 0.2]) == [0.5, 0.3, 0.2]


def test_temperature_divides_the_logits_and_shows_in_the_log_probability() -> None:
    assert shares(settings(temperature=0.5), [0.6, 0.3, 0.1]) == [0.78, 0.2, 0.02]
    logits_RV = torch.tensor([[2.0, 0.0]])
    _, logp_R = draw(logits_RV, torch.tensor([0.0]).double(), settings(temperature=0.5))
    assert logp_R.item() == pytest.approx(-np.log1p(np.exp(-4)), abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert shares(settings(top_p=0.75), [0.1, 0.48, 0.32, 0.1]) == [0, 0.6, 0.4, 0]


def test_top_k_and_min_p_cut_the_tail() -> None:
    assert shares(settings(top_k=2), [0.1, 0.48, 0.32, 0.1]) == [0, 0.6, 0.4, 0]
    assert shares(settings(min_p=0.5), [0.1, 0.48, 0.32, 0.1]) == [0, 0.6, 0.4, 0]


def test_a_flat_distribution_over_a_large_vocabulary_is_looked_at_as_a_whole() -> None:
    logits_RV = torch.zeros(1, 5000)
    token_R, _ = draw(logits_RV, torch.tensor([0.999]).double(), settings(top_p=0.99))
    full_R, _ = draw(logits_RV, torch.tensor([0.0]).double(), settings(top_p=0.99))
    assert token_R.item() != full_R.item()
    assert 0 <= token_R.item() < 5000


def test_greedy_means_greedy() -> None:
    assert shares(settings(temperature=0.0), [0.3, 0.4, 0.3]) == [0, 1, 0]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits_RV = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for uniform in (0.0, 1 - 1e-16):
        token_R, _ = draw(logits_RV, torch.tensor([uniform]).double(), settings())
        assert token_R.item() == 1


def test_the_uniforms_of_a_row_depend_on_seed_and_row_only() -> None:
    few, many = uniforms(settings(n=2, max_tokens=3)), uniforms(settings(n=8, max_tokens=9))
    assert np.array_equal(few, many[:2, :3])
    assert not np.array_equal(many[0], many[1])


# --- sampling


def test_a_stop_string_ends_a_reply_and_is_cut_from_its_text_only(sampler) -> None:
    free = dict(sampler.generate([a_request(sampler, "1", n=1, max_tokens=30)]))["1"][0]
    mark = free.text[3:5]
    request = a_request(sampler, "1", n=1, max_tokens=30, stop=(mark,))
    cut_off = dict(sampler.generate([request]))["1"][0]
    assert cut_off.finish is Finish.STOP
    assert cut_off.text == free.text[: free.text.find(mark)]
    assert sampler.tokenizer.decode(cut_off.token_ids).endswith(mark)


def test_a_stop_string_that_is_a_special_token_stops_at_the_token(sampler) -> None:
    request = a_request(sampler, "1", n=64, max_tokens=200, stop=("<user>",))
    ends = {done.token_ids[-1] for done in dict(sampler.generate([request]))["1"]}
    assert 3 in ends  # <user>
    plain = a_request(sampler, "1", n=64, max_tokens=200)
    assert 3 not in {done.token_ids[-1] for done in dict(sampler.generate([plain]))["1"]}


def test_the_first_stop_string_in_the_text_counts() -> None:
    assert cut("a b c", ("c", "b")) == "a "


def test_shared_batches_agree_with_single_ones_up_to_rounding(sampler, monkeypatch) -> None:
    requests = [a_request(sampler, str(i), "abc" * (i + 1), seed=i, n=4) for i in range(5)]
    alone = dict(sampler.generate(requests))
    monkeypatch.setattr(TransformersSampler, "exact", property(lambda self: False))
    shared = dict(sampler.generate(requests))
    for name, completions in alone.items():
        for one, other in zip(completions, shared[name], strict=True):
            assert one.token_ids == other.token_ids
            assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_a_long_prompt_and_a_long_reply_outgrow_the_first_cache_block(sampler) -> None:
    request = a_request(sampler, "1", "y" * 120, n=6, max_tokens=180, seed=3)
    done = dict(sampler.generate([request]))["1"]
    assert max(len(completion.token_ids) for completion in done) > 140
    batch = a_batch(sampler, done, request.prompt_ids)
    learner = TransformersLearner(sampler.tokenizer.folder, dtype="float32", device="cpu")
    assert np.abs((learner.logprobs(batch) - batch.behavior_logp_BL)[batch.mask_BL]).max() < 1e-5


def test_packing_keeps_settings_apart_and_divides_large_requests() -> None:
    def request(name: str, length: int, n: int, temperature: float = 1.0) -> Request:
        sampling = settings(n=n, temperature=temperature)
        return Request(id=name, prompt_ids=(1,) * length, sampling=sampling)

    requests = [
        request("a", 9, 3),
        request("b", 2, 10),
        request("c", 3, 1),
        request("d", 1, 1, 0.5),
    ]
    packs = [[(r.id, len(rows)) for r, rows in pack] for pack in packed(requests, 4, alone=False)]
    assert packs == [[("d", 1)], [("b", 4)], [("b", 4)], [("b", 2), ("c", 1)], [("a", 3)]]
    alone = [[r.id for r, _ in pack] for pack in packed(requests, 4, alone=True)]
    assert alone == [["d"], ["b"], ["b"], ["b"], ["c"], ["a"]]


def test_loading_another_folder_switches_the_weights(sampler, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "global_step_30", seed=1)
    before = dict(sampler.generate([a_request(sampler, "1")]))["1"]
    assert sampler.load(sampler.tokenizer.folder) != sampler.load(other)
    after = dict(sampler.generate([a_request(sampler, "1")]))["1"]
    assert before[0].token_ids != after[0].token_ids
    assert after[0].policy_step == 30


# --- learning


def test_gradients_do_not_depend_on_micro_batches_order_or_padding(tiny_model, one_thread) -> None:
    norms = []
    for micro_batch in (1, 3, None):
        learner, batch = trained(tiny_model, micro_batch=micro_batch)
        norms.append(learner.gradient_norm(batch, MeanLogp(int(batch.mask_BL.sum()))))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_a_shared_prompt_changes_neither_values_nor_gradients(tiny_model, one_thread) -> None:
    sampler = TransformersSampler(tiny_model, device="cpu")
    prompts = {"a": "a prompt", "b": "another, longer prompt", "c": "x"}
    requests = [a_request(sampler, name, text, n=3) for name, text in prompts.items()]
    done = dict(sampler.generate(requests))
    parts = [a_batch(sampler, done[r.id], r.prompt_ids) for r in requests]
    batch = joined(joined(parts[0], parts[1], pad_id=0), parts[2], pad_id=0)
    batch.mask_BL[4] = False  # a cut rollout that is not trained on
    found = {}
    for share in (True, False):
        learner = TransformersLearner(tiny_model, dtype="float32", device="cpu")
        assert learner._packs
        learner._packs = share
        seen = learner.forward_backward(batch, MeanLogp(50))
        grads = torch.cat([p.grad.flatten() for p in learner.model.parameters()])
        found[share] = (seen.logp_BL, seen.entropy_BL, grads.numpy())
    for shared, apart in zip(found[True], found[False], strict=True):
        assert np.allclose(shared, apart, atol=2e-6)
    assert np.abs((found[True][0] - batch.behavior_logp_BL)[batch.mask_BL]).max() < 1e-5


def test_packed_sequences_restart_positions_and_stay_under_the_limit() -> None:
    ids_BL = np.array([[7, 8, 1, 2], [7, 8, 3, 0], [7, 8, 4, 0]])
    mask_BL = np.array([[0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]], bool)
    batch = small_batch(ids_BL, mask_BL)
    first, second = sequences(batch, limit=5)
    assert first.ids_T.tolist() == [7, 8, 1, 2, 3]
    assert first.position_T.tolist() == [0, 1, 2, 3, 2]
    assert first.at_M.tolist() == [1, 2, 1]
    assert list(zip(first.row_M, first.column_M, strict=True)) == [(0, 2), (0, 3), (1, 2)]
    assert first.allowed_TT()[4].tolist() == [True, True, False, False, True]
    assert second.ids_T.tolist() == [7, 8, 4]


def test_rows_that_need_no_gradient_get_none(tiny_model: Path, one_thread: None) -> None:
    learner, batch = trained(tiny_model)

    class Nothing(MeanLogp):
        def needs_gradient(self, batch):
            return np.zeros(len(batch.ids_BL), bool)

    before = learner.snapshot(0)
    seen = learner.forward_backward(batch, Nothing(1))
    assert np.allclose(seen.logp_BL, learner.logprobs(batch), atol=1e-5)
    assert learner.gradient_norm(batch, Nothing(1)) == 0
    assert before.fingerprint == learner.snapshot(0).fingerprint


def test_a_non_finite_loss_changes_neither_weights_nor_moments(tiny_model, one_thread) -> None:
    learner, batch = trained(tiny_model)

    class Broken(MeanLogp):
        def __call__(self, rows, logp_BL, entropy_BL):
            loss = logp_BL.sum() * float("nan")
            return loss, {"loss/total": loss.item()}

    twin, _ = trained(tiny_model)
    before = learner.snapshot(0).fingerprint
    learner.forward_backward(batch, Broken(1))
    assert np.isnan(learner.optim_step(0.1))
    assert learner.snapshot(0).fingerprint == before
    for each in (learner, twin):
        each.forward_backward(batch, MeanLogp(10))
        each.optim_step(0.1)
    assert learner.snapshot(0).fingerprint == twin.snapshot(0).fingerprint


def test_entropy_is_that_of_the_whole_vocabulary(tiny_model: Path, one_thread: None) -> None:
    learner, batch = trained(tiny_model)
    seen = learner.forward_backward(batch, MeanLogp(1))
    model = learner.model
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=torch.as_tensor(batch.ids_BL)).logits, -1)
    entropy_BL = -(logp.exp() * logp).sum(-1).numpy()[:, :-1]
    mask_BL = batch.mask_BL[:, 1:]
    assert np.allclose(seen.entropy_BL[:, 1:][mask_BL], entropy_BL[mask_BL], atol=1e-5)


def test_log_probabilities_under_a_snapshot_leave_the_weights_alone(tiny_model, one_thread) -> None:
    learner, batch = trained(tiny_model)
    snapshot, before = learner.snapshot(0), learner.logprobs(batch)
    learner.forward_backward(batch, MeanLogp(10))
    learner.optim_step(0.05)
    now = learner.snapshot(1).fingerprint
    assert np.array_equal(learner.logprobs(batch, snapshot), before)
    assert learner.snapshot(1).fingerprint == now


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_reference_is_the_base_model(tiny_model: Path, one_thread: None, lora) -> None:
    learner, batch = trained(tiny_model, lora=lora)
    base = TransformersLearner(tiny_model, dtype="float32", device="cpu")
    reference = learner.logprobs(batch, "reference")
    assert np.allclose(reference, base.logprobs(batch), atol=1e-6)
    assert not np.allclose(reference, learner.logprobs(batch), atol=1e-3)


def test_temperature_divides_the_logits_on_both_sides(tiny_model: Path, one_thread: None) -> None:
    sampler = TransformersSampler(tiny_model, device="cpu")
    request = a_request(sampler, "1", temperature=0.6, n=4)
    batch = a_batch(sampler, dict(sampler.generate([request]))["1"], request.prompt_ids)
    learner = TransformersLearner(tiny_model, dtype="float32", device="cpu", temperature=0.6)
    ratio = np.exp((learner.logprobs(batch) - batch.behavior_logp_BL)[batch.mask_BL])
    assert np.abs(ratio - 1).max() < 1e-5


# --- files


def test_a_checkpoint_stores_the_dtype_and_the_base_models_files(tmp_path, one_thread) -> None:
    base = write_tiny_model(tmp_path / "base", dtype="bfloat16")
    facts = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(facts | {"top_p": 0.9}))
    learner, _ = trained(base, dtype="bfloat16")
    (tmp_path / "out").mkdir()
    learner.export(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert filecmp.cmp(base / name, tmp_path / "out" / name, shallow=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["use_cache"]) == ("bfloat16", True)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 6]
    assert "top_p" not in generation
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    own = dict(learner.model.named_parameters())
    for name, tensor in loaded.named_parameters():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, own[name].to(torch.bfloat16))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_a_lora_checkpoint_is_merged_and_keeps_its_adapter(
    tiny_model, tmp_path, one_thread
) -> None:
    learner, batch = trained(tiny_model, lora=LORA)
    logged = learner.export(tmp_path, batch)
    assert 0 <= logged["save/merge_delta"] < 1e-4
    merged = TransformersLearner(tmp_path, dtype="float32", device="cpu")
    assert np.allclose(merged.logprobs(batch), learner.logprobs(batch), atol=1e-4)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(tiny_model))
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        ids = torch.as_tensor(batch.ids_BL)
        theirs, ours = adapted(input_ids=ids).logits, learner.model(input_ids=ids).logits
    assert torch.allclose(theirs, ours, atol=1e-5)
    assert "all-linear" not in (tmp_path / "adapter" / "adapter_config.json").read_text()


def test_a_lora_snapshot_is_the_adapter_only(tiny_model: Path, one_thread: None) -> None:
    learner, _ = trained(tiny_model, lora=LORA)
    snapshot = learner.snapshot(2)
    assert snapshot.weights
    assert all(".lora_" in name for name in snapshot.weights)
    sampler = TransformersSampler(tiny_model, device="cpu", lora=LORA)
    assert sampler.load(snapshot) == snapshot.fingerprint


def test_lora_targets_that_fit_nothing_are_refused(tiny_model: Path) -> None:
    lora = Lora(rank=2, alpha=2, targets=("no_such_module",), seed=0)
    with pytest.raises(RequestError, match=r"lora\.targets"):
        TransformersLearner(tiny_model, device="cpu", lora=lora)


def test_a_damaged_snapshot_is_noticed(tiny_model: Path, tmp_path: Path, one_thread: None) -> None:
    learner, _ = trained(tiny_model)
    learner.save_snapshot(learner.snapshot(1), tmp_path / "1")
    data = bytearray((tmp_path / "1").read_bytes())
    data[-1] ^= 1
    (tmp_path / "1").write_bytes(data)
    with pytest.raises(RlfeError, match="fingerprint differs"):
        learner.load_snapshot(tmp_path / "1")


def test_a_fingerprint_sees_values_places_names_and_dtypes() -> None:
    base = {"w": torch.tensor([1.0, 2.0, 3.0])}
    others = [
        {"w": torch.tensor([2.0, 1.0, 3.0])},
        {"w": torch.tensor([1.0, 2.0, 3.0001])},
        {"v": torch.tensor([1.0, 2.0, 3.0])},
        {"w": torch.tensor([[1.0, 2.0, 3.0]])},
        {"w": torch.tensor([1.0, 2.0, 3.0]).bfloat16()},
    ]
    seen = {fingerprint(weights) for weights in (base, *others)}
    assert len(seen) == 6
    assert fingerprint({"w": torch.tensor([1.0, 2.0, 3.0])}) == fingerprint(base)


def test_a_fingerprint_of_many_chunks_is_that_of_the_whole() -> None:
    large = torch.arange(3_000_001, dtype=torch.float32)
    bits = large.view(torch.int32).to(torch.int64)
    from rlfe.engines.fingerprint import pattern_sums

    place = torch.arange(1, bits.numel() + 1)
    assert pattern_sums(large) == (int(bits.sum()), int((bits * place).sum()))


def test_loading_engines_leaves_the_global_generator_alone(tiny_model: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    TransformersLearner(tiny_model, device="cpu", lora=LORA)
    assert torch.equal(torch.rand(1), expected)


# --- architectures with other layers than full attention


def test_recurrent_layers_sample_learn_and_save(tiny_model, tmp_path: Path, one_thread) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.3")  # knows Qwen3.5
    Qwen3_5ForCausalLM = transformers.Qwen3_5ForCausalLM
    Qwen3_5TextConfig = transformers.Qwen3_5TextConfig

    shutil.copytree(tiny_model, tmp_path / "base")
    config = Qwen3_5TextConfig(
        vocab_size=104, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3_5ForCausalLM(config).save_pretrained(str(tmp_path / "base"))
    sampler = TransformersSampler(tmp_path / "base", device="cpu")
    requests = [a_request(sampler, name, "abc" * n, n=3) for name, n in (("a", 2), ("b", 4))]
    done = dict(sampler.generate(requests))
    learner = TransformersLearner(tmp_path / "base", dtype="float32", device="cpu")
    for request in requests:
        batch = a_batch(sampler, done[request.id], request.prompt_ids)
        drift = np.abs(learner.logprobs(batch) - batch.behavior_logp_BL)[batch.mask_BL]
        assert drift.max() < 1e-4
    learner.forward_backward(batch, MeanLogp(int(batch.mask_BL.sum())))
    assert np.isfinite(learner.optim_step(0.01))
    (tmp_path / "out").mkdir()
    learner.export(tmp_path / "out")
    again = TransformersLearner(tmp_path / "out", dtype="float32", device="cpu")
    assert np.allclose(again.logprobs(batch), learner.logprobs(batch), atol=1e-6)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_head_is_stored_once_whatever_the_dtype(
    tiny_model: Path, one_thread: None, tmp_path: Path, dtype: str, lora: Lora | None
) -> None:
    assert json.loads((tiny_model / "config.json").read_text())["tie_word_embeddings"] is True
    learner, _ = trained(tiny_model, dtype=dtype, lora=lora)
    learner.export(tmp_path)
    names = set(read_header(tmp_path / "model.safetensors")[0])
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert problems(tmp_path, need_tokenizer_config=True) == []
