"""Log-probabilities of the masked tokens of some rows, with as few logits as possible.

The output head sees only the positions that predict a masked token: a hook in front of it selects
them, so scalings and caps that an architecture applies behind its head stay in force. Float32 from
the head on, whatever the model computes in.

Shapes: B rows, L tokens, T tokens of a packed sequence, M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rlfe.engines.packing import Packed, prompt_keys, sequences
from rlfe.types import Batch

TOKEN_BUDGET = {"cpu": 2048, "cuda": 16384}  # tokens of a micro-batch
OTHER_BUDGET = 8192  # on any other device
ENTROPY_CHUNK = 256  # rows of logits at a time where the entropy needs no gradient


def scored(
    model: Any,
    batch: Batch,
    temperature: float,
    entropy_gradient: bool | None,
    *,
    share: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [B, L], float32, 0 outside the mask.

    Args:
        model: A transformers causal LM.
        batch: Right-padded rows; `ids_BL` and `mask_BL` are read.
        temperature: Logits are divided by it.
        entropy_gradient: None: entropy is not computed (zeros); False: without gradient.
        share: Compute the prompt of several rows once (`packing.can_share`).
    """
    device = next(model.parameters()).device
    ids_BL = torch.as_tensor(batch.ids_BL, device=device)
    mask_BL = torch.as_tensor(batch.mask_BL, device=device)
    logp_BL = torch.zeros(mask_BL.shape, dtype=torch.float32, device=device)
    entropy_BL = logp_BL.clone()
    if not bool(mask_BL.any()):
        return logp_BL, entropy_BL
    if share:
        for packed in sequences(batch):
            logits_MV = _packed_logits(model, packed, device)
            place = (torch.as_tensor(packed.row_M), torch.as_tensor(packed.column_M))
            found = _measured(logits_MV, ids_BL[place], temperature, entropy_gradient)
            logp_BL = logp_BL.index_put(place, found[0])
            entropy_BL = entropy_BL.index_put(place, found[1])
        return logp_BL, entropy_BL
    logits_MV = _logits(model, ids_BL, mask_BL)
    found = _measured(logits_MV, ids_BL[mask_BL], temperature, entropy_gradient)
    return logp_BL.masked_scatter(mask_BL, found[0]), entropy_BL.masked_scatter(mask_BL, found[1])


def _measured(
    logits_MV: torch.Tensor, ids_M: torch.Tensor, temperature: float, entropy_gradient: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token and entropy of its distribution (zeros if not asked), [M]."""
    logits_MV = logits_MV.float()
    if temperature != 1.0:
        logits_MV = logits_MV / temperature
    norm_M = torch.logsumexp(logits_MV, dim=-1)
    logp_M = logits_MV.gather(1, ids_M[:, None])[:, 0] - norm_M
    if entropy_gradient is None:
        return logp_M, torch.zeros_like(norm_M)
    return logp_M, _entropy(logits_MV, norm_M, entropy_gradient)


def _logits(model: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Logits [M, V] that predict the masked tokens, in row-major order."""
    before_BL = torch.zeros_like(mask_BL)
    before_BL[:, :-1] = mask_BL[:, 1:]  # position j-1 predicts token j
    return _selected(model, before_BL, input_ids=ids_BL)


def _packed_logits(model: Any, packed: Packed, device: torch.device) -> torch.Tensor:
    """Logits [M, V] of a packed sequence, at `at_M`."""
    several = packed.segment_T.max(initial=0) > 1
    mask = torch.as_tensor(packed.allowed_TT(), device=device)[None, None] if several else None
    return _selected(
        model,
        (0, torch.as_tensor(packed.at_M, device=device)),
        input_ids=torch.as_tensor(packed.ids_T, device=device)[None],
        position_ids=torch.as_tensor(packed.position_T, device=device)[None],
        attention_mask=mask,
    )


def _selected(model: Any, places: Any, **inputs: Any) -> torch.Tensor:
    """Logits at the chosen places only: the head is given nothing else, and works in float32.

    Under bf16 autocast a rounded head is a seventh of the difference to vLLM (docs/vllm.md).
    """
    head = model.get_output_embeddings()
    plain: Any = torch.autocast(next(head.parameters()).device.type, enabled=False)

    def select(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        plain.__enter__()
        return (arguments[0][places].to(next(head.parameters()).dtype), *arguments[1:])

    def leave(*_: Any) -> None:
        plain.__exit__(None, None, None)

    handles = [
        head.register_forward_pre_hook(select),
        head.register_forward_hook(leave, always_call=True),
    ]
    try:
        logits_MV: torch.Tensor = model(use_cache=False, **inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits_MV


def _entropy(logits_MV: torch.Tensor, norm_M: torch.Tensor, gradient: bool) -> torch.Tensor:
    """-sum p log p over the vocabulary, [M]."""
    if gradient:
        logp_MV = logits_MV - norm_M[:, None]
        return -(logp_MV.exp() * logp_MV).sum(dim=-1)
    parts = []
    with torch.no_grad():
        for start in range(0, logits_MV.shape[0], ENTROPY_CHUNK):
            logits_CV = logits_MV[start : start + ENTROPY_CHUNK]
            norm_C = norm_M[start : start + ENTROPY_CHUNK]
            p_CV = (logits_CV - norm_C[:, None]).exp_()
            parts.append(norm_C - (p_CV.mul_(logits_CV)).sum(dim=-1))
    return torch.cat(parts)


def micro_batches(
    batch: Batch, graded_B: np.ndarray, size: int | None, device: str, *, share: bool = False
) -> Iterator[np.ndarray]:
    """Row indices of each forward pass: rows that need a gradient apart, alike rows together.

    `size` None: as many rows as the device's token budget takes, at least one. Alike: of one
    length, or with `share` of one prompt, which then counts once.
    """
    length_B, budget = _lengths(batch.mask_BL), TOKEN_BUDGET.get(device, OTHER_BUDGET)
    keys = prompt_keys(batch) if share else [b""] * len(length_B)
    for graded in (True, False):
        part: list[int] = []
        rows = np.flatnonzero(graded_B == graded).tolist()
        for row in sorted(rows, key=lambda row: (keys[row], length_B[row])):
            longer = [*part, row]
            tokens = _shared_tokens(batch, longer, keys) if share else _padded(length_B[longer])
            if part and (len(part) == size or (size is None and tokens > budget)):
                yield np.array(part)
                longer = [row]
            part = longer
        if part:
            yield np.array(part)


def _padded(length_R: np.ndarray) -> int:
    return int(length_R.size * length_R.max())


def _shared_tokens(batch: Batch, rows: list[int], keys: list[bytes]) -> int:
    """Masked tokens of the rows and the tokens of their different prompts."""
    prompts = {keys[row]: int(np.argmax(batch.mask_BL[row])) for row in rows}
    return int(batch.mask_BL[rows].sum()) + sum(prompts.values())


def rows_of(batch: Batch, rows: np.ndarray) -> Batch:
    """Some rows, cut to their own width (at least 1)."""
    width = max(1, int(_lengths(batch.mask_BL[rows]).max()))

    def cut(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[rows, :width]

    return Batch(
        ids_BL=batch.ids_BL[rows, :width],
        mask_BL=batch.mask_BL[rows, :width],
        behavior_logp_BL=batch.behavior_logp_BL[rows, :width],
        advantage_B=batch.advantage_B[rows],
        weight_B=batch.weight_B[rows],
        successes_B=batch.successes_B[rows],
        group_B=batch.group_B[rows],
        source_B=batch.source_B[rows],
        old_logp_BL=cut(batch.old_logp_BL),
        reference_logp_BL=cut(batch.reference_logp_BL),
    )


def _lengths(mask_BL: np.ndarray) -> np.ndarray:
    """Tokens up to the last masked one, [B]; 0 where nothing is masked."""
    width = mask_BL.shape[1]
    last_B: np.ndarray = width - np.argmax(mask_BL[:, ::-1], axis=1)
    return np.where(mask_BL.any(axis=1), last_B, 0)
