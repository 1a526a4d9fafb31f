"""A two-layer random Llama with a character tokenizer and a chat template, made on the spot."""

from __future__ import annotations

import json
import string
from pathlib import Path

TEMPLATE = (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<nothink>' }}{% endif %}"
    "{% for message in messages %}{{ '<user>' if message.role == 'user' else '<assistant>' }}"
    "{{ message.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SPECIAL = ["<bos>", "<eos>", "<pad>", "<user>", "<assistant>", "<nothink>", "<end>"]


def write_tiny_model(
    folder: Path, *, seed: int = 0, dtype: str = "float32", head_dim: int = 8, tied: bool = True
) -> Path:
    """A complete model folder: hidden 32, two layers, one token per printable character."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    vocabulary = _tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = [1, 6]  # <eos> and <end>
    model.save_pretrained(str(folder))
    return folder


def _tokenizer(folder: Path) -> int:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    names = [*SPECIAL, *letters]
    inner = Tokenizer(
        models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<pad>")
    )
    inner.add_special_tokens(SPECIAL)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return len(names)
