"""Adapters of the training room: case input -> real code -> case output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlfe.engines.base import Snapshot
from rlfe.errors import RlfeError
from rlfe.training.advantages import advantages
from rlfe.training.diagnostics import TokenTable, bucket_of, subset_metrics
from rlfe.training.filters import kept_indices, reward_scores
from rlfe.training.rewards import as_array
from rlfe.training.staleness import SnapshotQueue


def advantage(given: dict[str, Any]) -> dict[str, Any]:
    rewards = given["rewards"]
    grouped = bool(rewards) and isinstance(rewards[0], list)
    try:
        found = [
            advantages(given["kind"], as_array(group)).tolist()
            for group in (rewards if grouped else [rewards])
        ]
    except RlfeError:
        return {"error": True}
    return {"advantages": found if grouped else found[0]}


def k_bucket(given: dict[str, Any]) -> dict[str, Any]:
    return {"bucket": bucket_of(given["k"])}


def clip_metrics(given: dict[str, Any]) -> dict[str, Any]:
    log_ratio_T = np.log(np.array(given["ratio"], np.float64))
    table = TokenTable(
        log_ratio_T=log_ratio_T,
        log_drift_T=log_ratio_T,
        advantage_T=np.array(given["adv"], np.float64),
        successes_T=np.ones(log_ratio_T.size, np.int64),
        group_T=np.zeros(log_ratio_T.size, np.int64),
    )
    found = subset_metrics(table, clip_low=0.2, clip_high=0.2)
    return {
        "raw": found["clip_raw"],
        "active": found["clip_active"],
        "weighted_raw": found["wclip_raw"],
        "weighted_active": found["wclip_active"],
    }


def stale_sampler(given: dict[str, Any]) -> dict[str, Any]:
    queue = SnapshotQueue(lag=given["lag"])
    for step in range(given["step"] + 1):
        if step == given["resumed_at"]:
            saved, queue = queue.held(), SnapshotQueue(lag=given["lag"])
            for snapshot in saved:
                queue.push(snapshot)
        queue.push(Snapshot(version=step, fingerprint=str(step), weights=None))
    version = queue.behavior(given["step"]).version
    return {"snapshot": version, "effective_lag": given["step"] - version}


def rollout_filter(given: dict[str, Any]) -> dict[str, Any]:
    score_P = reward_scores(
        [as_array(group) for group in given["rewards"]], metric="reward_variance"
    )
    kept = kept_indices(
        score_P,
        strategy=given["strategy"],
        value=given["value"],
        include_zero=given["include_zero"],
        eps=given["eps"],
    ).tolist()
    return {"kept": kept, "empty": not kept, "kept_count": len(kept)}


def named_fields_only(output: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """`kept_count` leaves ties open and `empty` is said only where true: compare what is named."""
    return [
        f"{name}: {output.get(name)!r} instead of {value!r}"
        for name, value in expected.items()
        if output.get(name) != value
    ]


ADAPTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "advantage": advantage,
    "k_bucket": k_bucket,
    "clip_metrics": clip_metrics,
    "stale_sampler": stale_sampler,
    "rollout_filter": rollout_filter,
}
COMPARE = {"rollout_filter": named_fields_only}
