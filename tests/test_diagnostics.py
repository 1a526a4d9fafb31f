from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfe.training.advantages import advantages
from rlfe.training.diagnostics import (
    DEFAULT_BUCKETS,
    TokenTable,
    advantage_metrics,
    bucket_of,
    by_success_count,
    changed_share,
    group_metrics,
    length_metrics,
    mismatch_metrics,
    replay_token_metrics,
    reward_metrics,
    row_nll,
    step_metrics,
    subset_metrics,
    token_table,
    used_buckets,
)
from rlfe.training.losses import mismatch_weights
from rlfe.training.rewards import as_array
from rlfe.types import Batch
from tests.reference import reference

FILE = reference("k_bucket_clip_metrics")
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
EIGHT = {"group_size": 8, "buckets": DEFAULT_BUCKETS, **CLIP}
THEIR_NAMES = {
    "tokens": "tokens",
    "clip_active": "clip_frac",
    "adv_mass": "abs_adv_mass",
    "clip_mass": "abs_adv_clipped",
    "wclip_active": "abs_adv_weighted_clip_frac",
    "kl_k1": "kl_behav_cur_k1",
    "kl_k3": "kl_behav_cur_k3",
    "ratio_p95": "ratio_p95",
}


def reference_batch(objective):
    count = len(FILE["k_per_rollout"])
    behavior_BL = np.array(FILE["behavior_logprobs"])
    batch = Batch(
        ids_BL=np.zeros(behavior_BL.shape, np.int64),
        mask_BL=np.array(FILE["mask"], bool),
        behavior_logp_BL=behavior_BL,
        advantage_B=np.array(FILE["advantages"][objective]),
        weight_B=np.ones(count),
        successes_B=np.array(FILE["k_per_rollout"]),
        group_B=np.arange(count) // 8,
        source_B=np.zeros(count, np.int8),
    )
    return batch, np.array(FILE["logprobs"])


@pytest.mark.parametrize("objective", ["grpo", "maxrl"])
def test_buckets_agree_with_the_reference(objective):
    found = by_success_count(token_table(*reference_batch(objective)), **EIGHT)
    expected = FILE["out"][objective]
    for bucket in ("1", "2", "3-5", "6-7", "all"):
        mine = found["" if bucket == "all" else bucket]
        for ours, theirs in THEIR_NAMES.items():
            np.testing.assert_allclose(
                mine[ours], expected[bucket][theirs], rtol=1e-5, atol=2e-6, err_msg=ours
            )


def test_groups_without_signal_show_ratio_and_kl_only():
    table = token_table(*reference_batch("grpo"))
    flat = table.where(np.isin(table.successes_T, [0, 8]))
    together = subset_metrics(flat, **CLIP)
    expected = FILE["out"]["grpo"]["0_or_8"]
    assert together["tokens"] == expected["tokens"]
    np.testing.assert_allclose(together["kl_k3"], expected["kl_behav_cur_k3"], rtol=1e-5)
    found = by_success_count(table, **EIGHT)["k=0"]
    assert "kl_k3" in found
    assert "wclip_active" not in found


def test_the_worked_example_of_weights_against_drift():
    totals, singles = {}, {}
    for objective in ("grpo", "maxrl"):
        found = by_success_count(token_table(*reference_batch(objective)), **EIGHT)
        totals[objective] = (found[""]["wclip_active"], found[""]["wclip_common"])
        singles[objective] = [
            (round(found[f"k={k}"]["wclip_active"], 6), round(found[f"k={k}"]["adv_share"], 4))
            for k in (1, 2, 4, 7)
        ]
    np.testing.assert_allclose(totals["grpo"], (0.297599, 0.297599), atol=5e-7)
    np.testing.assert_allclose(totals["maxrl"], (0.316594, 0.297599), atol=5e-7)
    f_k = [0.321429, 0.268293, 0.428571, 0.073171]
    assert singles["grpo"] == list(zip(f_k, [0.2396, 0.2680, 0.3170, 0.1754], strict=True))
    assert singles["maxrl"] == list(zip(f_k, [0.4279, 0.3133, 0.2140, 0.0448], strict=True))


def test_raw_and_active_fractions_of_the_worked_example():
    found = by_success_count(token_table(*reference_batch("maxrl")), **EIGHT)
    raw = [round(found[f"k={k}"]["clip_raw"], 4) for k in (1, 2, 4, 7)]
    active = [round(found[f"k={k}"]["clip_active"], 4) for k in (1, 2, 4, 7)]
    assert raw == [0.4615, 0.6207, 0.5714, 0.3793]
    assert active == [0.2308, 0.3103, 0.4286, 0.1034]
    assert (round(found[""]["clip_active"], 4), round(found[""]["clip_raw"], 4)) == (0.1796, 0.4551)


def random_table(seed, objective, tokens=60):
    rng = np.random.default_rng(seed)
    k_P = rng.integers(0, 9, 6)
    advantage_B = np.concatenate(
        [advantages(objective, np.array([1.0] * k + [0.0] * (8 - k))) for k in k_P]
    )
    row_T = rng.integers(0, 48, tokens)
    log_ratio_T = rng.normal(0, 0.3, tokens)
    return TokenTable(
        log_ratio_T=log_ratio_T,
        log_drift_T=log_ratio_T,
        advantage_T=advantage_B[row_T],
        successes_T=np.repeat(k_P, 8)[row_T],
        group_T=row_T // 8,
    )


@settings(deadline=None)
@given(st.integers(0, 5000))
def test_equal_ratios_give_equal_fractions_within_k_and_equal_common_totals(seed):
    grpo = by_success_count(random_table(seed, "grpo"), **EIGHT)
    maxrl = by_success_count(random_table(seed, "maxrl"), **EIGHT)
    for k in range(1, 8):
        if f"k={k}" in grpo:
            first, second = grpo[f"k={k}"], maxrl[f"k={k}"]
            np.testing.assert_allclose(first["wclip_active"], second["wclip_active"], rtol=1e-5)
    if grpo[""]["wclip_common"] is not None:
        np.testing.assert_allclose(
            grpo[""]["wclip_common"], maxrl[""]["wclip_common"], rtol=1e-5, atol=1e-12
        )


@settings(deadline=None)
@given(st.integers(0, 5000))
def test_shares_of_the_buckets_sum_to_one(seed):
    found = by_success_count(random_table(seed, "maxrl"), **EIGHT)
    shares = [found[name]["adv_share"] for name in DEFAULT_BUCKETS if name in found]
    if found[""]["adv_mass"]:
        assert sum(shares) == pytest.approx(1.0)
        assert found[""]["adv_share"] == 1.0
    else:
        assert all(share is None for share in shares)


def test_values_do_not_depend_on_row_order_or_on_replay_rows():
    batch, logp_BL = reference_batch("grpo")
    whole = step_metrics([token_table(batch, logp_BL)], **EIGHT)
    order = np.random.default_rng(0).permutation(48)
    extra = np.concatenate([order, [0, 1]])
    mixed = Batch(
        ids_BL=batch.ids_BL[extra],
        mask_BL=batch.mask_BL[extra],
        behavior_logp_BL=batch.behavior_logp_BL[extra],
        advantage_B=batch.advantage_B[extra],
        weight_B=batch.weight_B[extra],
        successes_B=batch.successes_B[extra],
        group_B=batch.group_B[extra],
        source_B=np.array([0] * 48 + [1, 1], np.int8),
    )
    other = step_metrics([token_table(mixed, logp_BL[extra])], **EIGHT)
    assert other.keys() == whole.keys()
    for name, value in whole.items():
        assert other[name] == pytest.approx(value, rel=1e-12), name


def test_optimiser_steps_merge_as_token_weighted_means_and_sums():
    table = random_table(1, "grpo", tokens=90)
    first, second = table.where(np.arange(90) < 60), table.where(np.arange(90) >= 60)
    merged = step_metrics([first, second], **EIGHT)
    whole = step_metrics([table], **EIGHT)
    for name in (
        "clip/tokens", "clip/adv_mass", "clip/clip_mass", "clip/groups", "clip/groups/1",
        "clip/adv_share", "clip/adv_share/3-5", "clip/adv_share/k=4",
    ):  # fmt: skip
        assert merged.get(name) == pytest.approx(whole.get(name)), name
    assert sum(merged.get(f"clip/adv_share/{b}", 0) for b in DEFAULT_BUCKETS) == pytest.approx(1)
    for name in ("clip/clip_raw", "kl/k1", "kl/k2", "kl/k3", "clip/clip_active/3-5"):
        assert merged[name] == pytest.approx(whole[name]), name


def test_names_of_the_logged_values():
    names = step_metrics([token_table(*reference_batch("maxrl"))], **EIGHT).keys()
    for stem in (
        "clip/wclip_active", "clip/wclip_raw", "clip/adv_share", "clip/clip_mass", "ratio/p05",
        "ratio/p95", "ratio/max", "ratio/logratio_std", "kl/k3",
    ):  # fmt: skip
        assert {stem, f"{stem}/3-5", f"{stem}/k=4"} <= names
    assert "clip/wclip_common" in names


def test_at_the_behaviour_policy_nothing_is_clipped():
    batch, _ = reference_batch("maxrl")
    found = step_metrics([token_table(batch, batch.behavior_logp_BL)], **EIGHT)
    assert found["ratio/max"] == 1.0
    assert found["clip/clip_raw"] == found["clip/wclip_active"] == found["kl/k3"] == 0.0


def test_missing_is_none_and_never_nan():
    empty = random_table(0, "grpo").where(np.zeros(60, bool))
    assert step_metrics([empty], **EIGHT) == {
        "clip/tokens": 0, "clip/groups": 0, "clip/adv_mass": 0, "clip/adv_share": None,
        "clip/wclip_common": None, "clip/common_mass": 0,
    }  # fmt: skip
    wild = TokenTable(
        log_ratio_T=np.array([1000.0]),
        log_drift_T=np.array([1000.0]),
        advantage_T=np.array([0.0]),
        successes_T=np.array([8]),
        group_T=np.array([0]),
    )
    found = subset_metrics(wild, **CLIP)
    assert found["ratio_max"] is None
    assert found["wclip_active"] is None
    assert found["clip_raw"] == 1.0


def test_old_and_behaviour_policy_are_kept_apart():
    batch, logp_BL = reference_batch("grpo")
    recomputed = replace(batch, old_logp_BL=logp_BL.copy())
    found = step_metrics([token_table(recomputed, logp_BL)], **EIGHT)
    assert found["ratio/max"] == 1.0
    np.testing.assert_allclose(found["kl/k3"], FILE["out"]["grpo"]["all"]["kl_behav_cur_k3"], 1e-5)


def test_sequence_level_ratios_are_row_means():
    batch, logp_BL = reference_batch("grpo")
    table = token_table(batch, logp_BL, is_level="sequence")
    tokens = int(batch.mask_BL[0].sum())
    row = (logp_BL[0] - batch.behavior_logp_BL[0])[batch.mask_BL[0]].mean()
    np.testing.assert_allclose(table.log_ratio_T[:tokens], row)


def test_buckets_of_eight():
    assert [bucket_of(k) for k in range(9)] == [
        None, "1", "2", "3-5", "3-5", "3-5", "6-7", "6-7", None,
    ]  # fmt: skip


def test_buckets_of_other_group_sizes_have_to_be_given():
    assert used_buckets(None, group_size=8) == DEFAULT_BUCKETS
    assert used_buckets(None, group_size=4) == ()
    assert used_buckets(("1-3",), group_size=4) == ("1-3",)


def test_group_shares_and_counts_per_k():
    found = group_metrics([0, 4, 2, 0, 1], [4, 4, 4, 0, 3], group_size=4)
    assert (found["groups/all_wrong"], found["groups/all_right"], found["groups/mixed"]) == (
        0.25, 0.25, 0.5,
    )  # fmt: skip
    assert [found[f"groups/k={k}"] for k in range(5)] == [1, 0, 1, 0, 1]
    assert group_metrics([], [], group_size=2)["groups/mixed"] is None


def test_lengths_and_truncation_by_outcome():
    found = length_metrics(
        np.array([10, 20, 30, 40]),
        np.array([False, False, False, True]),
        np.array([True, False, True, False]),
    )
    assert (found["length/mean"], found["length/max"]) == (25.0, 40)
    assert found["length/truncated"] == 0.25
    assert (found["length/truncated_correct"], found["length/truncated_wrong"]) == (0.0, 0.5)
    nothing = length_metrics(np.zeros(0), np.zeros(0, bool), np.zeros(0, bool))
    assert nothing["length/mean"] is None


def test_rewards_with_unscored_rollouts():
    found = reward_metrics([as_array([1, 0, None]), as_array([1])])
    assert found["reward/mean"] == found["reward/success"] == pytest.approx(2 / 3)
    assert found["reward/unscored"] == 0.25
    assert reward_metrics([], prefix="reward/kept_")["reward/kept_mean"] is None


def test_advantage_sizes():
    assert advantage_metrics([np.array([3.0, -1.0])]) == {"adv/abs_mean": 2.0, "adv/max": 3.0}
    assert advantage_metrics([]) == {"adv/abs_mean": None, "adv/max": None}


def test_mismatch_is_measured_before_any_cap():
    case = reference("is_correction")["cases"][0]
    old_BL, b_BL = np.array(case["train_logprobs"]), np.array(case["rollout_logprobs"])
    mask_BL = np.array(case["mask"], bool)
    found = mismatch_metrics(old_BL, b_BL, mask_BL)
    weight_T = np.exp((old_BL - b_BL)[mask_BL])
    assert found["mismatch/max"] == pytest.approx(np.exp(2.2), rel=1e-6)
    assert found["mismatch/mean"] == pytest.approx(weight_T.mean())
    assert found["mismatch/abs_mean"] == pytest.approx(np.abs(b_BL - old_BL)[mask_BL].mean())
    assert found["mismatch/abs_max"] == pytest.approx(np.abs(b_BL - old_BL)[mask_BL].max())
    assert found["mismatch/k1"] == pytest.approx((b_BL - old_BL)[mask_BL].mean())
    b_BL[0, 0] = np.nan
    assert mismatch_metrics(old_BL, b_BL, mask_BL)["mismatch/unscored"] == 1


@pytest.mark.parametrize(
    ("mode", "share"),
    [("none", 0.0), ("tis", 1 / 9), ("icepop", 3 / 9), ("sequence_tis", 3 / 9), ("reject", 5 / 9)],
)
def test_share_of_capped_or_zeroed_tokens(mode, share):
    case = reference("is_correction")["cases"][0]
    old_BL, b_BL = np.array(case["train_logprobs"]), np.array(case["rollout_logprobs"])
    mask_BL = np.array(case["mask"], bool)
    found = changed_share(old_BL, b_BL, mask_BL, mode=mode, limit=0.5)
    assert found == pytest.approx(share)
    if mode in ("icepop", "reject"):
        weight_BL = mismatch_weights(
            torch.tensor(old_BL), torch.tensor(b_BL), torch.tensor(mask_BL), mode=mode, limit=0.5
        )
        assert (weight_BL.numpy()[mask_BL] == 0).mean() == pytest.approx(share)


def test_replay_rows_have_their_own_values():
    batch, _ = reference_batch("grpo")
    source_B = np.array([1] + [0] * 47, np.int8)
    logp_BL = batch.behavior_logp_BL - 0.5
    found = replay_token_metrics(replace(batch, source_B=source_B), logp_BL)
    assert found["replay/tokens"] == batch.mask_BL[0].sum()
    assert found["replay/kl_to_behaviour"] == pytest.approx(0.5)
    nll = row_nll(logp_BL, batch.mask_BL)
    assert found["replay/loss_nll"] == pytest.approx(nll[0])
    assert row_nll(np.full((1, 2), np.nan), np.zeros((1, 2), bool)).tolist() == [0.0]


def test_kl_of_the_sampler_agrees_with_tinker_cookbook():
    case = reference("kl")["tinker_cookbook_kl_sample_train"][0]
    mask_BL = np.array(case["mask"], bool)
    drift_T = (np.array(case["training_logprobs"]) - np.array(case["sampling_logprobs"]))[mask_BL]
    table = TokenTable(
        log_ratio_T=drift_T,
        log_drift_T=drift_T,
        advantage_T=np.ones(drift_T.size),
        successes_T=np.ones(drift_T.size, np.int64),
        group_T=np.zeros(drift_T.size, np.int64),
    )
    found = subset_metrics(table, **CLIP)
    assert found["kl_k1"] == pytest.approx(case["out"]["optim/kl_sample_train_v1"], rel=1e-5)
    assert found["kl_k2"] == pytest.approx(case["out"]["optim/kl_sample_train_v2"], rel=1e-5)


def test_reward_and_flat_share_agree_with_a_whole_step_of_trl():
    run = reference("trl_trainer_run")
    rewards = np.array(as_array(run["rewards"])).reshape(8, 8)
    found = reward_metrics(rewards)
    assert found["reward/mean"] == pytest.approx(run["log_group"]["reward"], rel=1e-5)
    assert found["reward/std"] == pytest.approx(run["log_group"]["reward_std"], rel=1e-5)
    scored = [int((~np.isnan(reward_G)).sum()) for reward_G in rewards]
    groups = group_metrics([int((r >= 1).sum()) for r in rewards], scored, group_size=8)
    flat = groups["groups/all_wrong"] + groups["groups/all_right"]
    assert flat == run["log_group"]["frac_reward_zero_std"]
