"""Model weights in and out of a process: loading, LoRA layers, and complete model folders.

safetensors only; nothing from a model folder is executed. A kept checkpoint stores the base
model's own config, tokenizer and generation config (the latter made savable), so that it loads
wherever the base loads. Not here: what is trained (`learner.py`), what a listing accepts as
complete (`rlfe.checkpoints`). Rules: docs/hub.md 4, docs/algorithms.md 13.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlfe.checkpoints import copy_tokenizer, repaired_config, repaired_generation_config
from rlfe.engines.source import read_json
from rlfe.engines.transfer import host_copy
from rlfe.errors import RequestError, RlfeError

ADAPTER = "default"  # peft's name for the only adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """`Lora(rank=32, alpha=32, targets="all-linear", seed=0)`; rank 0 is no LoRA, never built."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    seed: int


def device_of(name: str) -> torch.device:
    """`auto`: a CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(
            f'engine.device "{name}" cannot be used: {reason}', hint="Use auto or cpu."
        ) from error
    return device


def dtype_of(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, lora: Lora | None) -> Any:
    """A causal LM in eval mode, with LoRA layers in place if asked for.

    Raises:
        RlfeError: transformers cannot read the folder (damaged or unknown architecture).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, use_safetensors=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RlfeError(
            f"cannot load the model in {folder}: {reason}",
            hint="Only complete folders with safetensors weights load.",
        ) from error
    model = model.to(device).eval()
    return model if lora is None else with_lora(model, lora)


def with_lora(model: Any, lora: Lora) -> Any:
    """The model with LoRA layers in place and everything else frozen; same draws for one seed."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank, lora_alpha=_alpha(lora), target_modules=targets, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(lora.seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise RequestError(
                f"lora.targets = {lora.targets!r} does not fit the model: {error}",
                hint='Use "all-linear" or names of linear modules such as q_proj.',
            ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(name))
    return model.eval()


def _alpha(lora: Lora) -> Any:
    """A whole number as one: peft writes it into adapter_config.json as it is."""
    return int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha


def is_lora(name: str) -> bool:
    return ".lora_" in name


def merged_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's state with LoRA folded in, float32, under the base model's names."""
    merged = {}
    modules = dict(model.named_modules())
    for name, tensor in model.state_dict().items():
        if is_lora(name):
            continue
        owner = name.rpartition(".base_layer.")[0]
        if owner and name.endswith(".base_layer.weight"):
            delta = modules[owner].get_delta_weight(ADAPTER)
            tensor = tensor.float() + delta.float()
        merged[name.replace(".base_layer.", ".")] = tensor.detach()
    return merged


def save_model(
    model: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype, base: Path, folder: Path
) -> None:
    """Write a complete model directory: `state` cast once, the rest from the base's folder."""
    model.save_pretrained(str(folder), state_dict=cast_once(state, dtype))
    _write_json(folder / "config.json", _config(base, folder, dtype))
    config = read_json(base / "config.json") or {}
    own = read_json(base / "generation_config.json")
    _write_json(folder / "generation_config.json", repaired_generation_config(own, config, {}))
    copy_tokenizer(base, folder)


def cast_once(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors in `dtype`; tied ones stay one tensor and are stored once, as in the base.

    A head stored beside its tied embedding contradicts `tie_word_embeddings` in config.json.
    """
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for tensor in state.values():
        if tensor.is_floating_point():
            cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
    return {name: cast.get((t.data_ptr(), t.shape), t) for name, t in state.items()}


def host_copies(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Copies in the CPU's memory, cast if a dtype is given; tied tensors stay one tensor."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for tensor in state.values():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        place = (tensor.data_ptr(), tensor.shape)
        if place not in copies:
            copies[place] = host_copy(tensor, kind)
    return {name: copies[t.data_ptr(), t.shape] for name, t in state.items()}


def _config(base: Path, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The base's config.json with the stored dtype; a cache is always used for generation."""
    saved = read_json(folder / "config.json") or {}
    config = read_json(base / "config.json") or saved
    if config.get("model_type") != saved["model_type"]:  # the text part of a larger model
        config = saved
    name = str(dtype).removeprefix("torch.")
    config = repaired_config({**config, "architectures": saved["architectures"]}, config)
    config["use_cache"] = True
    config["dtype"] = name
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    return config


def save_adapter(model: Any, lora: Lora, base_name: str, folder: Path) -> None:
    """Write adapter/{adapter_config.json, adapter_model.safetensors}, loadable by peft."""
    save_adapter_tensors(adapter_copies(model), model, lora, base_name, folder)


def adapter_copies(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the LoRA weights under peft's names."""
    own = {name: p for name, p in model.named_parameters() if is_lora(name)}
    return {
        f"base_model.model.{name}".replace(f".{ADAPTER}.", "."): tensor
        for name, tensor in host_copies(own).items()
    }


def save_adapter_tensors(
    tensors: Mapping[str, torch.Tensor], model: Any, lora: Lora, base_name: str, folder: Path
) -> None:
    """`save_adapter` for copies that were made before; of the model only names are read."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=_alpha(lora),
        target_modules=_targets(model, lora),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
        inference_mode=True,
    )
    folder.mkdir()
    config.save_pretrained(str(folder))
    save_file(dict(tensors), str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})


def _targets(model: Any, lora: Lora) -> str | list[str]:
    """As asked for; "all-linear" as the modules it meant, for it may mean others elsewhere."""
    if lora.targets != "all-linear":
        return lora.targets if isinstance(lora.targets, str) else sorted(lora.targets)
    names = [name.split(".lora_A.") for name, _ in model.named_parameters()]
    return sorted({parts[0].rpartition(".")[2] for parts in names if len(parts) == 2})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
