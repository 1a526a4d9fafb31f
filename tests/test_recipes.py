"""Shipped recipes: every setting that a study lists, one by one, and what shows them."""

import json

import pytest

from rlfe import config
from rlfe.cli.main import run
from rlfe.naming import cell_of, format_cell
from rlfe.sweeps import cells

DEEPCODER = {  # docs of study 1: "Shared setup across all three conditions"
    "task.name": "deepcoder",
    "model.path": "Qwen/Qwen2.5-Coder-7B",
    "advantage.name": "grpo",
    "reward.normalization": "identity",
    "train.steps": 200,
    "train.mini_batch_rollouts": 32,
    "train.micro_batch_rollouts": 1,
    "train.prompts_per_step": 16,
    "train.group_size": 8,
    "validate.problems": 256,
    "validate.samples": 1,
    "engine.gpus_per_node": 8,
    "engine.devices": "0,1,2,3,4,5,6,7",
    "engine.tensor_parallel": 4,
    "train.max_turns": 1,
    "kl.beta": 0.0,
    "filter.type": "largest",
    "filter.metric": "reward_variance",
    "filter.top_p_prob_mode": "linear",
    "filter.empty_stop_steps": 0,
    "filter.eps": 0.01,
    "model.max_len": 10000,
    "engine.max_batched_tokens": 10000,
    "train.max_tokens": 4000,
    "data.fail_on_prompt_too_long": True,
    "lora.rank": 0,
    "lora.alpha": 64.0,
    "lora.targets": "all-linear",
    "engine.gpu_share": 0.6,
    "save.every": 20,
    "validate.batches": 1,
    "validate.before_train": True,
    "validate.every": 10,
    "stop.collapse_first_turn": False,
    "stop.collapse_multi_turn": False,
    "run.resume": "never",
    "track.dir": "results",
    "track.loggers": ("console", "wandb"),
    "track.project": "deepcoder_RAGEN_final_3",
    # not in the study's text: stated as assumptions
    "data.source": "agentica-org/DeepCoder-Preview-Dataset",
    "data.subsets": ("primeintellect", "taco", "lcbv5", "codeforces"),
    "data.split": "train",
    "validate.split": "test",
    # from the public code's configuration
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "loss.dual_clip": 3.0,
    "loss.aggregation": "seq-mean-token-mean",
    "entropy.coef": 0.001,
    "optim.lr": 1e-6,
    "validate.temperature": 0.5,
}
ARMS = {
    "deepcoder-top-p-1.0": ("top_p", 1.0, True, "Qwen/Qwen2.5-Coder-7B-200-GRPO-top-p-1"),
    "deepcoder-top-p-0.9": ("top_p", 0.9, False, "Qwen/Qwen2.5-Coder-7B-200-GRPO-top-p-0.9"),
    "deepcoder-top-k-0.25": ("top_k", 0.25, True, "Qwen/Qwen2.5-Coder-7B-200-GRPO-top-k-0.25"),
}
ARM_KEYS = ("filter.strategy", "filter.value", "filter.include_zero", "track.name")
LADDER = {
    "task.name": "mbpp",
    "advantage.name": "grpo",
    "train.group_size": 8,
    "train.prompts_per_step": 64,
    "train.max_tokens": 3072,
    "train.steps": 500,
    "reward.kind": "binary",
    "replay.rollouts": 128,
    "save.every": 30,
    "lora.rank": 0,
    "eval.mbpp_plus.n": 160,
    "eval.mbpp_plus.temperature": 0.6,
    "eval.mbpp_plus.top_p": 0.95,
    "eval.mbpp_plus.max_tokens": 3072,
    "eval.mbpp_test.n": 160,
    "prompt.style": "base",
}
LAG = {
    "model.path": "Qwen/Qwen3.5-0.8B",
    "task.name": "gsm8k",
    "lora.rank": 32,
    "model.max_len": 1024,
    "train.steps": 60,
    "train.group_size": 8,
    "train.prompts_per_step": 32,
    "train.mini_batch_rollouts": None,
    "train.epochs": 1,
    "train.max_tokens": 512,
    "train.temperature": 1.0,
    "reward.kind": "binary",
    "reward.format_penalty": 0.0,
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.old": "behavior",
    "kl.beta": 0.0,
    "advantage.ddof": 1,
    "advantage.eps": 1e-6,
    "optim.lr": 4e-5,
    "optim.beta1": 0.9,
    "optim.beta2": 0.95,
    "optim.eps": 1e-12,
    "optim.grad_clip": 0.0,
    "diagnostics.k_buckets": ("1", "2", "3-5", "6-7"),
    "eval.gsm8k.n": 8,
    "eval.gsm8k.k": (1, 8),
    "eval.gsm8k.temperature": 1.0,
    "eval.gsm8k.limit": 500,
    "eval.gsm8k.max_tokens": 512,
    "prompt.thinking": False,
    "save.every": 60,
    "study.title": "Lag-0 vs lag-4 staleness damage for TailRL/MaxRL vs GRPO advantages",
    "study.budget_gpu_hours": 2.0,
    "study.max_wall_minutes": 120.0,
}


def assert_settings(values, wanted):
    assert {key: values.get(key, "no such key") for key in wanted} == wanted


@pytest.mark.parametrize("name", ARMS)
def test_the_filter_study_has_every_setting_it_lists(name):
    values = config.load([name]).values()
    assert_settings(values, DEEPCODER)
    assert tuple(values[key] for key in ARM_KEYS) == ARMS[name]


@pytest.mark.parametrize("name", ["deepcoder-top-p-0.9", "deepcoder-top-k-0.25"])
def test_only_the_filter_differs_between_the_arms_of_the_filter_study(name, capsys):
    assert run(["recipes", "diff", "deepcoder-top-p-1.0", name, "--json"], {}) == 0
    keys = {row["key"] for row in json.loads(capsys.readouterr().out)["rows"]}
    told = {"about", "track.name", "study.title", "study.hypothesis"}
    assert {key.split(".")[0] for key in keys - told} == {"filter"}


def test_the_learning_rate_study_has_every_setting_it_lists():
    assert_settings(config.load(["lr-ladder"]).values(), LADDER)


def test_the_learning_rate_study_differs_in_rate_arm_and_base_only():
    found = cells(["lr-ladder"])
    assert len(found) == 16
    flats = [config.flat(cell.recipe) for cell in found]
    differing = {key for key in flats[0] if len({repr(flat[key]) for flat in flats}) > 1}
    assert differing == {"model.path", "naming.model", "replay.strategy", "optim.lr"}
    assert {flat["replay.lambda"] for flat in flats} == {0.1}
    assert {flat["optim.lr"] for flat in flats} == {6e-6, 3e-6, 1e-6, 6e-7}
    assert {flat["model.path"] for flat in flats} == {"Qwen/Qwen3-1.7B-Base", "Qwen/Qwen2.5-3B"}


def test_the_learning_rate_study_names_its_folders_as_it_prints_them():
    names = [cell.name for cell in cells(["lr-ladder"])]
    printed = [
        "qwen3_1p7b_base_mbpp_hardcd_lam0p1_lr6e6", "qwen3_1p7b_base_mbpp_nobuf_lr6e7",
        "qwen25_3b_mbpp_nobuf_lr1e6", "qwen25_3b_mbpp_hardcd_lam0p1_lr3e6",
    ]  # fmt: skip
    assert set(printed) <= set(names)


def test_the_staleness_study_has_every_setting_it_lists():
    values = config.load(["lag-staleness"]).values()
    assert_settings(values, LAG)
    assert "at least 1.5x" in values["study.hypothesis"]
    assert "Refuted if the ratio is <1.2x" in values["study.criterion"]


def test_the_staleness_study_is_a_grid_of_eight_runs():
    grid = {
        (c.recipe.advantage.name, c.recipe.lag.steps, c.recipe.run.seed)
        for c in cells(["lag-staleness"])
    }
    assert grid == {(a, lag, s) for a in ("maxrl", "grpo") for lag in (0, 4) for s in (0, 1)}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [*((arm, DEEPCODER) for arm in ARMS), ("lr-ladder", LADDER), ("lag-staleness", LAG)],
)
def test_a_dry_run_of_training_resolves_to_the_studys_settings(
    name, wanted, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--recipe", name, "--dry-run", "--json"], {}) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    values = {row["key"]: row["value"] for row in rows}
    plain = json.loads(json.dumps(wanted))  # tuples are lists there
    assert {key: values.get(key, "no such key") for key in plain} == plain
    assert list(tmp_path.iterdir()) == []


ASSUMED = {  # what each study has to state, at least
    **{
        arm: {"data.subsets", "data.split", "prompt.style", "reward.kind", "optim.lr",
              "loss.clip_high", "entropy.coef"}
        for arm in ARMS
    },
    "lr-ladder": {"prompt.style", "train.prompts_per_step", "train.mini_batch_rollouts",
                  "loss.clip_low", "loss.aggregation", "optim.beta2"},
    "lag-staleness": {"lora.alpha", "prompt.style", "loss.aggregation", "optim.beta1",
                      "optim.beta2", "optim.eps", "optim.grad_clip"},
}  # fmt: skip


@pytest.mark.parametrize("name", ASSUMED)
def test_what_a_study_leaves_open_is_listed_under_keys_that_exist(name):
    recipe = config.load([name]).recipe
    listed = [text.partition(": ")[0] for text in recipe.study.assumptions]
    assert ASSUMED[name] <= set(listed)
    assert set(listed) <= set(config.flat(recipe))
    assert len(listed) == len(set(listed))


def test_the_experiment_document_lists_the_assumptions_with_their_values(capsys):
    assert run(["recipes", "doc", "lag-staleness"], {}) == 0
    text = capsys.readouterr().out
    assert "Assumptions (the study leaves these open):" in text
    assert "- `optim.beta2 = 0.95`: the sketch's SDK default" in text


@pytest.mark.parametrize("name", config.shipped())
def test_every_shipped_recipe_trains_after_its_checks_and_has_a_cell_name(name):
    recipe = config.load([name]).recipe
    config.check(recipe, training=True)
    assert recipe.about
    assert format_cell(cell_of(recipe))


def test_list_names_every_recipe_with_what_varies(capsys):
    assert run(["recipes", "list", "--json"], {}) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert sorted(rows) == config.shipped()
    assert rows["lag-staleness"] == {
        "name": "lag-staleness", "task": "gsm8k", "steps": 60,
        "varies": "advantage.name (2) x lag.steps (2) x run.seed (2)",
        "about": "Study 3: MaxRL against GRPO with a sampler that is 4 steps behind",
    }  # fmt: skip


def test_show_prints_the_text_and_with_json_every_resolved_value(capsys):
    assert run(["recipes", "show", "tiny"], {}) == 0
    assert capsys.readouterr().out.startswith('about = "A smoke run')
    assert run(["recipes", "show", "tiny", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["rows"]["train.steps"] == 4


def test_show_of_an_unknown_recipe_is_a_wrong_request(capsys):
    assert run(["recipes", "show", "tinny"], {}) == 2
    assert 'did you mean "tiny"?' in capsys.readouterr().err


def test_equal_recipes_have_no_difference(capsys):
    assert run(["recipes", "diff", "tiny", "tiny"], {}) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "tiny and tiny resolve to the same settings.\n")


def test_expand_gives_one_command_a_cell(capsys):
    assert run(["recipes", "expand", "lag-staleness"], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0] == (
        "rlfe train --recipe lag-staleness --set advantage.name=maxrl --set lag.steps=0 "
        "--set run.seed=0"
    )


def test_the_experiment_document_has_overview_details_and_outputs(capsys):
    assert run(["recipes", "doc", *ARMS], {}) == 0
    text = capsys.readouterr().out
    assert (
        "| deepcoder-top-p-0.9 | Study 1: keep the groups that hold 0.9 of the reward spread | "
        'filter.strategy = "top_p", filter.value = 0.9, filter.include_zero = false |' in text
    )
    assert "- tracker: project `deepcoder_RAGEN_final_3`, run `Qwen/Qwen2.5-Coder-7B-200" in text
    assert "- `runs/qwen2p5_coder_7b_deepcoder_nobuf_topk0p25_lr1e6`" in text
    assert "- `train.mini_batch_rollouts = 32`" in text.split("## Common settings")[1]
