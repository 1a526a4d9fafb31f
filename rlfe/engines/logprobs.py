"""Log-probabilities of the masked tokens of some rows, with as few logits as possible.

The output head is asked only at the positions that predict a masked token. `chunked` (the default)
puts `head.measured` in the head's place, so logits exist for some tokens at a time; `compiled` does
the same with fewer kernels; `full` computes them all at once with the head in float32, whatever
kind of head it is. What an architecture does
behind its head (a scale, a cap) stays in force either way.

Shapes: B rows, L tokens, T tokens of a packed sequence, M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rlfe.engines import head as heads
from rlfe.engines.packing import Packed, sequences
from rlfe.engines.transfer import on_device
from rlfe.types import Batch

Logits = Literal["chunked", "compiled", "full", "liger"]
ENTROPY_CHUNK = 256  # rows of logits at a time where the entropy needs no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One forward pass: the model's inputs, and for each masked token where its logits stand.

    `at` picks the predicting positions of the hidden states; the tokens stand at (row_M, column_M).
    """

    inputs: dict[str, torch.Tensor | None]
    at: tuple[torch.Tensor, torch.Tensor]
    row_M: torch.Tensor
    column_M: torch.Tensor


def scored(
    model: Any,
    batch: Batch,
    temperature: float,
    entropy_gradient: bool | None,
    *,
    share: bool = False,
    logits: Logits = "chunked",
    multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [B, L], float32, 0 outside the mask.

    Args:
        model: A transformers causal LM.
        batch: Right-padded rows; `ids_BL` and `mask_BL` are read.
        temperature: Logits are divided by it.
        entropy_gradient: None: entropy is not computed (zeros); False: without gradient.
        share: Compute the prompt of several rows once (`packing.can_share`).
        logits: How they are computed; a head that is no plain linear layer takes the full way.
        multiple: The model is given so wide rows (padded); a shared prompt's are as they are.
    """
    device = next(model.parameters()).device
    ids_BL = on_device(batch.ids_BL, device)
    logp_BL = torch.zeros(ids_BL.shape, dtype=torch.float32, device=device)
    entropy_BL = logp_BL.clone()
    whole = logits == "full" or not isinstance(model.get_output_embeddings(), torch.nn.Linear)
    for view in _views(batch, ids_BL, share, multiple):
        place = (view.row_M, view.column_M)
        if whole:
            logits_MV = _full_logits(model, view)
            found = _of_logits(logits_MV, ids_BL[place], temperature, entropy_gradient)
        else:
            found = _fused(model, view, ids_BL[place], temperature, entropy_gradient, logits)
        logp_BL = logp_BL.index_put(place, found[0])
        entropy_BL = entropy_BL.index_put(place, found[1])
    return logp_BL, entropy_BL


def _views(batch: Batch, ids_BL: torch.Tensor, share: bool, multiple: int) -> Iterator[View]:
    """The forward passes over the rows; none if nothing is masked."""
    device = ids_BL.device
    if share:
        yield from (_packed_view(packed, device) for packed in sequences(batch))
        return
    row_M, column_M = np.nonzero(batch.mask_BL)
    if row_M.size:
        rows, columns = on_device(row_M, device), on_device(column_M, device)
        at = (rows, columns - 1)  # position j-1 predicts token j
        padded_BL = torch.nn.functional.pad(ids_BL, (0, -ids_BL.shape[1] % multiple))
        yield View(inputs={"input_ids": padded_BL}, at=at, row_M=rows, column_M=columns)


def _packed_view(packed: Packed, device: torch.device) -> View:
    several = packed.segment_T.max(initial=0) > 1
    at_M = on_device(packed.at_M, device)
    return View(
        inputs={
            "input_ids": on_device(packed.ids_T, device)[None],
            "position_ids": on_device(packed.position_T, device)[None],
            "attention_mask": on_device(packed.allowed_TT(), device)[None, None]
            if several
            else None,
        },
        at=(torch.zeros_like(at_M), at_M),
        row_M=on_device(packed.row_M, device),
        column_M=on_device(packed.column_M, device),
    )


def _fused(
    model: Any,
    view: View,
    ids_M: torch.Tensor,
    temperature: float,
    entropy_gradient: bool | None,
    logits: Logits,
) -> heads.Pair:
    """Log-probabilities and entropies [M] from a head that gives these instead of logits."""
    head, kind = model.get_output_embeddings(), ids_M.device.type
    tail = heads.tail_of(model)
    found: list[torch.Tensor] = []

    def answer(hidden: torch.Tensor) -> torch.Tensor:
        lower = torch.is_autocast_enabled(kind)
        measure = heads.Measure(
            temperature=temperature,
            entropy=entropy_gradient,
            dtype=torch.get_autocast_dtype(kind) if lower else head.weight.dtype,
            tail=tail,
            compiled=logits == "compiled",
        )
        if logits == "liger" and tail is None and head.bias is None:
            return torch.stack(heads.liger(hidden[view.at], head.weight, ids_M, measure))
        pair = heads.measured(hidden[view.at], head.weight, head.bias, ids_M, measure)
        return torch.stack(pair)

    # A hook and not the model's output: what is done to logits behind the head is already in it.
    handle = head.register_forward_hook(lambda _module, _inputs, out: found.append(out))
    try:
        with heads.answering(head, answer):
            model(use_cache=False, **view.inputs)
    finally:
        handle.remove()
    logp_M, entropy_M = found[-1]  # a tail asks the head too, before it has answered
    return logp_M, entropy_M if entropy_gradient else entropy_M.detach()


def _full_logits(model: Any, view: View) -> torch.Tensor:
    """Logits [M, V]: the head is given the chosen positions only, and works in float32."""
    head = model.get_output_embeddings()
    dtype = next(head.parameters()).dtype
    plain: Any = torch.autocast(view.row_M.device.type, enabled=False)

    def select(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        plain.__enter__()
        return (arguments[0][view.at].to(dtype), *arguments[1:])

    def leave(*_: Any) -> None:
        plain.__exit__(None, None, None)

    handles = [
        head.register_forward_pre_hook(select),
        head.register_forward_hook(leave, always_call=True),
    ]
    try:
        logits_MV: torch.Tensor = model(use_cache=False, **view.inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits_MV


def _of_logits(
    logits_MV: torch.Tensor, ids_M: torch.Tensor, temperature: float, entropy_gradient: bool | None
) -> heads.Pair:
    """Log-probability of each token and entropy of its distribution (zeros if not asked), [M]."""
    logits_MV = logits_MV.float()
    if temperature != 1.0:
        logits_MV = logits_MV / temperature
    norm_M = torch.logsumexp(logits_MV, dim=-1)
    logp_M = logits_MV.gather(1, ids_M[:, None])[:, 0] - norm_M
    if entropy_gradient is None:
        return logp_M, torch.zeros_like(norm_M)
    return logp_M, _entropy(logits_MV, norm_M, entropy_gradient)


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
