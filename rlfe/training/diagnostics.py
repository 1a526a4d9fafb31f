"""What a step logs about its tokens, rollouts and groups: drift and clipping by success count.

What: the quantities of docs/algorithms.md 9 for each bucket of k, each single k and all tokens,
with the common-weight total that makes objectives comparable; group shares, lengths, rewards,
sampler/trainer mismatch. Float64, numpy, from per-token arrays of the fresh rows; replay rows
never enter. Absent is None, never NaN. Not here: anything that changes the training.

Names: `clip/wclip_active` all tokens, `clip/wclip_active/3-5` a bucket, `clip/wclip_active/k=4` a
single k; `ratio/...` and `kl/...` alike. k = 0 and k = N appear as single k, with ratio and KL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlfe.types import Batch

Value = float | int | None
Metrics = dict[str, Value]
DEFAULT_BUCKETS = ("1", "2", "3-5", "6-7")  # study 3, group size 8
DEFAULT_GROUP_SIZE = 8
SUMMED = ("tokens", "adv_mass", "clip_mass", "common_mass")
NO_SIGNAL = ("tokens", "groups", "ratio", "logratio", "kl")  # shown for k = 0 and k = N
PREFIX = {"ratio_": "ratio/", "logratio_": "ratio/logratio_", "kl_": "kl/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """The trained fresh tokens of one optimiser step, before its update; all [T].

    log_ratio_T is c - o (what is clipped), log_drift_T is c - b (KL of behaviour to current).
    """

    log_ratio_T: np.ndarray
    log_drift_T: np.ndarray
    advantage_T: np.ndarray
    successes_T: np.ndarray
    group_T: np.ndarray

    def where(self, chosen_T: np.ndarray) -> TokenTable:
        return TokenTable(
            log_ratio_T=self.log_ratio_T[chosen_T],
            log_drift_T=self.log_drift_T[chosen_T],
            advantage_T=self.advantage_T[chosen_T],
            successes_T=self.successes_T[chosen_T],
            group_T=self.group_T[chosen_T],
        )


def token_table(batch: Batch, logp_BL: np.ndarray, *, is_level: str = "token") -> TokenTable:
    """Masked fresh tokens of a batch with their current log-probabilities [B, L].

    `is_level="sequence"`: the log ratio of a token is its row's mean, as in the loss.
    """
    if logp_BL.shape != batch.mask_BL.shape:
        raise ValueError(f"logp_BL has shape {logp_BL.shape}, the batch {batch.mask_BL.shape}")
    fresh_BL = batch.mask_BL & (batch.source_B == 0)[:, None]
    behavior_BL = batch.behavior_logp_BL.astype(np.float64)
    old_BL = behavior_BL if batch.old_logp_BL is None else batch.old_logp_BL.astype(np.float64)
    log_ratio_BL = np.where(fresh_BL, logp_BL.astype(np.float64) - old_BL, 0.0)
    if is_level == "sequence":
        mean_B = log_ratio_BL.sum(axis=1) / np.maximum(fresh_BL.sum(axis=1), 1)
        log_ratio_BL = np.broadcast_to(mean_B[:, None], fresh_BL.shape)
    row_T = np.nonzero(fresh_BL)[0]
    return TokenTable(
        log_ratio_T=log_ratio_BL[fresh_BL],
        log_drift_T=logp_BL.astype(np.float64)[fresh_BL] - behavior_BL[fresh_BL],
        advantage_T=batch.advantage_B[row_T],
        successes_T=batch.successes_B[row_T],
        group_T=batch.group_B[row_T],
    )


def bucket_of(k: int, *, buckets: Sequence[str] = DEFAULT_BUCKETS) -> str | None:
    """The bucket that holds k successes; None for k = 0, k = N and any k outside."""
    return next((bucket for bucket in buckets if k in _members(bucket)), None)


def used_buckets(buckets: Sequence[str] | None, *, group_size: int) -> tuple[str, ...]:
    """The buckets to use: given ones, else those of group size 8; () for other sizes.

    That given ones lie within 1..N-1 and do not overlap is checked by `rlfe.recipe_checks`.
    """
    if buckets is None:
        return DEFAULT_BUCKETS if group_size == DEFAULT_GROUP_SIZE else ()
    return tuple(buckets)


def subset_metrics(table: TokenTable, *, clip_low: float, clip_high: float) -> Metrics:
    """Section 9.2 for one set of tokens (without `adv_share`, which needs all)."""
    mass_T = np.abs(table.advantage_T)
    mass = float(mass_T.sum())
    counts: Metrics = {
        "tokens": int(mass_T.size),
        "groups": int(np.unique(table.group_T).size),
        "adv_mass": mass,
    }
    if mass_T.size == 0:
        return counts
    with np.errstate(over="ignore", invalid="ignore"):
        ratio_T, drift_T = np.exp(table.log_ratio_T), np.exp(table.log_drift_T)
        low, middle, high = np.percentile(ratio_T, [5, 50, 95])
    above_T, below_T = ratio_T > 1 + clip_high, ratio_T < 1 - clip_low
    raw_T = above_T | below_T
    active_T = (above_T & (table.advantage_T > 0)) | (below_T & (table.advantage_T < 0))
    clip_mass = float(mass_T[active_T].sum())
    found: Metrics = {
        **counts,
        "clip_raw": float(raw_T.mean()),
        "clip_active": float(active_T.mean()),
        "wclip_raw": float(mass_T[raw_T].sum()) / mass if mass else None,
        "wclip_active": clip_mass / mass if mass else None,
        "clip_mass": clip_mass,
        "ratio_p05": float(low),
        "ratio_p50": float(middle),
        "ratio_p95": float(high),
        "ratio_max": float(ratio_T.max()),
        "logratio_std": float(table.log_ratio_T.std()),
        "kl_k1": float(-table.log_drift_T.mean()),
        "kl_k2": float(np.square(table.log_drift_T).mean() / 2),
        "kl_k3": float((drift_T - 1 - table.log_drift_T).mean()),
    }
    return {name: value if _finite(value) else None for name, value in found.items()}


def by_success_count(
    table: TokenTable,
    *,
    group_size: int,
    buckets: Sequence[str],
    clip_low: float,
    clip_high: float,
) -> dict[str, Metrics]:
    """Section 9.2 under "" (all tokens), each bucket's name, and "k=0".."k=N"; with `adv_share`.

    "" also holds `wclip_common` and `common_mass` (9.3). Subsets without tokens are left out.
    """
    named = [bucket_of(k, buckets=buckets) for k in range(group_size + 1)]
    masks = {name: np.array([it == name for it in named])[table.successes_T] for name in buckets}
    masks |= {f"k={k}": table.successes_T == k for k in range(group_size + 1)}
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    total = subset_metrics(table, **clip)
    found = {"": total}
    for name, chosen_T in masks.items():
        if chosen_T.any():
            found[name] = subset_metrics(table.where(chosen_T), **clip)
    mass = total["adv_mass"] or 0.0
    for metrics in found.values():
        metrics["adv_share"] = (metrics["adv_mass"] or 0.0) / mass if mass else None
    for name in ("k=0", f"k={group_size}"):
        if name in found:
            found[name] = {k: v for k, v in found[name].items() if k.startswith(NO_SIGNAL)}
    common, common_mass = _common_total(table, found, group_size)
    total["wclip_common"], total["common_mass"] = common, common_mass
    return found


def step_metrics(
    tables: Sequence[TokenTable],
    *,
    group_size: int,
    buckets: Sequence[str],
    clip_low: float,
    clip_high: float,
) -> Metrics:
    """Flat metrics of one training step from the tables of its optimiser steps.

    Token-weighted means over optimiser steps; counts and masses are sums, `adv_share` is that of
    the sums, groups are counted once.
    """
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    each = [
        by_success_count(table, group_size=group_size, buckets=buckets, **clip) for table in tables
    ]
    flat: Metrics = {}
    for subset in dict.fromkeys(name for found in each for name in found):
        present = [found[subset] for found in each if subset in found]
        for name in dict.fromkeys(key for metrics in present for key in metrics):
            if name == "groups" and len(tables) > 1:  # a group may be split over them
                value: Value = _groups(tables, subset)
            else:
                value = present[0][name] if len(tables) == 1 else _merged(name, present)
            flat[_key(name, subset)] = value
        if len(tables) > 1 and "adv_share" in present[0]:  # shares of the sums add up to 1
            mass, total = flat[_key("adv_mass", subset)] or 0.0, flat["clip/adv_mass"]
            flat[_key("adv_share", subset)] = mass / total if total else None
    return flat


def group_metrics(
    successes_P: Sequence[int], scored_P: Sequence[int], *, group_size: int
) -> Metrics:
    """Shares of all-wrong, all-right and mixed groups, and counts per k, of all sampled groups.

    A group with no scored rollout is in none of the three; k counts need the full group size.
    """
    if len(successes_P) != len(scored_P):
        raise ValueError(f"{len(successes_P)} success counts, {len(scored_P)} group sizes")
    pairs = [(k, n) for k, n in zip(successes_P, scored_P, strict=True) if n]
    count = len(pairs)
    wrong = sum(k == 0 for k, _ in pairs)
    right = sum(k == n for k, n in pairs)
    counts: Metrics = {
        f"groups/k={k}": sum(pair == (k, group_size) for pair in pairs)
        for k in range(group_size + 1)
    }
    return {
        "groups/all_wrong": wrong / count if count else None,
        "groups/all_right": right / count if count else None,
        "groups/mixed": (count - wrong - right) / count if count else None,
        **counts,
    }


def length_metrics(length_B: np.ndarray, truncated_B: np.ndarray, correct_B: np.ndarray) -> Metrics:
    """Completion tokens of all sampled rollouts; share cut, also among correct and wrong ones."""
    if not length_B.shape == truncated_B.shape == correct_B.shape:
        raise ValueError(f"shapes differ: {length_B.shape} {truncated_B.shape} {correct_B.shape}")
    if length_B.size == 0:
        return dict.fromkeys(("length/mean", "length/p95", "length/max", "length/truncated"))
    return {
        "length/mean": float(length_B.mean()),
        "length/p95": float(np.percentile(length_B, 95)),
        "length/max": int(length_B.max()),
        "length/truncated": float(truncated_B.mean()),
        "length/truncated_correct": _mean(truncated_B[correct_B]),
        "length/truncated_wrong": _mean(truncated_B[~correct_B]),
    }


def reward_metrics(
    rewards: Sequence[np.ndarray], *, success_threshold: float = 1.0, prefix: str = "reward/"
) -> Metrics:
    """Mean, deviation (ddof 1) and success rate of rewards as judged; share without a score."""
    reward_B = np.concatenate([np.asarray(r, np.float64) for r in rewards] or [np.zeros(0)])
    scored_B = reward_B[~np.isnan(reward_B)]
    return {
        f"{prefix}mean": _mean(scored_B),
        f"{prefix}std": float(scored_B.std(ddof=1)) if scored_B.size > 1 else None,
        f"{prefix}success": _mean(scored_B >= success_threshold),
        f"{prefix}unscored": _mean(np.isnan(reward_B)),
    }


def advantage_metrics(advantages: Sequence[np.ndarray]) -> Metrics:
    """Mean and largest |A| over the rollouts that are trained on."""
    size_B = np.abs(np.concatenate([*advantages, np.zeros(0)]))
    return {"adv/abs_mean": _mean(size_B), "adv/max": float(size_B.max()) if size_B.size else None}


def mismatch_metrics(
    old_logp_BL: np.ndarray, behavior_logp_BL: np.ndarray, mask_BL: np.ndarray
) -> Metrics:
    """Section 7 before any cap: weights w = exp(o - b), k1 and k3 of (b, o), unscored tokens.

    `abs_mean` and `abs_max` are of the absolute difference of log-probabilities, what TRL logs as
    `sampling/sampling_logp_difference` (trl/trainer/grpo_trainer.py).
    """
    log_T = old_logp_BL[mask_BL].astype(np.float64) - behavior_logp_BL[mask_BL]
    unscored = np.isnan(log_T)
    log_T = log_T[~unscored]
    found: Metrics = {"mismatch/unscored": int(unscored.sum())}
    if log_T.size == 0:
        return found
    weight_T = np.exp(np.clip(log_T, -20, 20))
    return found | {
        "mismatch/mean": float(weight_T.mean()),
        "mismatch/p95": float(np.percentile(weight_T, 95)),
        "mismatch/max": float(weight_T.max()),
        "mismatch/abs_mean": float(np.abs(log_T).mean()),
        "mismatch/abs_max": float(np.abs(log_T).max()),
        "mismatch/k1": float(-log_T.mean()),
        "mismatch/k3": float((weight_T - 1 - log_T).mean()),
    }


def changed_share(
    old_logp_BL: np.ndarray,
    behavior_logp_BL: np.ndarray,
    mask_BL: np.ndarray,
    *,
    mode: str,
    cap: float = 2.0,
    low: float = 0.5,
    high: float = 2.0,
    limit: float = 0.1,
) -> float | None:
    """Share of tokens whose mismatch weight was capped or zeroed; None without tokens."""
    log_BL = np.where(mask_BL, old_logp_BL.astype(np.float64) - behavior_logp_BL, 0.0)
    log_BL = np.clip(np.nan_to_num(log_BL, nan=0.0), -20, 20)
    weight_BL = np.exp(log_BL)
    if mode == "none":
        return 0.0 if mask_BL.any() else None
    if mode == "tis":
        changed_BL = weight_BL > cap
    elif mode == "icepop":
        changed_BL = (weight_BL < low) | (weight_BL > high)
    else:
        row_B = np.exp(np.clip(log_BL.sum(axis=1), -20, 20)) > cap
        if mode == "reject":
            k3_B = (weight_BL - 1 - log_BL).sum(axis=1) / np.maximum(mask_BL.sum(axis=1), 1)
            row_B = k3_B > limit
        changed_BL = np.broadcast_to(row_B[:, None], mask_BL.shape)
    return _mean(changed_BL[mask_BL])


def row_nll(logp_BL: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
    """Token mean of -c per row, float64 [B]; 0 for a row without tokens (replay's `nll`)."""
    total_B = np.where(mask_BL, logp_BL.astype(np.float64), 0.0).sum(axis=1)
    nll_B: np.ndarray = -total_B / np.maximum(mask_BL.sum(axis=1), 1)
    return nll_B


def replay_token_metrics(batch: Batch, logp_BL: np.ndarray) -> Metrics:
    """Tokens, mean NLL and mean b - c of the replay rows of a batch."""
    mask_BL = batch.mask_BL & (batch.source_B == 1)[:, None]
    logp_T = logp_BL[mask_BL].astype(np.float64)
    return {
        "replay/tokens": int(logp_T.size),
        "replay/loss_nll": _mean(-logp_T),
        "replay/kl_to_behaviour": _mean(batch.behavior_logp_BL[mask_BL] - logp_T),
    }


def _common_total(
    table: TokenTable, found: Mapping[str, Metrics], group_size: int
) -> tuple[float | None, float]:
    """sum_k W_k f_k / sum_k W_k, W_k the |A| mass that grpo (ddof 1, eps 1e-6) would give (9.3)."""
    numerator = mass = 0.0
    for k in range(1, group_size):
        share = found.get(f"k={k}", {}).get("wclip_active")
        if share is None:
            continue
        sign_T = np.sign(table.advantage_T[table.successes_T == k])
        spread = np.sqrt(k * (group_size - k) / (group_size * (group_size - 1))) + 1e-6
        right, wrong = (sign_T > 0).sum(), (sign_T < 0).sum()
        weight = float(right * (group_size - k) + wrong * k) / group_size / spread
        numerator, mass = numerator + weight * share, mass + weight
    return (numerator / mass if mass else None), mass


def _members(bucket: str) -> range:
    first, _, last = bucket.partition("-")
    return range(int(first), int(last or first) + 1)


def _within(successes_T: np.ndarray, bucket: str) -> np.ndarray:
    members = _members(bucket)
    inside_T: np.ndarray = (successes_T >= members.start) & (successes_T < members.stop)
    return inside_T


def _merged(name: str, present: Sequence[Metrics]) -> Value:
    values = [(metrics[name], metrics["tokens"] or 0) for metrics in present if name in metrics]
    known = [(value, tokens) for value, tokens in values if value is not None]
    if name in SUMMED:
        return sum(value for value, _ in known)
    weight = sum(tokens for _, tokens in known)
    return sum(value * tokens for value, tokens in known) / weight if weight else None


def _groups(tables: Sequence[TokenTable], subset: str) -> int:
    k_T = np.concatenate([table.successes_T for table in tables])
    group_T = np.concatenate([table.group_T for table in tables])
    if subset:
        group_T = group_T[_within(k_T, subset.removeprefix("k="))]
    return int(np.unique(group_T).size)


def _key(name: str, subset: str) -> str:
    stem = next(
        (new + name.removeprefix(old) for old, new in PREFIX.items() if name.startswith(old)), None
    )
    stem = stem or f"clip/{name}"
    return f"{stem}/{subset}" if subset else stem


def _finite(value: Value) -> bool:
    return value is None or bool(np.isfinite(value))


def _mean(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if values.size else None
