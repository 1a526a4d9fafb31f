"""What runs beside vLLM's model: new weights in place, proof that they arrived, a seed.

vLLM mixes `Weights` into its worker class (`worker_extension_cls`), in this process or in the
engine's own, and `collective_rpc` calls the methods by name. The weights go through vLLM's own
`reload_weights`, which repeats what it did to them after the first load (packing, permuting).
Importing this module in an engine's process makes that process end with the one that started it.
Not here: when weights change (`vllm.py`), how they travel (`handover.py`).
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from rlfe.engines.fingerprint import fingerprint
from rlfe.engines.handover import arrived
from rlfe.engines.vllm_settings import engine_owner


class Weights:
    """Methods of the worker; each answers with plain values that pass between processes."""

    # attributes of vLLM's worker
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def rlfe_load(self, kind: str, payload: Any) -> dict[str, Any]:
        """Replace the weights in place; `kind` and payload as `handover.packed` made them."""
        narrow = self.vllm_config.parallel_config.tensor_parallel_size == 1
        weights = arrived(kind, payload, self.device.index if narrow else None)
        answer = self._rlfe_take(weights)
        del weights  # memory that another process shares is given back now
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return answer

    def rlfe_load_folder(self, folder: str) -> dict[str, Any]:
        """Replace the weights in place by those of a model folder."""
        with Stored(Path(folder), str(self.device)) as weights:
            return self._rlfe_take(weights)

    def rlfe_check_folder(self, folder: str) -> dict[str, Any]:
        """What `rlfe_load_folder` answers, for weights that the engine read itself."""
        with Stored(Path(folder), str(self.device)) as weights:
            return self._rlfe_facts(weights)

    def rlfe_check_adapter(self, file: str) -> dict[str, str]:
        """The fingerprint of a LoRA adapter under the learner's names, as this process reads it."""
        from safetensors.torch import load_file

        from rlfe.engines.adapter import learner_name

        tensors = load_file(file, device=str(self.device))
        return {"fingerprint": fingerprint({learner_name(n): t for n, t in tensors.items()})}

    def rlfe_seed(self, seed: int) -> None:
        """Seed the generator that requests without a seed of their own draw from."""
        torch.manual_seed(seed)

    def rlfe_float_head(self, on: bool) -> None:
        """Keep logits in float32 as the head sums them, or round them to the model's dtype.

        A logit of 20 in bf16 is known to 0.06 only: most of the difference to a trainer.
        """
        modules: list[Any] = list(self.model_runner.get_model().modules())
        for module in modules:
            if type(module).__name__ != "LogitsProcessor":
                continue
            if hasattr(module, "head_dtype"):  # later versions do it themselves
                module.head_dtype = torch.float32 if on else None
            elif on:
                module._get_logits = MethodType(_float_logits, module)
            elif "_get_logits" in vars(module):
                del module._get_logits

    def rlfe_free_bytes(self) -> int:
        """Free memory of the device; 0 on a CPU."""
        return int(torch.cuda.mem_get_info()[0]) if self.device.type == "cuda" else 0

    def _rlfe_take(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
            if self.device.type == "cpu":
                _pack_again(self.model_runner.get_model())
        return self._rlfe_facts(weights)

    def _rlfe_facts(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        held = dict(self.model_runner.get_model().named_parameters())
        names = compared(weights, held)
        differs = [name for name in names if not _agree(weights[name], held[name])]
        return {"fingerprint": fingerprint(weights), "compared": names, "differs": differs}


class Stored(Mapping[str, torch.Tensor]):
    """The tensors of a model folder, each read when it is asked for.

    A whole model would not fit beside the one that it replaces.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device, self._open = folder, device, ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Stored:
        from safetensors import safe_open

        for path in sorted(self._folder.glob("*.safetensors")):
            opened = safe_open(str(path), framework="pt", device=self._device)
            file = self._open.enter_context(opened)
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def compared(weights: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> list[str]:
    """Names to read back: first and last norm, and the embedding where it is not divided.

    Only parameters that the engine holds under the same name: it fuses the others.
    """
    norms, embeddings = [], []
    for name, tensor in weights.items():
        if name not in held or held[name].dim() != tensor.dim():
            continue  # the CPU build empties what it has packed
        if tensor.dim() == 1:
            norms.append(name)
        elif "embed" in name and len(held[name]) >= len(tensor):
            embeddings.append(name)
    return list(dict.fromkeys([*norms[:1], *norms[-1:], *embeddings[:1]]))


def _float_logits(
    processor: Any, hidden_TD: torch.Tensor, head: Any, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """What later versions' `LogitsProcessor._apply_head` does, for those without `head_dtype`."""
    if hidden_TD.is_cuda and hidden_TD.dtype != torch.float32:
        logits_TV = torch.mm(hidden_TD, head.weight.t(), out_dtype=torch.float32)
    else:
        logits_TV = hidden_TD.float() @ head.weight.float().t()
    if bias is not None:
        logits_TV = logits_TV + bias.float()
    gathered = processor._gather_logits(logits_TV)
    return None if gathered is None else gathered[..., : processor.org_vocab_size]


def _agree(given: torch.Tensor, held: torch.Tensor) -> bool:
    """Equal after the engine's own cast; it pads an embedding to a multiple of 64 rows."""
    cast = given.to(device=held.device, dtype=held.dtype)
    return torch.equal(cast, held[: len(cast)])


def _pack_again(model: torch.nn.Module) -> None:
    """Repeat the CPU build's packing where a weight is shared.

    `reload_weights` repeats it for the layer that got the weight, so a head that is tied to the
    embedding would go on with its packed copy of the old weights.
    """
    layers: list[Any] = list(model.modules())
    for module in layers:
        shared = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and shared is not None and shared.numel():
            module.quant_method.process_weights_after_loading(module)


def follow(owner: int) -> None:
    """End this process as soon as process `owner` has ended, however it did.

    vLLM's engine would otherwise outlive a killed run, and keep the GPU's memory from the next.
    """
    try:
        ended = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:
        return  # an old kernel or a strict sandbox: what vLLM does itself has to do

    def watch() -> None:
        select.select([ended], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="rlfe-follow").start()


# At import, because nothing of ours runs in that process before the model is loaded.
if (starter := engine_owner()) is not None:
    follow(starter)
