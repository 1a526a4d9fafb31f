"""A fingerprint of weights that proves what a sampler holds, exact on any device.

Per tensor: name, dtype, shape, and two wrapping int64 sums, of the bit patterns and of pattern x
position; SHA-256 over these in name order (docs/algorithms.md 8). Integer sums do not depend on
the order of addition, so CPU and GPU agree to the bit. No cryptographic promise: it finds
mistakes, not forgeries. Try: `fingerprint({"w": torch.ones(3)})`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

CHUNK = 1 << 20  # elements turned into int64 at a time (8 MiB)
PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 in hex over the tensors in name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach()
        shape = "x".join(str(size) for size in tensor.shape)
        plain, placed = pattern_sums(tensor)
        digest.update(f"{name}|{tensor.dtype}|{shape}|{plain}|{placed}\n".encode())
    return digest.hexdigest()


def pattern_sums(tensor: torch.Tensor) -> tuple[int, int]:
    """Wrapping int64 sums of the bit patterns, and of pattern x (position + 1)."""
    bits = tensor.contiguous().flatten().view(PATTERN[tensor.element_size()])
    plain = torch.zeros((), dtype=torch.int64, device=bits.device)
    placed = torch.zeros((), dtype=torch.int64, device=bits.device)
    place = torch.arange(1, min(CHUNK, bits.numel()) + 1, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        total = part.sum()
        plain += total
        placed += (part * place[: part.numel()]).sum() + total * start
    return int(plain.item()), int(placed.item())
