"""Log-probability and entropy of chosen tokens straight from hidden states, a chunk at a time.

What: the product with the output head, whatever the architecture does behind it (a scale, a cap),
softmax and gather, for some rows of logits at a time; the backward pass computes those logits
again. So float32 logits of a whole micro-batch (M x V numbers, 10 GB for 16,384 tokens of a
vocabulary of 152,000) never exist. In lower precision both factors are rounded and their float32
sums are kept, as vLLM does with float32 logits (docs/vllm.md). Not here: which positions
(`logprobs.py`).

Shapes: M tokens, C tokens of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import once_differentiable

from rlfe.engines.compiled import compiled
from rlfe.errors import RequestError

KEEPS_SUMS = "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
CHUNK_NUMBERS = 2**28  # logits of a chunk: 1 GiB in float32
Tail = Callable[[torch.Tensor], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What is asked of the logits.

    `entropy` None: not computed (zeros); False: without gradient; True: with. `dtype` is that of
    the two factors of the head's product; `tail` None: nothing stands behind the head. `compiled`:
    what follows the product is one kernel instead of several.
    """

    temperature: float
    entropy: bool | None
    dtype: torch.dtype
    tail: Tail | None
    compiled: bool = False


def measured(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    ids_M: torch.Tensor,
    measure: Measure,
) -> Pair:
    """Log-probability of each token and entropy of its distribution, float32 [M] both."""
    with torch.autocast(hidden_MH.device.type, enabled=False):
        found = _Measured.apply(hidden_MH, weight_VH, bias_V, ids_M, measure)  # type: ignore[no-untyped-call]
    logp_M, entropy_M = found
    return logp_M, entropy_M


class _Measured(torch.autograd.Function):
    """d logp/dz = onehot - p and dH/dz = -p (log p + H), for z = tail(h W^T) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_M: torch.Tensor,
        measure: Measure,
    ) -> Pair:
        weight, parts = weight_VH.to(measure.dtype), []
        for part in _chunks(len(ids_M), len(weight)):
            z_CV = _logits(hidden_MH[part].to(measure.dtype), weight, bias_V)
            read = compiled(_read) if measure.compiled else _read
            ids_C = ids_M[part].clone()  # no view: see `compiled`
            parts.append(read(_behind(z_CV, measure), ids_C, measure.entropy is not None))
        logp_M, entropy_M, norm_M = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.measure = measure
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, ids_M, norm_M, entropy_M)
        if measure.entropy is not True:
            ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logp_grad_M: torch.Tensor, entropy_grad_M: torch.Tensor) -> Any:
        hidden_MH, weight_VH, bias_V, ids_M, norm_M, entropy_M = ctx.saved_tensors
        measure: Measure = ctx.measure
        weight = weight_VH.to(measure.dtype)
        hidden_grad_MH = torch.empty_like(hidden_MH)
        weight_grad = _sum_like(weight_VH) if ctx.needs_input_grad[1] else None
        bias_grad = _sum_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        for part in _chunks(len(ids_M), len(weight)):
            hidden = hidden_MH[part].to(measure.dtype)
            z_CV = _logits(hidden, weight, bias_V)
            slope = _Slope(ids_M[part], norm_M[part], logp_grad_M[part])
            if measure.entropy:
                slope = replace(slope, entropy=(entropy_M[part], entropy_grad_M[part]))
            if measure.compiled and measure.tail is None and bias_grad is None:
                grad_CV = slope.fused(z_CV, measure)
            else:
                grad_CV = _through_tail(z_CV, slope, measure)
                if bias_grad is not None:
                    bias_grad += grad_CV.sum(dim=0)
                grad_CV = grad_CV.to(measure.dtype)
            hidden_grad_MH[part] = product(grad_CV, weight).to(hidden_MH.dtype)
            if weight_grad is not None:
                weight_grad += product(grad_CV.t(), hidden)
        grads = (_as(weight_grad, weight_VH), _as(bias_grad, bias_V))
        return hidden_grad_MH, *grads, None, None


@dataclass(frozen=True, slots=True)
class _Slope:
    """Upstream gradients of a chunk, and what the forward pass kept. `entropy`: (H, its grad)."""

    ids_C: torch.Tensor
    norm_C: torch.Tensor
    logp_grad_C: torch.Tensor
    entropy: Pair | None = None

    def of(self, z_CV: torch.Tensor) -> torch.Tensor:
        """Gradient by z, written over z."""
        if self.entropy is not None:
            entropy_C, grad_C = self.entropy
            surprise_CV = (self.norm_C + -entropy_C)[:, None] - z_CV  # -(log p + H)
            factor_CV = surprise_CV.mul_(grad_C[:, None]).sub_(self.logp_grad_C[:, None])
            slope_CV = z_CV.sub_(self.norm_C[:, None]).exp_().mul_(factor_CV)
        else:
            slope_CV = z_CV.sub_(self.norm_C[:, None]).exp_().mul_(-self.logp_grad_C[:, None])
        return slope_CV.scatter_add_(1, self.ids_C[:, None], self.logp_grad_C[:, None])

    def fused(self, z_CV: torch.Tensor, measure: Measure) -> torch.Tensor:
        """Gradient by the head's output in the product's dtype, in one pass over the logits."""
        parts = (self.ids_C, self.norm_C, self.logp_grad_C, self.entropy)
        grad_CV: torch.Tensor = compiled(_slope)(z_CV, *parts, measure.temperature, measure.dtype)
        return grad_CV


def _slope(
    z_CV: torch.Tensor,
    ids_C: torch.Tensor,
    norm_C: torch.Tensor,
    logp_grad_C: torch.Tensor,
    entropy: Pair | None,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `_Slope.of`, through the temperature, in a form that compiles to one kernel."""
    logits_CV = z_CV if temperature == 1.0 else z_CV / temperature
    factor_CV = -logp_grad_C[:, None]
    if entropy is not None:
        entropy_C, grad_C = entropy
        factor_CV = (norm_C - entropy_C)[:, None].sub(logits_CV) * grad_C[:, None] + factor_CV
    slope_CV = torch.exp(logits_CV - norm_C[:, None]) * factor_CV
    chosen_CV = torch.arange(z_CV.shape[1], device=z_CV.device) == ids_C[:, None]
    slope_CV = slope_CV + torch.where(chosen_CV, logp_grad_C[:, None], 0.0)
    return (slope_CV if temperature == 1.0 else slope_CV / temperature).to(dtype)


def _through_tail(z_CV: torch.Tensor, slope: _Slope, measure: Measure) -> torch.Tensor:
    """Gradient by the head's own output."""
    if measure.tail is None:
        grad_CV = slope.of(_cooled(z_CV, measure.temperature))
        return _cooled(grad_CV, measure.temperature)
    with torch.enable_grad():
        raw_CV = z_CV.requires_grad_()
        out_CV = measure.tail(raw_CV)
    grad_CV = slope.of(_cooled(out_CV.detach().float().clone(), measure.temperature))
    grad_CV = _cooled(grad_CV, measure.temperature)
    return torch.autograd.grad(out_CV, raw_CV, grad_CV.to(out_CV.dtype))[0]


def _behind(z_CV: torch.Tensor, measure: Measure) -> torch.Tensor:
    """Logits as the distribution is made of them."""
    logits_CV = z_CV if measure.tail is None else measure.tail(z_CV).float()
    return _cooled(logits_CV, measure.temperature)


def _cooled(value_CV: torch.Tensor, temperature: float) -> torch.Tensor:
    return value_CV if temperature == 1.0 else value_CV.div_(temperature)


def _read(
    z_CV: torch.Tensor, ids_C: torch.Tensor, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probability, entropy or 0, log of the sum of exponentials), [C] each; z is spent."""
    norm_C = torch.logsumexp(z_CV, dim=-1)
    logp_C = z_CV.gather(1, ids_C[:, None])[:, 0] - norm_C
    if not entropy:
        return logp_C, torch.zeros_like(norm_C), norm_C
    p_CV = torch.softmax(z_CV, dim=-1)
    return logp_C, norm_C - p_CV.mul_(z_CV).sum(dim=-1), norm_C


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> torch.Tensor:
    z_CV = product(hidden_CH, weight_VH.t())
    return z_CV if bias_V is None else z_CV.add_(bias_V.float())


def product(a_NK: torch.Tensor, b_KP: torch.Tensor) -> torch.Tensor:
    """The matrix product with float32 sums as they are, not rounded to the factors' dtype."""
    if a_NK.dtype == torch.float32:
        return torch.mm(a_NK, b_KP)
    if a_NK.is_cuda and KEEPS_SUMS:
        wide: torch.Tensor = torch.ops.aten.mm.dtype(a_NK, b_KP, torch.float32)
        return wide
    return torch.mm(a_NK.float(), b_KP.float())


def _chunks(count: int, vocabulary: int) -> Iterator[slice]:
    """Even chunks of at most `CHUNK_NUMBERS` logits."""
    rows = max(1, CHUNK_NUMBERS // vocabulary)
    chunks = -(-count // rows)
    for index in range(chunks):
        yield slice(index * count // chunks, (index + 1) * count // chunks)


def _sum_like(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)


def _as(grad: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None or parameter is None else grad.to(parameter.dtype)


def liger(
    hidden_MH: torch.Tensor, weight_VH: torch.Tensor, ids_M: torch.Tensor, measure: Measure
) -> Pair:
    """The same by liger-kernel (0.8.3 or newer), for a head with nothing behind it.

    Raises:
        RequestError: It is not installed, too old, or lacks what this GPU needs.
    """
    try:
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Fused

        with torch.autocast(hidden_MH.device.type, enabled=False):
            nll_M, entropy_M = Fused.apply(
                hidden_MH.to(measure.dtype),
                weight_VH.to(measure.dtype),
                ids_M,
                temperature=measure.temperature,
                return_entropy=True,
            )
    except ImportError as error:
        raise RequestError(
            f'compute.logits = "liger" cannot be used: {error}',
            hint="pip install 'liger-kernel[cutedsl]>=0.8.3', or --set compute.logits=chunked.",
        ) from error
    entropy_M = entropy_M.float()
    return -nll_M, entropy_M if measure.entropy else entropy_M.detach()


class _Anything:
    """An output of the part below the head, of which nothing but its shape is used."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> torch.Tensor | None:
        return self.last_hidden_state if place == 0 else None


_HAS_TAIL: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def tail_of(model: Any) -> Tail | None:
    """What the model does to the head's output (scale, cap), as a function of [C, V]; or None."""
    if model not in _HAS_TAIL:
        weight = model.get_output_embeddings().weight
        probe = torch.linspace(-30, 30, len(weight), device=weight.device)[None]
        with torch.no_grad():
            _HAS_TAIL[model] = not torch.equal(_own_tail(model, probe).float(), probe)
    return partial(_own_tail, model) if _HAS_TAIL[model] else None


def _own_tail(model: Any, logits_CV: torch.Tensor) -> torch.Tensor:
    """The model's own `forward` with answers in place of the head and of all that is below it."""
    head, below = model.get_output_embeddings(), model.base_model
    nothing = _Anything(logits_CV.new_zeros((1, 1, head.in_features)))
    ids = torch.zeros((1, 1), dtype=torch.long, device=logits_CV.device)
    with (
        answering(below, lambda *_, **__: nothing),
        answering(head, lambda *_: logits_CV[None]),
    ):
        out: torch.Tensor = type(model).forward(model, input_ids=ids, use_cache=False).logits
    return out[0]


@contextmanager
def answering(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """The module answers with `forward` for a while; its hooks run as always."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
