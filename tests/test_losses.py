import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfe.training.batching import select
from rlfe.training.losses import (
    AGGREGATIONS,
    Denominators,
    LossSettings,
    aggregate,
    denominators,
    kl_tokens,
    micro_batch,
    micro_batch_loss,
    mismatch_weights,
    token_loss,
)
from rlfe.types import Batch
from tests.reference import ATOL, RTOL, reference

LOSSES = reference("clipped_is_loss")["cases"]
REPLAY = [c for c in reference("replay_mixed_loss")["cases"] if c["name"].startswith("ppo_clip")]


def batch_of(
    behavior, advantages, mask, *, source=None, old=None, reference_logp=None, successes=None
):
    behavior_BL = np.array(behavior, np.float64)
    count = behavior_BL.shape[0]
    return Batch(
        ids_BL=np.zeros(behavior_BL.shape, np.int64),
        mask_BL=np.array(mask, bool),
        behavior_logp_BL=behavior_BL,
        advantage_B=np.array(advantages, np.float64),
        weight_B=np.ones(count),
        successes_B=np.array(successes if successes is not None else [1] * count),
        group_B=np.arange(count),
        source_B=np.array(source if source is not None else [0] * count, np.int8),
        old_logp_BL=old,
        reference_logp_BL=reference_logp,
    )


def loss_and_gradient(batch, logp_BL, loss_settings, *, micro_rows=None, entropy_BL=None):
    """Loss, gradient of the log-probabilities and summed metrics, through micro-batches."""
    logp = torch.tensor(np.array(logp_BL), dtype=torch.float64, requires_grad=True)
    totals: dict[str, float] = {}
    loss = 0.0
    count = logp.shape[0]
    for start in range(0, count, micro_rows or count):
        rows = slice(start, start + (micro_rows or count))
        micro = micro_batch(batch, rows, dtype=torch.float64)
        entropy = None if entropy_BL is None else torch.tensor(entropy_BL[rows])
        part, sums = micro_batch_loss(
            logp[rows], entropy, micro, loss_settings, denominators(batch)
        )
        part.backward()
        loss += part.item()
        totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
    return loss, logp.grad.numpy(), totals


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case["name"])
def test_agrees_with_verl_in_value_and_gradient(case, aggregation):
    width = len(case["mask"][0])
    chosen = LossSettings(
        max_tokens=width,  # verl divides by the padded width
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["dual_clip_c"],
        aggregation=aggregation,
    )
    batch = batch_of(case["behavior_logprobs"], case["advantages"], case["mask"])
    expected = case["out"][f"verl.vanilla.{aggregation}"]
    loss, gradient, _ = loss_and_gradient(batch, case["logprobs"], chosen)
    np.testing.assert_allclose(loss, expected["loss"], rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(gradient, expected["grad_logprobs"], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    ("column", "aggregation", "is_level"),
    [
        ("areal.token", "token-mean", "token"),
        ("openrlhf.token", "token-mean", "token"),
        ("openrlhf.sample", "seq-mean-token-mean", "token"),
        ("trl.grpo.token", "seq-mean-token-mean", "token"),
        ("trl.bnpo.token", "token-mean", "token"),
        ("trl.dapo.token", "token-mean", "token"),
        ("trl.grpo.sequence", "seq-mean-token-mean", "sequence"),
        ("trl.bnpo.sequence", "token-mean", "sequence"),
        ("trl.dr_grpo.token", "seq-mean-token-sum-norm", "token"),
        ("trl.dr_grpo.sequence", "seq-mean-token-sum-norm", "sequence"),
    ],
)
@pytest.mark.parametrize("batch_name", ["onpolicy", "mixed", "zero_adv", "single"])
def test_agrees_with_other_trainers_without_dual_clip(batch_name, column, aggregation, is_level):
    for case in LOSSES:
        if not case["name"].startswith(batch_name) or case["dual_clip_c"] is not None:
            continue
        chosen = LossSettings(
            max_tokens=16,
            clip_low=case["clip_low"],
            clip_high=case["clip_high"],
            aggregation=aggregation,
            is_level=is_level,
        )
        batch = batch_of(case["behavior_logprobs"], case["advantages"], case["mask"])
        loss, gradient, _ = loss_and_gradient(batch, case["logprobs"], chosen)
        expected = case["out"][column]
        np.testing.assert_allclose(loss, expected["loss"], rtol=RTOL, atol=ATOL)
        np.testing.assert_allclose(gradient, expected["grad_logprobs"], rtol=RTOL, atol=ATOL)


def test_the_mixed_case_by_aggregation():
    case = next(c for c in LOSSES if c["name"].startswith("mixed/lo0.2_hi0.2_c1e+09"))
    batch = batch_of(case["behavior_logprobs"], case["advantages"], case["mask"])
    values = {}
    for aggregation in AGGREGATIONS:
        chosen = LossSettings(max_tokens=16, aggregation=aggregation)
        values[aggregation] = round(loss_and_gradient(batch, case["logprobs"], chosen)[0], 6)
    assert values["token-mean"] == -0.918679
    assert values["seq-mean-token-mean"] == -0.560791
    assert values["seq-mean-token-sum"] == -3.674715
    assert values["seq-mean-token-sum-norm"] == -0.22967
    wide = LossSettings(max_tokens=16, clip_high=0.28)
    assert round(loss_and_gradient(batch, case["logprobs"], wide)[0], 6) == -0.948478


@pytest.mark.parametrize("case", REPLAY, ids=lambda case: case["name"])
def test_the_mixed_loss_of_prime_rl_in_value_and_gradient(case):
    sequences = case["rl_sequences"] + case["replay_sequences"]
    width = max(len(sequence["t"]) for sequence in sequences)

    def padded(key, fill):
        return np.array([s.get(key, s["t"]) + [fill] * (width - len(s["t"])) for s in sequences])

    batch = batch_of(
        padded("i", 0.0),
        [sequence.get("a", 0.0) for sequence in sequences],
        padded("m", 0),
        source=[int("a" not in sequence) for sequence in sequences],
    )
    chosen = LossSettings(max_tokens=8, replay_weight=case["lambda"])
    loss, gradient, _ = loss_and_gradient(batch, padded("t", 0.0), chosen, micro_rows=1)
    expected = np.array([row + [0.0] * (width - len(row)) for row in case["grads"]])
    np.testing.assert_allclose(loss, case["loss"], rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(gradient, expected, rtol=RTOL, atol=ATOL)


def test_the_mixed_loss_is_linear_in_lambda_and_leaves_the_policy_gradient_alone():
    losses = [round(case["loss"], 6) for case in REPLAY]
    assert losses == [-1.236431, -1.176431, -0.636431]
    assert losses[2] - losses[0] == pytest.approx(10 * (losses[1] - losses[0]), abs=1e-5)
    fresh = [np.concatenate([np.array(row) for row in case["grads"][:2]]) for case in REPLAY]
    np.testing.assert_array_equal(fresh[0], fresh[2])


KL_COLUMNS = [
    ("k1", None, "verl.k1"),
    ("k2", None, "verl.k2"),
    ("k3", None, "verl.k3"),
    ("abs", None, "verl.abs"),
    ("k1", "k2", "verl.k1+"),
    ("k3", "k2", "verl.k3+"),
]


@pytest.mark.parametrize(("estimator", "gradient_of", "column"), KL_COLUMNS)
@pytest.mark.parametrize("case", reference("kl")["cases"], ids=lambda case: case["name"])
def test_kl_agrees_in_value_and_gradient(case, estimator, gradient_of, column):
    logp = torch.tensor(case["logprobs"], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(case["ref_logprobs"], dtype=torch.float64)
    value = kl_tokens(logp, ref, estimator=estimator, gradient_of=gradient_of)
    value.sum().backward()
    expected = case["out"][column]
    np.testing.assert_allclose(value.detach(), expected["value"], rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(logp.grad, expected["grad_logprobs"], rtol=RTOL, atol=ATOL)


def test_token_values_of_k3():
    case = next(c for c in reference("kl")["cases"] if c["name"] == "mixed")
    value = kl_tokens(
        torch.tensor(case["logprobs"]).double(), torch.tensor(case["ref_logprobs"]).double()
    )
    expected = [0.004837, 0.005171, 0.367879, 0.718282, 0.106531, 4.992504]
    np.testing.assert_allclose(value, expected, atol=5e-7)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_k3_is_never_negative(pairs):
    pair = torch.tensor(pairs, dtype=torch.float64)
    assert (kl_tokens(pair[:, 0], pair[:, 1]) >= 0).all()


MISMATCH = {
    "verl.rollout_is=token/threshold=2.0/batch_norm=False": {"mode": "tis", "cap": 2.0},
    "verl.rollout_is=token/threshold=5.0/batch_norm=False": {"mode": "tis", "cap": 5.0},
    "verl.rollout_is=token/threshold=0.5_5.0/batch_norm=False": {
        "mode": "icepop", "low": 0.5, "high": 5.0,
    },
    "verl.rollout_is=sequence/threshold=2.0/batch_norm=False": {"mode": "sequence_tis", "cap": 2.0},
    "verl.rollout_is=sequence/threshold=5.0/batch_norm=False": {"mode": "sequence_tis", "cap": 5.0},
    "verl.rollout_rs=seq_mean_k3/0.1": {"mode": "reject", "limit": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCH)
def test_mismatch_weights_agree_with_verl(name):
    case = next(c for c in reference("is_correction")["cases"] if c["name"] == name)
    mask = torch.tensor(case["mask"]).bool()
    weight_BL = mismatch_weights(
        torch.tensor(case["train_logprobs"]).double(),
        torch.tensor(case["rollout_logprobs"]).double(),
        mask,
        **MISMATCH[name],
    )
    expected = case.get("weights", case.get("new_mask"))
    np.testing.assert_allclose(weight_BL * mask, expected, rtol=RTOL, atol=ATOL)


def test_unscored_tokens_weigh_one_and_weights_carry_no_gradient():
    old = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    behavior = torch.tensor([[-4.0, float("nan"), -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    token = mismatch_weights(old, behavior, mask, mode="tis")
    row = mismatch_weights(old, behavior, mask, mode="sequence_tis")
    assert token.tolist() == [[2.0, 1.0, 1.0]]
    assert row.tolist() == [[2.0, 1.0, 2.0]]
    assert not token.requires_grad


def test_mismatch_weights_multiply_and_denominators_stay():
    batch = batch_of([[-4.0, -1.0]], [1.0], [[1, 1]], old=np.array([[-1.0, -1.0]]))
    chosen = LossSettings(max_tokens=2, mismatch_mode="tis")
    assert loss_and_gradient(batch, [[-1.0, -1.0]], chosen)[0] == pytest.approx(-(2 + 1) / 2)


def test_at_the_old_policy_the_gradient_is_that_of_minus_mean_advantage():
    batch = batch_of([[-1.0, -2.0], [-0.5, 0.0]], [3.0, -2.0], [[1, 1], [1, 0]])
    _, gradient, _ = loss_and_gradient(batch, batch.behavior_logp_BL, LossSettings(max_tokens=2))
    np.testing.assert_allclose(gradient, [[-1.0, -1.0], [2 / 3, 0.0]])


def test_a_token_clipped_by_the_min_has_no_gradient():
    batch = batch_of([[-1.0, -1.0]], [1.0], [[1, 1]])
    _, gradient, _ = loss_and_gradient(batch, [[-0.5, -1.0]], LossSettings(max_tokens=2))
    assert gradient[0, 0] == 0.0
    assert gradient[0, 1] == -0.5


def test_a_log_ratio_of_24_on_a_negative_advantage_stays_finite():
    batch = batch_of([[-24.0]], [-1.0], [[1]])
    loss, gradient, _ = loss_and_gradient(batch, [[0.0]], LossSettings(max_tokens=1))
    assert loss == pytest.approx(np.exp(20))
    assert gradient[0, 0] == 0.0


def test_dual_clip_bounds_negative_advantages_only_and_is_counted():
    log_ratio = torch.tensor([[3.0], [3.0]])
    loss = token_loss(log_ratio, torch.tensor([-1.0, 1.0]), dual_clip=3.0)
    assert loss.tolist() == [[3.0], [pytest.approx(-1.2)]]
    batch = batch_of([[-3.0], [-3.0]], [-1.0, 1.0], [[1], [1]])
    chosen = LossSettings(max_tokens=1, dual_clip=3.0)
    assert loss_and_gradient(batch, [[0.0], [0.0]], chosen)[2]["dual_clipped"] == 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mask", [[[0, 0], [0, 0]], [[1, 1], [1, 0]]])
def test_no_mask_or_no_advantage_gives_no_loss_and_no_gradient(aggregation, mask):
    batch = batch_of([[-1.0, -2.0], [np.nan, -1.0]], [0.0, 0.0], mask)
    batch.behavior_logp_BL[1, 0] = -1.0 if mask[1][0] else np.nan
    chosen = LossSettings(max_tokens=2, aggregation=aggregation)
    loss, gradient, _ = loss_and_gradient(batch, [[-1.5, -2.5], [-0.1, np.nan]], chosen)
    assert loss == 0.0
    assert gradient.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_entropy_and_kl_are_aggregated_like_the_policy_loss():
    batch = batch_of([[-1.0, -1.0]], [0.0], [[1, 1]], reference_logp=np.array([[-2.0, -1.0]]))
    entropy_BL = np.array([[0.5, 1.5]])
    chosen = LossSettings(max_tokens=2, kl_beta=0.5, kl_estimator="k1", entropy_coef=0.1)
    loss, _, sums = loss_and_gradient(batch, [[-1.0, -1.0]], chosen, entropy_BL=entropy_BL)
    assert loss == pytest.approx(0.5 * 0.5 - 0.1 * 1.0)
    assert sums["loss/kl"] == pytest.approx(0.5)
    assert sums["entropy_sum"] / sums["tokens"] == pytest.approx(1.0)


def test_beta_zero_and_no_reference_are_identical():
    plain = batch_of([[-1.0, -1.3]], [1.0], [[1, 1]])
    with_reference = batch_of(
        [[-1.0, -1.3]], [1.0], [[1, 1]], reference_logp=np.array([[-9.0, -9.0]])
    )
    chosen = LossSettings(max_tokens=2, kl_beta=0.0)
    first = loss_and_gradient(plain, [[-1.1, -1.2]], chosen)
    second = loss_and_gradient(with_reference, [[-1.1, -1.2]], chosen)
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])


def random_batch(seed, rows, width, extra_width=0):
    """Fresh and replay rows with masks of any length, log-probabilities and entropies."""
    rng = np.random.default_rng(seed)
    length_B = rng.integers(0, width + 1, rows)
    mask_BL = np.arange(width)[None] < length_B[:, None]
    behavior_BL = -rng.exponential(1.0, (rows, width))
    logp_BL = behavior_BL + rng.normal(0, 0.3, (rows, width))
    ref_BL = behavior_BL + rng.normal(0, 0.3, (rows, width))
    old_BL = behavior_BL + rng.normal(0, 0.1, (rows, width))
    entropy_BL = rng.exponential(1.0, (rows, width))
    batch = batch_of(
        behavior_BL,
        rng.normal(0, 1, rows),
        mask_BL,
        source=rng.integers(0, 2, rows),
        old=old_BL,
        reference_logp=ref_BL,
    )
    return batch, logp_BL, entropy_BL


def widened(array, extra, fill):
    return np.pad(array, ((0, 0), (0, extra)), constant_values=fill)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    micro_rows=st.integers(1, 9),
    extra=st.integers(0, 3),
    aggregation=st.sampled_from(AGGREGATIONS),
    is_level=st.sampled_from(["token", "sequence"]),
    mode=st.sampled_from(["none", "tis", "sequence_tis", "icepop", "reject"]),
)
def test_gradients_do_not_depend_on_micro_batches_row_order_or_padding(
    seed, rows, micro_rows, extra, aggregation, is_level, mode
):
    chosen = LossSettings(
        max_tokens=5,
        aggregation=aggregation,
        is_level=is_level,
        mismatch_mode=mode,
        kl_beta=0.3,
        entropy_coef=0.01,
        replay_weight=0.1,
        dual_clip=3.0,
    )
    batch, logp_BL, entropy_BL = random_batch(seed, rows, 5)
    whole, gradient, _ = loss_and_gradient(batch, logp_BL, chosen, entropy_BL=entropy_BL)

    order = np.random.default_rng(seed).permutation(rows)
    moved = select(batch, order)
    padded = batch_of(
        widened(moved.behavior_logp_BL, extra, np.nan),
        moved.advantage_B,
        widened(moved.mask_BL, extra, False),
        source=moved.source_B,
        old=widened(moved.old_logp_BL, extra, np.nan),
        reference_logp=widened(moved.reference_logp_BL, extra, np.nan),
    )
    parts, other, _ = loss_and_gradient(
        padded,
        widened(logp_BL[order], extra, 0.0),
        chosen,
        micro_rows=micro_rows,
        entropy_BL=widened(entropy_BL[order], extra, 0.0),
    )
    size = max(1e-12, np.abs(gradient).max())
    assert abs(parts - whole) <= 1e-9 * max(1.0, abs(whole))
    assert np.abs(other[:, :5] - gradient[order]).max() / size < 1e-9
    assert np.all(other[:, 5:] == 0)


def test_denominators_of_ranks_add_up():
    batch, _, _ = random_batch(3, 8, 5)
    halves = [select(batch, rows) for rows in (np.arange(4), np.arange(4, 8))]
    vectors = [denominators(half).vector() for half in halves]
    total = Denominators.of(tuple(a + b for a, b in zip(*vectors, strict=True)))
    assert total == denominators(batch)


def test_unknown_names_and_shapes_are_refused():
    one = torch.ones(1, 1)
    counts = Denominators(tokens=1, rows=1, replay_tokens=0)
    with pytest.raises(ValueError, match="unknown aggregation"):
        aggregate(one, one.bool(), one[0], aggregation="mean", max_tokens=1, denominators=counts)
    with pytest.raises(ValueError, match="unknown KL estimator"):
        kl_tokens(one, one, estimator="k4")
    with pytest.raises(ValueError, match="k2 only"):
        kl_tokens(one, one, gradient_of="k1")
    with pytest.raises(ValueError, match="unknown mismatch mode"):
        mismatch_weights(one, one, one.bool(), mode="cap")
    batch = batch_of([[-1.0]], [1.0], [[1]])
    micro = micro_batch(batch, slice(0, 1))
    with pytest.raises(ValueError, match="shape"):
        micro_batch_loss(torch.zeros(2, 2), None, micro, LossSettings(max_tokens=1), counts)
    with pytest.raises(ValueError, match="unknown is_level"):
        micro_batch_loss(one, None, micro, LossSettings(max_tokens=1, is_level="word"), counts)
