"""One token for each row: temperature, top-k, top-p, min-p, and one uniform number per token.

The uniform numbers come from (request seed, row), so a token depends on its own row alone. Without
truncation nothing is sorted: the draw inverts the cumulative distribution in float64. With top-p
the most probable tokens are looked at first and the whole vocabulary only if they do not reach p.

Shapes: R rows, V vocabulary, K most probable tokens. Try: tests/test_transformers_engine.py.
"""

from __future__ import annotations

import numpy as np
import torch

from rlfe.types import Sampling

FIRST_LOOK = 512  # tokens sorted before the whole vocabulary is


def uniforms(sampling: Sampling) -> np.ndarray:
    """The uniform numbers of a request, float64 [n, max_tokens]; row i depends on (seed, i)."""
    rows = [np.random.default_rng((sampling.seed, row)) for row in range(sampling.n)]
    return np.stack([generator.random(sampling.max_tokens) for generator in rows])


def draw(
    logits_RV: torch.Tensor, uniform_R: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [R] and their log-probabilities [R] (float32).

    Log-probabilities are those of the whole distribution at the sampling temperature (greedy: at
    temperature 1), before truncation; training refuses truncation (docs/algorithms.md 6).
    """
    scaled_RV = logits_RV.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled_RV = scaled_RV / sampling.temperature
    logp_RV = torch.log_softmax(scaled_RV, dim=-1)
    if sampling.temperature == 0.0:
        token_R = logp_RV.argmax(dim=-1)
    elif sampling.top_p >= 1.0 and sampling.top_k < 1 and sampling.min_p <= 0.0:
        token_R = _inverse(logp_RV.exp(), uniform_R)
    else:
        token_R = _truncated(logp_RV, uniform_R, sampling)
    return token_R, logp_RV.gather(1, token_R[:, None])[:, 0]


def _truncated(logp_RV: torch.Tensor, uniform_R: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    vocabulary = logp_RV.shape[1]
    look = min(vocabulary, max(FIRST_LOOK, sampling.top_k))
    while True:
        top_RK, index_RK = logp_RV.topk(look, dim=-1)
        probability_RK = top_RK.exp().double()
        reached_RK = probability_RK.cumsum(dim=-1)
        if look == vocabulary or _settled(probability_RK, reached_RK, sampling):
            break
        look = vocabulary
    keep_RK = reached_RK - probability_RK < sampling.top_p
    if sampling.top_k >= 1:
        keep_RK[:, sampling.top_k :] = False
    if sampling.min_p > 0:
        keep_RK &= probability_RK >= sampling.min_p * probability_RK[:, :1]
    keep_RK[:, 0] = True
    place_R = _inverse(torch.where(keep_RK, probability_RK, 0.0), uniform_R)
    return index_RK.gather(1, place_R[:, None])[:, 0]


def _settled(probability_RK: torch.Tensor, reached_RK: torch.Tensor, sampling: Sampling) -> bool:
    """Whether no token beyond the first K can be kept."""
    if 1 <= sampling.top_k <= probability_RK.shape[1]:
        return True
    full_R = reached_RK[:, -1] >= sampling.top_p
    if sampling.min_p > 0:
        full_R |= probability_RK[:, -1] < sampling.min_p * probability_RK[:, 0]
    return bool(full_R.all())


def _inverse(weight_RK: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative weight exceeds u x total: never one of weight 0."""
    reached_RK = weight_RK.double().cumsum(dim=-1)
    total_R = reached_RK[:, -1]
    below_R = torch.nextafter(total_R, torch.zeros_like(total_R))  # u near 1 may round up to 1
    target_R = torch.minimum(uniform_R * total_R, below_R)
    return torch.searchsorted(reached_RK, target_R[:, None], right=True)[:, 0]
