"""The loss of an optimiser step, computed in micro-batches whose sum is the loss of the whole.

What: clipped importance sampling with five aggregations, KL and entropy terms, the replay NLL with
its own denominator, weights for a sampler/trainer mismatch. Denominators are counted once per
optimiser step over all ranks (`denominators`, then a sum over ranks) and passed in, so nothing
depends on how rows are divided; no wrapper may divide again. Not here: the model, optimiser steps,
diagnostics by success count. Formulas: docs/algorithms.md 3-7 and 10.5.

Shapes: B rows, L tokens. A token's log-probability stands at the token's own position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlfe.engines.transfer import on_device
from rlfe.types import Batch

LOG_RATIO_LIMIT = 20.0  # verl clamps the log ratio to +-20 before exp
KL_LIMIT = 10.0  # and the k3 value to +-10
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Numbers that the loss needs. `LossSettings(max_tokens=512, clip_high=0.28)`

    `max_tokens` is the L of `seq-mean-token-sum-norm`; `replay_weight` is lambda.
    """

    max_tokens: int
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    is_level: str = "token"
    aggregation: str = "token-mean"
    kl_beta: float = 0.0
    kl_estimator: str = "k3"
    kl_gradient_of: str | None = None
    entropy_coef: float = 0.0
    mismatch_mode: str = "none"
    mismatch_cap: float = 2.0
    mismatch_low: float = 0.5
    mismatch_high: float = 2.0
    mismatch_limit: float = 0.1
    replay_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts over one optimiser step. Sum them over ranks: `Denominators.of(vector)` after it."""

    tokens: float  # masked tokens of fresh rows
    rows: float  # fresh rows with at least one masked token
    replay_tokens: float  # masked tokens of replay rows

    def vector(self) -> tuple[float, float, float]:
        return (self.tokens, self.rows, self.replay_tokens)

    @classmethod
    def of(cls, vector: tuple[float, float, float]) -> Denominators:
        return cls(tokens=vector[0], rows=vector[1], replay_tokens=vector[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a `Batch` as tensors on the device of the loss (see `micro_batch`)."""

    mask_BL: torch.Tensor
    behavior_logp_BL: torch.Tensor
    advantage_B: torch.Tensor
    weight_B: torch.Tensor
    replay_B: torch.Tensor
    old_logp_BL: torch.Tensor | None = None
    reference_logp_BL: torch.Tensor | None = None


def denominators(batch: Batch) -> Denominators:
    """This rank's counts for all rows of one optimiser step."""
    length_B = batch.mask_BL.sum(axis=1)
    fresh_B = batch.source_B == 0
    return Denominators(
        tokens=float(length_B[fresh_B].sum()),
        rows=float(np.count_nonzero(length_B[fresh_B])),
        replay_tokens=float(length_B[~fresh_B].sum()),
    )


def micro_batch(
    batch: Batch,
    rows: slice | np.ndarray,
    *,
    width: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MicroBatch:
    """Rows of a batch as tensors, cut to `width` columns (None: the batch's width)."""

    def tensor(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
        part = array[rows] if array.ndim == 1 else array[rows, :width]
        return on_device(part, torch.device(device)).to(kind)

    old, reference = batch.old_logp_BL, batch.reference_logp_BL
    return MicroBatch(
        mask_BL=tensor(batch.mask_BL, torch.bool),
        behavior_logp_BL=tensor(batch.behavior_logp_BL, dtype),
        advantage_B=tensor(batch.advantage_B, dtype),
        weight_B=tensor(batch.weight_B, dtype),
        replay_B=tensor(batch.source_B == 1, torch.bool),
        old_logp_BL=None if old is None else tensor(old, dtype),
        reference_logp_BL=None if reference is None else tensor(reference, dtype),
    )


def micro_batch_loss(
    logp_BL: torch.Tensor,
    entropy_BL: torch.Tensor | None,
    micro: MicroBatch,
    settings: LossSettings,
    denominators: Denominators,
) -> tuple[torch.Tensor, dict[str, float]]:
    """This micro-batch's share of the step's loss, and its shares of the logged sums.

    Args:
        logp_BL: Current log-probabilities with gradient, at the sampling temperature; values
            outside the mask are not looked at and may be anything.
        entropy_BL: Full-vocabulary entropy per token, or None where it was not computed.
        micro: The rows; see `micro_batch`.
        denominators: Of the whole optimiser step, over all ranks.

    Returns:
        The loss (add `.backward()` of every micro-batch) and `loss/{policy,kl,entropy,replay,
        total}` as shares that add up, `entropy_sum` and `tokens`, `dual_clipped`.
    """
    total, sums = micro_batch_terms(logp_BL, entropy_BL, micro, settings, denominators)
    return total, {name: float(value) for name, value in sums.items()}


def micro_batch_terms(
    logp_BL: torch.Tensor,
    entropy_BL: torch.Tensor | None,
    micro: MicroBatch,
    settings: LossSettings,
    denominators: Denominators,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`micro_batch_loss` with the shares still on their device, so that nobody waits for them."""
    if logp_BL.shape != micro.mask_BL.shape:
        raise ValueError(f"logp_BL has shape {tuple(logp_BL.shape)}, mask {micro.mask_BL.shape}")
    fresh_BL = micro.mask_BL & ~micro.replay_B[:, None]
    replay_BL = micro.mask_BL & micro.replay_B[:, None]
    policy, dual_clipped = _policy_term(logp_BL, micro, fresh_BL, settings, denominators)
    kl = _kl_term(logp_BL, micro, fresh_BL, settings, denominators)
    entropy = _entropy_term(entropy_BL, micro, fresh_BL, settings, denominators)
    replay = replay_nll(logp_BL, replay_BL, denominators=denominators)
    total = policy
    if settings.kl_beta > 0:
        total = total + settings.kl_beta * kl
    if settings.entropy_coef > 0:
        total = total - settings.entropy_coef * entropy
    if settings.replay_weight > 0 and denominators.replay_tokens > 0:
        total = total + settings.replay_weight * replay
    sums = {
        "loss/policy": policy,
        "loss/kl": kl,
        "loss/entropy": entropy,
        "loss/replay": replay,
        "loss/total": total,
        "entropy_sum": policy.new_zeros(())
        if entropy_BL is None
        else _masked(entropy_BL, fresh_BL).sum(),
        "tokens": fresh_BL.sum(),
        "dual_clipped": dual_clipped,
    }
    return total, {name: value.detach() for name, value in sums.items()}


def token_loss(
    log_ratio_BL: torch.Tensor,
    advantage_B: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """-min(rho A, clamp(rho, 1-lo, 1+hi) A), with l <= -C A where A < 0 if dual_clip = C.

    arXiv:1707.06347; asymmetric bounds arXiv:2503.14476; dual clip arXiv:1912.09729.
    """
    ratio_BL = torch.exp(torch.clamp(log_ratio_BL, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    advantage_BL = advantage_B[:, None]
    clipped_BL = torch.clamp(ratio_BL, 1 - clip_low, 1 + clip_high) * advantage_BL
    loss_BL = -torch.minimum(ratio_BL * advantage_BL, clipped_BL)
    if dual_clip is None:
        return loss_BL
    return torch.where(advantage_BL < 0, torch.minimum(loss_BL, -dual_clip * advantage_BL), loss_BL)


def aggregate(
    value_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    weight_B: torch.Tensor,
    *,
    aggregation: str,
    max_tokens: int,
    denominators: Denominators,
) -> torch.Tensor:
    """This micro-batch's share of the aggregate; 0 if the step has nothing to divide by."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f'unknown aggregation "{aggregation}"; known: {", ".join(AGGREGATIONS)}')
    sum_B = _masked(value_BL, mask_BL).sum(dim=1) * weight_B
    if aggregation == "token-sum":
        return sum_B.sum()
    by_token = aggregation == "token-mean"
    divisor = denominators.tokens if by_token else denominators.rows
    if divisor == 0:
        return sum_B.sum() * 0.0
    if aggregation == "seq-mean-token-mean":
        sum_B = sum_B / mask_BL.sum(dim=1).clamp(min=1)
    if aggregation == "seq-mean-token-sum-norm":
        divisor = divisor * max_tokens
    return sum_B.sum() / divisor


def kl_tokens(
    logp: torch.Tensor,
    reference_logp: torch.Tensor,
    *,
    estimator: str = "k3",
    gradient_of: str | None = None,
) -> torch.Tensor:
    """KL estimate per token; `gradient_of="k2"`: value of the estimator, gradient of k2.

    k1 x-y, k2 (x-y)^2/2, k3 exp(y-x)-(y-x)-1 with clamps as in verl 0.9.1, abs |x-y|.
    """
    value = _kl_value(logp, reference_logp, estimator)
    if gradient_of is None:
        return value
    if gradient_of != "k2":
        raise ValueError(f'the gradient can be that of k2 only, got "{gradient_of}"')
    k2 = _kl_value(logp, reference_logp, "k2")
    return k2 - k2.detach() + value.detach()


def replay_nll(
    logp_BL: torch.Tensor, mask_BL: torch.Tensor, *, denominators: Denominators
) -> torch.Tensor:
    """Share of the mean of -c over the step's replay tokens; 0 without any (10.5)."""
    total = -_masked(logp_BL, mask_BL).sum()
    return total / denominators.replay_tokens if denominators.replay_tokens else total * 0.0


def mismatch_weights(
    old_logp_BL: torch.Tensor,
    behavior_logp_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    *,
    mode: str,
    cap: float = 2.0,
    low: float = 0.5,
    high: float = 2.0,
    limit: float = 0.1,
) -> torch.Tensor:
    """Weights [B, L] for tokens sampled by b and trained from o, without gradient (section 7).

    Tokens that the engine could not score (NaN) weigh 1. verl 0.9.1 `rollout_corr_helper.py`.
    """
    log_BL = torch.where(mask_BL, old_logp_BL - behavior_logp_BL, 0.0).detach()
    unscored_BL = torch.isnan(log_BL)
    log_BL = torch.where(unscored_BL, 0.0, log_BL)
    weight_BL = torch.exp(log_BL.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if mode == "tis":
        return weight_BL.clamp(max=cap)
    if mode == "sequence_tis":
        row_B = log_BL.sum(dim=1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
        return torch.where(unscored_BL, 1.0, row_B[:, None].expand_as(log_BL))
    if mode == "icepop":
        return torch.where((weight_BL >= low) & (weight_BL <= high), weight_BL, 0.0)
    if mode == "reject":
        k3_BL = weight_BL - 1 - log_BL
        mean_B = k3_BL.sum(dim=1) / mask_BL.sum(dim=1).clamp(min=1)
        return (mean_B <= limit).to(log_BL.dtype)[:, None].expand_as(log_BL)
    raise ValueError(f'unknown mismatch mode "{mode}"')


def _policy_term(
    logp_BL: torch.Tensor,
    micro: MicroBatch,
    fresh_BL: torch.Tensor,
    settings: LossSettings,
    denominators: Denominators,
) -> tuple[torch.Tensor, torch.Tensor]:
    behavior_BL = micro.behavior_logp_BL
    old_BL = behavior_BL if micro.old_logp_BL is None else micro.old_logp_BL
    log_ratio_BL = _masked(logp_BL - old_BL, fresh_BL)
    if settings.is_level == "sequence":  # arXiv:2507.18071
        clamped_BL = log_ratio_BL.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        mean_B = clamped_BL.sum(dim=1) / fresh_BL.sum(dim=1).clamp(min=1)
        log_ratio_BL = mean_B[:, None].expand_as(logp_BL)
    elif settings.is_level != "token":
        raise ValueError(f'unknown is_level "{settings.is_level}"; known: token, sequence')
    clip = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    loss_BL = token_loss(log_ratio_BL, micro.advantage_B, dual_clip=settings.dual_clip, **clip)
    dual_clipped = logp_BL.new_zeros(())
    if settings.dual_clip is not None:
        plain_BL = token_loss(log_ratio_BL, micro.advantage_B, **clip)
        dual_clipped = (fresh_BL & (loss_BL < plain_BL)).sum()
    if settings.mismatch_mode != "none":
        loss_BL = loss_BL * mismatch_weights(
            old_BL,
            behavior_BL,
            fresh_BL,
            mode=settings.mismatch_mode,
            cap=settings.mismatch_cap,
            low=settings.mismatch_low,
            high=settings.mismatch_high,
            limit=settings.mismatch_limit,
        )
    return _aggregate(loss_BL, fresh_BL, micro, settings, denominators), dual_clipped


def _kl_term(
    logp_BL: torch.Tensor,
    micro: MicroBatch,
    fresh_BL: torch.Tensor,
    settings: LossSettings,
    denominators: Denominators,
) -> torch.Tensor:
    if settings.kl_beta == 0:
        return logp_BL.new_zeros(())
    assert micro.reference_logp_BL is not None, "kl.beta > 0 needs reference_logp_BL"
    value_BL = kl_tokens(
        torch.where(fresh_BL, logp_BL, 0.0),
        torch.where(fresh_BL, micro.reference_logp_BL, 0.0),
        estimator=settings.kl_estimator,
        gradient_of=settings.kl_gradient_of,
    )
    return _aggregate(value_BL, fresh_BL, micro, settings, denominators)


def _entropy_term(
    entropy_BL: torch.Tensor | None,
    micro: MicroBatch,
    fresh_BL: torch.Tensor,
    settings: LossSettings,
    denominators: Denominators,
) -> torch.Tensor:
    if settings.entropy_coef == 0:
        return micro.weight_B.new_zeros(())
    assert entropy_BL is not None, "entropy.coef > 0 needs entropy_BL"
    return _aggregate(entropy_BL, fresh_BL, micro, settings, denominators)


def _aggregate(
    value_BL: torch.Tensor,
    mask_BL: torch.Tensor,
    micro: MicroBatch,
    settings: LossSettings,
    denominators: Denominators,
) -> torch.Tensor:
    return aggregate(
        value_BL,
        mask_BL,
        micro.weight_B,
        aggregation=settings.aggregation,
        max_tokens=settings.max_tokens,
        denominators=denominators,
    )


def _kl_value(logp: torch.Tensor, reference_logp: torch.Tensor, estimator: str) -> torch.Tensor:
    if estimator == "k1":
        return logp - reference_logp
    if estimator == "k2":
        return (logp - reference_logp) ** 2 / 2
    if estimator == "abs":
        return (logp - reference_logp).abs()
    if estimator == "k3":
        z = torch.clamp(reference_logp - logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.clamp(torch.exp(z) - z - 1, -KL_LIMIT, KL_LIMIT)
    raise ValueError(f'unknown KL estimator "{estimator}"; known: k1, k2, k3, abs')


def _masked(value_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Value inside the mask, exact 0 with zero gradient outside, whatever stands there."""
    return torch.where(mask_BL, value_BL, torch.zeros_like(value_BL))
