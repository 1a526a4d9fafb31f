"""Weights from one process's memory to another's, without a disk in between.

Same process: the tensors themselves. Another process on the same GPU: CUDA IPC handles, so the
receiver reads the sender's memory. Otherwise (CPU): safetensors bytes. Not here: what the
receiver does with them. Try: `arrived(*packed({"w": torch.ones(3)}, same_process=False), None)`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

DEVICE = 6  # place of the device index among the arguments of torch's `rebuild_cuda_tensor`


def packed(weights: Mapping[str, torch.Tensor], *, same_process: bool) -> tuple[str, Any]:
    """(kind, payload) for `arrived`; the tensors have to stay alive until it returned."""
    if same_process:
        return "tensors", dict(weights)
    if all(tensor.is_cuda for tensor in weights.values()):
        from torch.multiprocessing.reductions import reduce_tensor

        reduce: Any = reduce_tensor  # not annotated in torch
        handles = {name: reduce(tensor.detach())[1] for name, tensor in weights.items()}
        return "cuda", pickle.dumps(handles)
    from safetensors.torch import save

    return "bytes", save({name: tensor.cpu().contiguous() for name, tensor in weights.items()})


def arrived(kind: str, payload: Any, device: int | None) -> dict[str, torch.Tensor]:
    """The tensors that `packed` sent.

    `device`: the index that the sender's GPU has here, if this process sees that GPU only; None:
    the same as there. The pickle comes from our own parent process.
    """
    if kind == "tensors":
        return dict(payload)
    if kind == "bytes":
        from safetensors.torch import load

        return dict(load(payload))
    assert kind == "cuda", kind
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    rebuild: Any = rebuild_cuda_tensor
    tensors = {}
    for name, arguments in pickle.loads(payload).items():
        placed = list(arguments)
        if device is not None:
            placed[DEVICE] = device
        tensors[name] = rebuild(*placed)
    return tensors
