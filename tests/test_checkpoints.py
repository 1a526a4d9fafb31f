"""Checkpoints: what counts as complete, which folders a glob gives, and what may be deleted."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe import checkpoints
from rlfe.errors import NotFoundError, RequestError
from rlfe.weights import read_header, weights_hash

RUN = "tiny_mbpp_nobuf_lr1e3"


def tensors(path, names=("model.embed_tokens.weight",), dtype="F32", data=b"\0\0\x80?"):
    header, place = {}, 0
    for name in names:
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [place, place + len(data)]}
        place += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data * len(names))


def checkpoint(folder, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    tensors(folder / "model.safetensors")
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_complete_model_directory_has_no_problems(tmp_path):
    assert checkpoints.problems(checkpoint(tmp_path), need_tokenizer_config=True) == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "no model_type in config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer ("),
        (lambda f: (f / "model.safetensors").unlink(), "no weights (model.safetensors)"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is empty"),
        (lambda f: (f / "model.safetensors").write_bytes(b"1234"), "is cut short"),
        (lambda f: os.truncate(f / "model.safetensors", 60), "is cut short"),
        (lambda f: os.truncate(f / "model.safetensors",
                               (f / "model.safetensors").stat().st_size - 1), "its header needs"),
        (lambda f: tensors(f / "extra.safetensors"), "extra.safetensors is not in the weight set"),
        (lambda f: (f / "model.safetensors.tmp").write_text(""), "unfinished file"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "its place is adapter/"),
    ],
)  # fmt: skip
def test_each_thing_that_is_missing_or_wrong_is_named(tmp_path, spoil, problem):
    spoil(checkpoint(tmp_path))
    assert any(problem in line for line in checkpoints.problems(tmp_path))


def test_vocab_and_merges_together_are_a_tokenizer(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    assert len(checkpoints.problems(folder)) == 1
    (folder / "merges.txt").write_text("")
    assert checkpoints.problems(folder) == []


def test_a_push_asks_for_the_tokenizers_configuration_too(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert checkpoints.problems(folder) == []
    assert len(checkpoints.problems(folder, need_tokenizer_config=True)) == 1


def sharded(folder, weight_map):
    (folder / "model.safetensors").unlink()
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def test_every_shard_of_the_index_has_to_hold_its_tensors(tmp_path):
    folder = sharded(checkpoint(tmp_path), {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    tensors(folder / "model-1.safetensors", ["a"])
    assert checkpoints.problems(folder) == ["model-2.safetensors is missing"]
    tensors(folder / "model-2.safetensors", ["c"])
    assert checkpoints.problems(folder) == ["model-2.safetensors lacks b"]
    tensors(folder / "model-2.safetensors", ["b"])
    assert checkpoints.problems(folder) == []


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x", "a\\b.safetensors"])
def test_an_index_that_points_outside_the_folder_is_refused(tmp_path, name):
    folder = sharded(checkpoint(tmp_path), {"a": name})
    assert "outside the folder" in checkpoints.problems(folder)[0]


def test_shards_without_their_index_are_incomplete(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert "without model.safetensors.index.json" in checkpoints.problems(folder)[0]


def test_the_stored_dtype_has_to_be_the_configs_where_it_names_one(tmp_path):
    assert checkpoints.problems(checkpoint(tmp_path, dtype="float32")) == []
    folder = checkpoint(tmp_path, torch_dtype="bfloat16")
    assert checkpoints.problems(folder) == ["weights are F32, config.json says BF16"]


def test_the_output_head_has_to_match_tied_embeddings(tmp_path):
    folder = checkpoint(tmp_path, tie_word_embeddings=False)
    assert "no output head" in checkpoints.problems(folder)[0]
    tensors(folder / "model.safetensors", ["model.embed_tokens.weight", "lm_head.weight"])
    assert checkpoints.problems(folder) == []
    checkpoint_tied = json.dumps({"model_type": "llama", "tie_word_embeddings": True})
    (folder / "config.json").write_text(checkpoint_tied)
    assert checkpoints.problems(folder) == []
    assert len(checkpoints.problems(folder, need_tokenizer_config=True)) == 1


def test_checkpoints_come_by_run_and_by_number_with_their_cell(here):
    for run, step in (("b_mbpp_nobuf_lr1e6", 30), (RUN, 100), (RUN, 30)):
        checkpoint(here / "runs" / run / f"global_step_{step}")
    found = checkpoints.find(["runs/*/global_step_*"]).found
    assert [(one.cell_text, one.step) for one in found] == [
        ("b_mbpp_nobuf_lr1e6", 30), (RUN, 30), (RUN, 100)
    ]  # fmt: skip
    assert str(found[0].path) == "runs/b_mbpp_nobuf_lr1e6/global_step_30"


def test_absolute_patterns_give_absolute_paths(here):
    folder = checkpoint(here / "runs" / RUN / "global_step_30")
    found = checkpoints.find([str(here / "runs/*/global_step_*")]).found
    assert [one.path for one in found] == [folder.resolve()]


def test_a_missing_tokenizer_config_is_a_warning_and_a_missing_tokenizer_is_incomplete(here):
    folder = checkpoint(here / RUN / "global_step_30")
    (folder / "tokenizer_config.json").unlink()
    listing = checkpoints.find([f"{RUN}/*"])
    assert listing.found[0].warnings == (checkpoints.NO_TOKENIZER_CONFIG,)
    (folder / "tokenizer.json").unlink()
    listing = checkpoints.find([f"{RUN}/*"])
    assert listing.found == ()
    assert listing.skipped == {f"{RUN}/global_step_30": "incomplete"}
    assert "no tokenizer" in listing.details[f"{RUN}/global_step_30"][0]


def test_a_padded_twin_is_used_only_when_the_plain_name_is_incomplete(here):
    padded, plain = (here / RUN / f"global_step_{text}" for text in ("030", "30"))
    checkpoint(padded)
    assert [str(one.path) for one in checkpoints.find([f"{RUN}/*"]).found] == [
        f"{RUN}/global_step_030"
    ]
    (checkpoint(plain) / "model.safetensors").unlink()
    listing = checkpoints.find([f"{RUN}/*"])
    assert [str(one.path) for one in listing.found] == [f"{RUN}/global_step_030"]
    assert listing.skipped == {f"{RUN}/global_step_30": "incomplete"}


def test_a_link_alone_gives_what_it_points_to(here):
    folder = checkpoint(here / RUN / "global_step_30")
    (here / RUN / "latest").symlink_to(folder.name)
    listing = checkpoints.find([f"{RUN}/latest"])
    assert [str(one.path) for one in listing.found] == [f"{RUN}/global_step_30"]
    assert listing.skipped == {f"{RUN}/latest": "duplicate"}
    assert listing.left_out == {}


def test_the_kinds_of_unusable_folders_are_told_apart(here):
    (here / RUN / "global_step_10" / "adapter").mkdir(parents=True)
    (here / RUN / "global_step_10" / "adapter" / "adapter_config.json").write_text("{}")
    (here / RUN / "global_step_20" / "actor").mkdir(parents=True)
    (here / RUN / "global_step_20" / "actor" / "model_world_size_8_rank_0.pt").write_text("x")
    (here / RUN / "global_step_30").mkdir()
    (here / RUN / "global_step_40").symlink_to("gone")
    listing = checkpoints.find([f"{RUN}/*"])
    steps = {path.rpartition("_")[2]: reason for path, reason in listing.skipped.items()}
    assert steps == {
        "10": "adapter_only", "20": "needs_merge", "30": "incomplete", "40": "broken_link"
    }  # fmt: skip
    assert set(listing.left_out) == set(listing.skipped)


def test_two_folders_with_one_run_name_are_warned_of(here):
    for root in ("a", "b"):
        checkpoint(here / root / RUN / "global_step_30")
    found = checkpoints.find(["*/*/global_step_*"]).found
    assert [len(one.warnings) for one in found] == [0, 1]


def test_a_pattern_that_matches_nothing_says_what_is_near(here):
    (here / "runs" / RUN).mkdir(parents=True)
    with pytest.raises(RequestError) as caught:
        checkpoints.find(["runs/tinny*/global_step_*"])
    assert caught.value.exit_code == 2
    assert "no checkpoint matches 'runs/tinny*/global_step_*'" in caught.value.what
    assert f"1 folders exist under runs, such as runs/{RUN}" in caught.value.what


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 300))
def test_kept_steps_ascend_end_at_the_last_and_go_on_after_a_resume(total, every, done):
    steps = checkpoints.kept_steps(total, every)
    assert steps == sorted(set(steps))
    assert steps[-1] == total
    assert 0 not in steps
    assert checkpoints.kept_steps(total, every, done) == [step for step in steps if step > done]


def test_the_schedule_of_the_learning_rate_study_has_17_checkpoints():
    assert len(checkpoints.kept_steps(500, 30)) == 17
    assert len(checkpoints.kept_steps(450, 30)) == 15


@given(st.sets(st.integers(1, 99), min_size=1), st.sets(st.integers(1, 99)), st.integers(1, 5))
def test_what_expires_is_old_complete_and_never_the_newest(complete, incomplete, limit):
    saved = max(complete)
    gone = checkpoints.expired(sorted(complete), sorted(incomplete), saved, limit)
    assert saved not in gone
    assert set(gone) <= complete - incomplete
    assert len(gone) in (0, len(complete - incomplete) - limit)


@pytest.mark.parametrize("limit", [None, 0, -1])
def test_without_a_limit_nothing_expires(limit):
    assert checkpoints.expired([30, 60], [], 60, limit) == []


def test_nothing_expires_when_the_new_checkpoint_is_not_complete():
    assert checkpoints.expired([30, 60], [90], 90, 1) == []


def test_the_tokenizer_is_copied_byte_for_byte(tmp_path):
    source = checkpoint(tmp_path / "base")
    (source / "tokenizer.json").write_bytes(b'{"a":\r\n1}')
    (source / "chat_templates").mkdir()
    (source / "chat_templates" / "tool.jinja").write_text("x")
    target = tmp_path / "target"
    names = checkpoints.copy_tokenizer(source, target)
    assert names == ["chat_templates/tool.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert (target / "tokenizer.json").read_bytes() == b'{"a":\r\n1}'
    (source / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match="no tokenizer"):
        checkpoints.copy_tokenizer(source, target)


def test_a_kept_generation_config_stops_like_the_base_models():
    base = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7}
    kept = checkpoints.repaired_generation_config(
        base, {"eos_token_id": 1, "bos_token_id": 5}, {"temperature": 1.0, "max_new_tokens": 9}
    )
    assert kept == {**base, "bos_token_id": 5}


def test_a_pad_token_is_taken_only_where_the_base_has_none():
    repair = checkpoints.repaired_generation_config
    assert repair({"pad_token_id": 3}, {}, {"pad_token_id": 0}) == {"pad_token_id": 3}
    assert repair(None, {}, {"pad_token_id": 0}) == {"pad_token_id": 0}


def test_the_weights_hash_does_not_depend_on_the_sharding(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    tensors(whole / "model.safetensors", ["a", "b"])
    tensors(parts / "model-1.safetensors", ["b"])
    tensors(parts / "model-2.safetensors", ["a"])
    assert weights_hash(whole) == weights_hash(parts)
    tensors(parts / "model-2.safetensors", ["a"], data=b"\0\0\0\0")
    assert weights_hash(whole) != weights_hash(parts)


def test_headers_are_read_as_the_safetensors_package_writes_them(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    header, start = read_header(path)
    assert header == {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    assert path.stat().st_size == start + 12
