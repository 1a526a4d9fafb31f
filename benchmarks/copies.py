"""Copies of a whole model to the host beside other work on its GPU, against torch's `.to("cpu")`.

What: `Copies` of float32 weights and two moments and of bfloat16 weights, as a checkpoint and a
state ask for them; meanwhile another thread multiplies matrices and gives cached memory back. How
long the copies take, and how long those who do not want them wait. Needs a CUDA device.

    python -m benchmarks.copies --gigabytes 20
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rlfe.engines.transfer import Copies, host_copy

Copy = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
SHAPES = ((151936, 2048), *((6144, 2048), (2048, 6144), (2048, 2048)) * 40)
FREED = (*(200 << 20,) * 60, *(30 << 20,) * 40)  # blocks that torch keeps after an update


def plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The peer: torch's own copy into pageable memory."""
    return tensor.to("cpu", dtype, copy=True)


def tensors(gigabytes: float, device: torch.device) -> list[torch.Tensor]:
    """Float32 tensors of a transformer's shapes, of that size in all."""
    found, left = [], gigabytes * 1e9
    while left > 0:
        for shape in SHAPES:
            found.append(torch.randn(shape, device=device))
            left -= found[-1].numel() * 4
            if left <= 0:
                break
    return found


def measured(copy: Copy, held: list[torch.Tensor], device: torch.device) -> dict[str, float]:
    """Seconds of the copies, of `empty_cache`, and of a small product's first and usual wait."""
    copies, weights = Copies(device), held[: len(held) // 3]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in FREED]
    del blocks
    factor = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    begin = time.monotonic()
    made = [
        copies.later(lambda: [copy(tensor, torch.bfloat16) for tensor in weights]),
        copies.later(lambda: [copy(tensor, torch.float32) for tensor in held]),
    ]
    time.sleep(0.3)
    first = _product(factor)
    given = time.monotonic()
    torch.cuda.empty_cache()
    empty, waits = time.monotonic() - given, [first]
    while not all(one.done() for one in made):
        waits.append(_product(factor))
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    assert torch.equal(made[1].result()[0], held[0].cpu())
    return {
        "copies": seconds,
        "empty_cache": empty,
        "first": first,
        "usual": statistics.median(waits),
    }


def _product(factor: torch.Tensor) -> float:
    begin = time.monotonic()
    (factor @ factor).sum().item()
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=20.0, help="weights and moments")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    device = torch.device("cuda")
    held = tensors(options.gigabytes, device)
    measured(host_copy, held[:3], device)  # the first copies start threads and pin memory
    for _ in range(options.rounds):
        for name, copy in (("plain", plain), ("pieces", host_copy)):
            found = measured(copy, held, device)
            print(name, "  ".join(f"{key} {1e3 * value:.1f} ms" for key, value in found.items()))


if __name__ == "__main__":
    main()
