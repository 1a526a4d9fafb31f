"""Arrays to a device and back without making the CPU wait for work that is queued there.

On CUDA through pinned memory and asynchronous copies; elsewhere plain copies. `Copies` are those of
a whole model, which take seconds: a thread makes them while others work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
PIECE_BYTES = 64 << 20  # pinned memory through which a whole model goes


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


def host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in pageable memory, cast on the device.

    From CUDA piece by piece through pinned memory. Straight into pageable memory the driver would
    copy at its slowest, and whoever waits for the device meanwhile, as does every `cudaFree`,
    would wait for the whole tensor.
    """
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", dtype, copy=True).contiguous()
    size = PIECE_BYTES // dtype.itemsize
    pinned = torch.empty(min(size, tensor.numel()), dtype=dtype, pin_memory=True)
    wait = torch.cuda.current_stream(tensor.device).synchronize
    return _copied_through(pinned, tensor.detach(), wait)


def _copied_through(
    buffer: torch.Tensor, tensor: torch.Tensor, wait: Callable[[], None]
) -> torch.Tensor:
    """A copy of the buffer's dtype, made of pieces of its size; `wait`: until one arrived in it."""
    copy = torch.empty(tensor.shape, dtype=buffer.dtype)
    size = max(1, len(buffer))
    flat = tensor.contiguous().view(-1)
    pieces = zip(torch.split(flat, size), torch.split(copy.view(-1), size), strict=True)
    for source, target in pieces:
        held = buffer[: len(source)].copy_(source.to(buffer.dtype), non_blocking=True)
        wait()
        target.copy_(held)
    return copy


class Copies:
    """Copies of tensors of a device, made in a thread.

    What was queued on the device before `later` is in them. Whoever changes such a tensor calls
    `settle` first. Try: `Copies(device).later(make).result()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: set[Future[Any]] = set()

    def later(self, make: Callable[[], T]) -> Future[T]:
        """What `make` returns, some time before the end of `settle`."""
        run = make if self._device.type != "cuda" else self._on_own_stream(make)
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlfe-copying")
        found = pool.submit(run)
        pool.shutdown(wait=False)  # its thread ends with the copy
        self._open.add(found)
        found.add_done_callback(self._open.discard)  # its result is large: others hold it
        return found

    def settle(self) -> None:
        """Wait for all copies; what one of them raised is for those who ask for it."""
        wait(self._open.copy())

    def _on_own_stream(self, make: Callable[[], T]) -> Callable[[], T]:
        """A slow copy on the stream of the others would stop a sampler in this process."""
        before = torch.cuda.current_stream(self._device)
        own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        own.wait_stream(before)

        def run() -> T:
            with torch.cuda.stream(own):
                return make()

        return run
