"""A LoRA snapshot as the folder that vLLM and peft read.

What: the learner's tensor names become peft's, in order, the values stay. Not here: kept
checkpoints (`weights.save_adapter`), which name a base model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlfe.engines.weights import ADAPTER, Lora

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."


def write_adapter(weights: Mapping[str, torch.Tensor], lora: Lora, folder: Path) -> Path:
    """Write (over) an adapter folder; returns its tensor file."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights}
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    file = folder / "adapter_model.safetensors"
    save_file({stored_name(name): t.contiguous() for name, t in weights.items()}, str(file))
    return file


def stored_name(name: str) -> str:
    """`model.x.lora_A.default.weight` -> `base_model.model.model.x.lora_A.weight`."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def learner_name(name: str) -> str:
    """The inverse of `stored_name`."""
    plain = name.removeprefix(PREFIX)
    return plain.replace(".lora_A.", f".lora_A.{ADAPTER}.").replace(
        ".lora_B.", f".lora_B.{ADAPTER}."
    )
