"""Arrays to a device and back without making the CPU wait for work that is queued there.

On CUDA through pinned memory and asynchronous copies; elsewhere plain copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor; on CUDA the copy is queued behind what the device does."""
    tensor = torch.as_tensor(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The tensors as arrays, after one wait for all of them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.detach().cpu().numpy() for tensor in tensors]
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor.detach(), non_blocking=True
        )
        for tensor in tensors
    ]
    torch.cuda.current_stream().synchronize()
    return [copy.numpy() for copy in copies]
