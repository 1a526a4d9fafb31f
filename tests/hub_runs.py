"""Tiny run folders for the publishing tests: real formats, no torch.

`make_run(root, "tiny_mbpp_nobuf_lr1e6", steps=(30, 60))` writes complete checkpoints (safetensors
bytes made by hand), config, provenance, metrics, rollouts and a log.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfe import config, naming, records
from rlfe.schema import Recipe

TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
    "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2}, "unk_token": "<unk>"},
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
    "tie_word_embeddings": False, "vocab_size": 3, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def safetensors_bytes(tensors: Mapping[str, Sequence[float]], dtype: str = "F32") -> bytes:
    """A safetensors file with one-dimensional float32 tensors."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {
            "dtype": dtype,
            "shape": [len(values)],
            "data_offsets": [len(data), len(data) + len(packed)],
        }
        data += packed
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def make_checkpoint(folder: Path, seed: int = 0, *, shards: int = 1) -> Path:
    """A complete model directory; `shards` > 1 makes an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    )
    names = ["model.embed_tokens.weight", "lm_head.weight", "a.weight", "b.weight"]
    tensors = {name: [float(seed), float(at), 0.5] for at, name in enumerate(names)}
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder
    weight_map = {}
    for at in range(shards):
        name = f"model-{at + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: value for i, (key, value) in enumerate(tensors.items()) if i % shards == at}
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 48}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def recipe(*, lr: float = 1e-6, replay: bool = False, steps: int = 60, **model: Any) -> Recipe:
    """A resolved recipe whose base model is a Hub id with a stated license."""
    chosen = {"strategy": "hard_cooldown"} if replay else {}
    return Recipe.model_validate({
        "model": {"path": "tiny-org/tiny", "license": "apache-2.0", **model},
        "optim": {"lr": lr}, "train": {"steps": steps}, "replay": chosen,
    })  # fmt: skip


def make_run(
    root: Path,
    *,
    steps: Sequence[int] = (30, 60),
    lr: float = 1e-6,
    replay: bool = False,
    shards: int = 1,
    **model: Any,
) -> Path:
    """A run folder `tiny_mbpp_<arm>_<lr>` below `root` with complete checkpoints."""
    made = recipe(lr=lr, replay=replay, **model)
    folder = root / naming.format_cell(naming.cell_of(made))
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.dump(made))
    provenance = {"rlfe": "0.1", "git_commit": "abc", "python": "3.11", "packages": {"torch": "2"}}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    for step in range(1, max(steps, default=0) + 1):
        line = {"step": step, "metrics": {"reward/mean": step / 100}, "seconds": {"sample": 1.0}}
        records.append_jsonl(folder / "metrics.jsonl", line)
    for step in steps:
        make_checkpoint(folder / f"global_step_{step}", seed=step, shards=shards)
    for step in (1, 2, 101):
        path = folder / "rollouts" / f"step_{step:06d}.jsonl.zst"
        records.write_jsonl_zst(path, [{"step": step, "text": "print(1)"}])
    (folder / "logs").mkdir()
    (folder / "logs" / "train.log").write_text("step 1 reward 0.1\n")
    return folder
