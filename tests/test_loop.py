"""The training loop on the tiny model: what a step does, and what must not change anything."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlfe.checkpoints import problems
from rlfe.engines.base import Snapshot
from rlfe.errors import RequestError, RlfeError
from rlfe.records import read_jsonl, read_jsonl_zst
from rlfe.training import loop, update
from rlfe.training.job import Nobody
from rlfe.training.loop import train
from rlfe.types import Status, Verdict
from tests.training_doubles import REPLAY, Letters, a_job, a_run


@pytest.fixture(autouse=True)
def exact(one_thread: None) -> None:
    """Every run here is on the exact engine: CPU, float32, one thread."""


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what costs time or memory."""
    costs = ("seconds", "memory", "speed")
    return [
        {name: value for name, value in line.items() if name not in costs}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]


def weights(folder: Path, step: int) -> bytes:
    return (folder / f"global_step_{step}" / "model.safetensors").read_bytes()


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_jsonl_zst(folder / "rollouts" / f"step_{step:06d}.jsonl.zst")
    return found


def test_a_run_keeps_whole_checkpoints_lines_and_rollouts(tiny_model: Path, tmp_path: Path) -> None:
    ending = a_run(tiny_model, tmp_path / "run", {**REPLAY, "train.steps": 5})
    assert (ending.status, ending.step) == ("done", 5)
    kept = sorted(path.name for path in (tmp_path / "run").glob("global_step_*"))
    assert kept == ["global_step_2", "global_step_4", "global_step_5"]
    for name in kept:
        assert problems(tmp_path / "run" / name, need_tokenizer_config=True) == []
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert weights(tmp_path / "run", 2) != weights(tmp_path / "run", 5)
    first = rollouts(tmp_path / "run", 1)
    assert len(first) == 12
    assert {record["slot"] for record in first} == {0, 1, 2}
    assert all(len(record["token_ids"]) == len(record["logprobs"]) for record in first)
    assert not list((tmp_path / "run").glob(".*partial"))


def test_rewards_rise_on_an_easy_task(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"train.steps": 25, "train.group_size": 8, "save.every": 25, "optim.lr": 5e-3}
    a_run(tiny_model, tmp_path / "run", changes, task=Letters("e"))
    reward = [line["reward/mean"] for line in lines(tmp_path / "run")]
    assert np.mean(reward[-5:]) > np.mean(reward[:5]) + 0.2


def test_at_lag_0_every_ratio_is_1_and_nothing_is_clipped(tiny_model, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run")
    for line in lines(tmp_path / "run"):
        assert abs(line["ratio/max"] - 1) < 1e-5
        assert abs(line["ratio/p05"] - 1) < 1e-5
        assert line["clip/clip_raw"] == line["clip/clip_active"] == 0
        assert line["lag"] == 0
        assert line["lag/fresh_ok"] == 1


def test_temperature_keeps_the_ratios_at_1(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run", {"train.temperature": 0.6})
    assert all(abs(line["ratio/max"] - 1) < 1e-5 for line in lines(tmp_path / "run"))


def test_later_mini_batches_see_moved_weights(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run", {"train.mini_batch_rollouts": 6})
    line = lines(tmp_path / "run")[0]
    assert line["optim/steps"] == 2
    assert line["ratio/max"] > 1.01


class Versions(Nobody):
    """Collects (step, lag) of every record."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def step(self, record: Any) -> None:
        self.seen.append((record.step, record.metrics["lag"]))


def test_at_lag_4_step_t_samples_from_version_t_minus_4(tiny_model, tmp_path: Path) -> None:
    watch = Versions()
    job = a_job(tiny_model, tmp_path / "run", {"lag.steps": 4, "train.steps": 7}, watch=watch)
    made, held = [], []
    take, load = job.learner.snapshot, job.sampler.load

    def snapshot(version: int) -> Snapshot:
        made.append(take(version))
        return made[-1]

    def arrive(source: Any) -> str:
        held.append(load(source))
        return held[-1]

    job.learner.snapshot, job.sampler.load = snapshot, arrive  # type: ignore[method-assign]
    train(job)
    prints = [each.fingerprint for each in made]
    assert len(set(prints)) == 7  # every step changed the weights
    assert held == [prints[max(0, step - 4)] for step in range(7)]
    assert watch.seen == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 4), (7, 4)]
    assert {r["behavior_version"] for r in rollouts(tmp_path / "run", 6)} == {1}


def test_stale_log_probabilities_are_those_of_the_stored_snapshot(tiny_model, tmp_path) -> None:
    changes = {"lag.steps": 2, "lag.check_every": 1, "train.steps": 5}
    a_run(tiny_model, tmp_path / "run", changes)
    found = [(line["lag"], line["lag/fresh_ok"]) for line in lines(tmp_path / "run")]
    assert found == [(0, 1), (1, 1), (2, 1), (2, 1), (2, 1)]
    assert lines(tmp_path / "run")[-1]["ratio/max"] > 1.001  # and the policy has moved


def test_a_sampler_that_keeps_old_weights_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    job = a_job(tiny_model, tmp_path / "run", {"lag.steps": 1, "train.steps": 6})
    load, count = job.sampler.load, [0]

    def lazy(source: Any) -> str:
        count[0] += 1
        return load(source) if count[0] < 4 else job.sampler._fingerprint()  # type: ignore[attr-defined]

    job.sampler.load = lazy  # type: ignore[method-assign]
    with pytest.raises(RlfeError, match="does not hold version 2"):
        train(job)
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("changes", [{"replay.lambda": 0.0}, {"replay.strategy": "none"}])
def test_no_replay_is_no_buffer_bit_for_bit(tiny_model, tmp_path: Path, changes) -> None:
    a_run(tiny_model, tmp_path / "plain")
    a_run(tiny_model, tmp_path / "other", {**REPLAY, **changes})
    assert lines(tmp_path / "plain") == lines(tmp_path / "other")
    assert weights(tmp_path / "plain", 4) == weights(tmp_path / "other", 4)


def test_replay_changes_the_weights_but_no_statistic_of_the_step_before(
    tiny_model, tmp_path
) -> None:
    a_run(tiny_model, tmp_path / "plain")
    a_run(tiny_model, tmp_path / "replay", REPLAY)
    plain, replay = lines(tmp_path / "plain"), lines(tmp_path / "replay")
    assert weights(tmp_path / "plain", 4) != weights(tmp_path / "replay", 4)
    first = next(i for i, line in enumerate(replay) if line["replay/rollouts"])
    fresh = [n for n in plain[first] if not n.startswith(("replay/", "loss/", "optim/", "update/"))]
    assert {n: plain[first][n] for n in fresh} == {n: replay[first][n] for n in fresh}


def test_arms_with_one_seed_see_the_same_problems(tiny_model: Path, tmp_path: Path) -> None:
    seen = {}
    for name, changes in {"a": {}, "b": {**REPLAY, "advantage.name": "maxrl"}}.items():
        a_run(tiny_model, tmp_path / name, changes)
        seen[name] = [
            [r["problem_id"] for r in rollouts(tmp_path / name, step)] for step in (1, 2, 3, 4)
        ]
    assert seen["a"] == seen["b"]


def test_a_step_with_an_empty_filter_trains_nothing_and_goes_on(tiny_model, tmp_path) -> None:
    changes = {"filter.strategy": "top_p", "filter.value": 0.9, "save.every": 1, **REPLAY}
    a_run(tiny_model, tmp_path / "run", changes, task=Letters("\x00"))  # never right: all flat
    found = lines(tmp_path / "run")
    assert [line["filter/consecutive_empty"] for line in found] == [1, 2, 3, 4]
    assert all(line["optim/steps"] == 0 and line["loss/policy"] is None for line in found)
    assert weights(tmp_path / "run", 1) == weights(tmp_path / "run", 4)


def test_too_many_empty_steps_end_the_run_with_an_endpoint(tiny_model, tmp_path: Path) -> None:
    changes = {"filter.strategy": "top_p", "filter.value": 0.9, "filter.empty_stop_steps": 3}
    task = Letters("\x00")
    ending = a_run(tiny_model, tmp_path / "run", {**changes, "train.steps": 9}, task=task)
    assert (ending.status, ending.step) == ("empty", 3)
    assert problems(tmp_path / "run" / "global_step_3") == []
    ended = json.loads((tmp_path / "run" / "provenance.json").read_text())["ended"]
    assert "kept nothing for 3 steps" in ended


def test_a_filter_that_keeps_all_is_no_filter_bit_for_bit(tiny_model, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "none")
    a_run(tiny_model, tmp_path / "all", {"filter.strategy": "top_p", "filter.value": 1.0})
    assert lines(tmp_path / "none") == lines(tmp_path / "all")
    assert weights(tmp_path / "none", 4) == weights(tmp_path / "all", 4)


@pytest.mark.parametrize("metric", ["entropy", "entropy_variance", "length"])
def test_filters_by_entropy_and_length_keep_whole_groups(tiny_model, tmp_path, metric) -> None:
    changes = {"filter.strategy": "top_k", "filter.value": 0.4, "filter.metric": metric}
    a_run(tiny_model, tmp_path / "run", changes)
    assert all(line["filter/kept_groups"] == 1 for line in lines(tmp_path / "run"))
    kept = [record["slot"] for record in rollouts(tmp_path / "run", 1) if record["kept"]]
    assert len(kept) == 4
    assert len(set(kept)) == 1


def test_non_finite_losses_end_the_run_and_leave_the_weights(
    tiny_model, tmp_path, monkeypatch
) -> None:
    def broken(self: Any, rows: Any, logp_BL: Any, entropy_BL: Any) -> Any:
        return logp_BL.sum() * float("nan"), {name: float("nan") for name in update.LOSSES}

    monkeypatch.setattr(update.StepLoss, "__call__", broken)
    changes = {"train.steps": 9, "train.max_nonfinite": 2, "save.every": 1}
    ending = a_run(tiny_model, tmp_path / "run", changes)
    assert (ending.status, ending.step) == ("diverged", 2)
    assert [line["optim/skipped"] for line in lines(tmp_path / "run")] == [1, 1]
    assert [line["loss/policy"] for line in lines(tmp_path / "run")] == [None, None]
    assert weights(tmp_path / "run", 1) == weights(tmp_path / "run", 2)


def test_the_oldest_checkpoints_go_when_newer_ones_are_whole(tiny_model, tmp_path: Path) -> None:
    changes = {"save.every": 1, "save.keep": 2, "train.steps": 5}
    a_run(tiny_model, tmp_path / "run", changes)
    names = sorted(path.name for path in (tmp_path / "run").glob("*global_step_*"))
    assert names == ["global_step_4", "global_step_5"]


def test_validation_changes_no_weight_and_stands_in_the_record(tiny_model, tmp_path: Path) -> None:
    class Held(Letters):
        def problems(self, split: str) -> Any:
            found = super().problems(split)
            return found if split == "train" else tuple(
                type(found[0])(id=f"held/{i}", task=self.name, split=split, prompt="q" * (i + 1))
                for i in range(3)
            )  # fmt: skip

    changes = {"validate.every": 2, "validate.before_train": True, "validate.problems": 3}
    a_run(tiny_model, tmp_path / "without", task=Held())
    a_run(tiny_model, tmp_path / "with", {**changes, "lag.steps": 0}, task=Held())
    assert weights(tmp_path / "without", 4) == weights(tmp_path / "with", 4)
    found = lines(tmp_path / "with")
    assert [line.get("validate/problems") for line in found] == [None, 3, None, 3]
    assert found[0]["validate_before/problems"] == 3


def test_a_lora_run_trains_adapters_and_keeps_merged_models(tiny_model, tmp_path: Path) -> None:
    changes = {"lora.rank": 4, "lora.alpha": 8, "lag.steps": 1}
    a_run(tiny_model, tmp_path / "run", changes)
    folder = tmp_path / "run" / "global_step_4"
    assert problems(folder, need_tokenizer_config=True) == []
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not filecmp.cmp(folder / "model.safetensors", tiny_model / "model.safetensors", False)
    assert 0 <= lines(tmp_path / "run")[-1]["save/merge_delta"] < 1e-4
    assert lines(tmp_path / "run")[0]["save/merge_delta"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"kl.beta": 0.1, "kl.estimator": "k3"},
        {"entropy.coef": 0.01},
        {"loss.old": "recomputed", "mismatch.mode": "tis", "train.mini_batch_rollouts": 4},
        {"loss.is_level": "sequence", "loss.aggregation": "seq-mean-token-mean"},
        {"advantage.name": "maxrl", "train.epochs": 2, "loss.dual_clip": 3.0},
        {"diagnostics.grad_every": 1, **REPLAY},
        {"train.mask_truncated": True, "train.remainder": "copy", "train.mini_batch_rollouts": 5},
        {"data.order": "with_replacement", "optim.schedule": "cosine", "optim.warmup_steps": 2},
    ],
)
def test_every_setting_trains(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert a_run(tiny_model, tmp_path / "run", {**changes, "train.steps": 3}).status == "done"
    for line in lines(tmp_path / "run"):
        assert line["optim/skipped"] == 0
        assert line["optim/steps"] >= 1


def test_beta_0_loads_no_reference_and_is_no_kl_bit_for_bit(tiny_model, tmp_path: Path) -> None:
    job = a_job(tiny_model, tmp_path / "plain")
    train(job)
    assert job.learner._reference is None  # type: ignore[attr-defined]
    a_run(tiny_model, tmp_path / "zero", {"kl.beta": 0.0, "kl.estimator": "k1"})
    assert lines(tmp_path / "plain") == lines(tmp_path / "zero")


def test_unscored_rollouts_are_no_zeros(tiny_model: Path, tmp_path: Path) -> None:
    class Flaky(Letters):
        def judge(self, replies: Any, judge: Any) -> Any:
            for key, verdict in super().judge(replies, judge):
                lost = key.endswith("/0")
                yield key, Verdict(status=Status.INFRASTRUCTURE) if lost else verdict

    a_run(tiny_model, tmp_path / "run", task=Flaky())
    line, first = lines(tmp_path / "run")[0], rollouts(tmp_path / "run", 1)
    assert line["reward/unscored"] == 0.25
    assert [record["reward"] for record in first if record["index"] == 0] == [None] * 3
    assert all(record["advantage"] == 0 for record in first if record["index"] == 0)


def test_a_judge_that_forgets_a_reply_fails_the_step(tiny_model: Path, tmp_path: Path) -> None:
    class Lazy(Letters):
        def judge(self, replies: Any, judge: Any) -> Any:
            yield from list(super().judge(replies, judge))[1:]

    with pytest.raises(RlfeError, match="gave no verdict on 1 of 12 replies"):
        a_run(tiny_model, tmp_path / "run", task=Lazy())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_prompts_that_do_not_fit_are_refused_or_left_out(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"1 of 5 prompts.*letters/4 \(13\)"):
        a_run(tiny_model, tmp_path / "run", {"model.max_len": 22})
    changes = {"model.max_len": 22, "data.fail_on_prompt_too_long": False}
    a_run(tiny_model, tmp_path / "other", changes)
    assert lines(tmp_path / "other")[0]["data/prompts_too_long"] == 1
    record = json.loads((tmp_path / "other" / "provenance.json").read_text())["training"]
    assert record["prompts_too_long"] == ["letters/4"]
    assert (record["sampler"], record["exact"]) == ("transformers", True)


def test_a_run_without_prompt_style_is_refused_naming_both(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="tokenizer has chat template") as caught:
        a_run(tiny_model, tmp_path / "run", {"prompt.style": None})
    assert "base" in caught.value.hint
    assert "chat" in caught.value.hint


def test_the_fake_engine_runs_the_whole_loop(tmp_path: Path) -> None:
    changes = {"engine.sampler": "fake", "engine.learner": "fake", **REPLAY, "train.max_tokens": 30}
    assert a_run("", tmp_path / "run", changes).status == "done"
    assert problems(tmp_path / "run" / "global_step_4", need_tokenizer_config=True) == []


@pytest.mark.parametrize("compiles", [False, True])
def test_who_looks_on_is_told_that_the_first_update_compiles(
    tmp_path: Path, compiles: bool
) -> None:
    told: list[str] = []

    class Listening(Nobody):
        def within(self, text: str) -> None:
            told.append(text)

    changes: dict[str, Any] = {"engine.sampler": "fake", "engine.learner": "fake"}
    changes |= {"train.max_tokens": 30, "train.steps": 2, "compute.compile": compiles}
    assert a_run("", tmp_path / "run", changes, watch=Listening()).status == "done"
    first = "step 1: training, compiling first" if compiles else "step 1: training"
    assert [text for text in told if "training" in text] == [first, "step 2: training"]


def test_the_loop_reads_as_one_page() -> None:
    source = Path(loop.__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(source) if line.startswith("def steps("))
    end = next(i for i in range(start + 1, len(source)) if source[i].startswith("def "))
    assert end - start <= 80


def test_a_recipe_can_name_its_problems(tiny_model: Path, tmp_path: Path) -> None:
    names = [problem.id for problem in Letters().problems("train")][3:0:-1]
    job = a_job(tiny_model, tmp_path / "run", {"data.ids": names})
    assert [problem.id for problem in job.data.problems] == names
    with pytest.raises(RequestError, match='"letters/none" is not a training problem'):
        a_job(tiny_model, tmp_path / "other", {"data.ids": ["letters/none"]})


def test_what_the_source_of_the_problems_lacks_is_said_and_recorded(
    tiny_model: Path, tmp_path: Path
) -> None:
    task: Any = Letters()
    task.notes = ["data set x has no train split in codeforces"]
    a_run(tiny_model, tmp_path / "run", {"train.steps": 1}, task=task)
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())["training"]
    assert record["data_notes"] == task.notes
    log = (tmp_path / "run" / "logs" / "train.log").read_text()
    assert f"warning: {task.notes[0]}" in log


def test_the_mismatch_of_sampler_and_trainer_is_logged_without_a_pass_of_its_own(
    tiny_model, tmp_path: Path
) -> None:
    a_run(tiny_model, tmp_path / "run")
    for line in lines(tmp_path / "run"):
        assert 0 <= line["mismatch/abs_mean"] <= line["mismatch/abs_max"] < 1e-4  # both float32
        assert line["mismatch/abs_mean"] == pytest.approx(line["lag/fresh_mean_abs"], rel=1e-5)
