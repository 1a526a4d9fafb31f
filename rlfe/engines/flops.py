"""Model FLOPs of a pass, and the peaks to compare them with.

Counted is what the mathematics asks for: 2 operations per weight and token forward, the same for
the gradient of the activations, the same for the gradient of trained weights (so 6 N per token
when all are trained), and causal attention. Not counted: padding, layers that are computed again
for the gradient, element-wise work. Windows and recurrent layers count as their matrices only.
PaLM, arXiv:2204.02311, appendix B, with the causal half of attention.

Shapes: R rows of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Dense bfloat16 peaks of NVIDIA's data sheets, TFLOP/s; the first name that occurs counts.
PEAKS = {
    "B200": 2250.0,
    "GH200": 989.5,
    "H200": 989.5,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.5,
    "H800": 989.5,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
MEASURED_SIZE = 8192  # of the square matrices that measure a peak
MEASURED_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """What one token costs, in weights of matrices.

    `body` multiply every token, `head` only tokens whose logits are asked for; `trained_*` get a
    gradient. `attention` is the width of all heads, summed over full-attention layers.
    """

    body: float
    trained_body: float
    head: float
    trained_head: float
    attention: float

    def of(self, length_R: np.ndarray, *, tokens: int, scored: int, graded: bool) -> float:
        """FLOPs of a pass over rows of these lengths; `scored` tokens have logits.

        `tokens`: those that are computed (a shared prompt once), padding left out.
        """
        weights = 2 * (self.body * tokens + self.head * scored)
        attention = 2 * self.attention * float((length_R.astype(np.float64) ** 2).sum())
        if not graded:
            return weights + attention
        trained = 2 * (self.trained_body * tokens + self.trained_head * scored)
        return 2 * weights + trained + 3 * attention


def flops_of(model: Any) -> Flops:
    """Counted from the model's own weights; experts count by the share that a token visits."""
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    apart = {id(p) for part in (head, embedding) for p in part.parameters()}
    body = trained = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or id(parameter) in apart:
            continue
        count = parameter.numel() * (_visited(config) if ".experts." in name else 1.0)
        body += count
        trained += count if parameter.requires_grad else 0.0
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    size = float(sum(p.numel() for p in head.parameters() if p.ndim > 1))
    return Flops(
        body=body,
        trained_body=trained,
        head=size,
        trained_head=size if any(p.requires_grad for p in head.parameters()) else 0.0,
        attention=float(width * kinds.count("full_attention")),
    )


def _visited(config: Any) -> float:
    """Share of the experts that compute a token."""
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / count if count and chosen else 1.0


def known_peak(device_name: str) -> float | None:
    """FLOP/s of a GPU in dense bfloat16 by its name; None where it is not in the table."""
    for name, tera in PEAKS.items():
        if name in device_name:
            return tera * 1e12
    return None


def measured_peak(device: Any, size: int = MEASURED_SIZE) -> float:
    """FLOP/s that a bfloat16 matrix product reaches on this device."""
    import time

    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    wait()
    start = time.perf_counter()
    for _ in range(MEASURED_RUNS):
        a @ a
    wait()
    return 2 * size**3 * MEASURED_RUNS / (time.perf_counter() - start)
