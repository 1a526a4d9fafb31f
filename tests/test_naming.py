"""Names: one value has one tag, and a folder's name reads back as its cell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe import naming
from rlfe.config import load
from rlfe.errors import RequestError
from rlfe.types import CellName

words = st.from_regex(r"[a-z][a-z0-9]{0,6}(_[a-z][a-z0-9]{0,6}){0,2}", fullmatch=True)


def test_one_rate_has_one_tag_however_it_is_written():
    spellings = ("6e-6", "6E-06", "0.000006", "60e-7", 6e-6, 6.000000000000001e-06)
    assert {naming.lr_tag(text) for text in spellings} == {"lr6e6"}


def test_a_tag_reads_back_as_the_float_of_the_literal():
    assert naming.parse_lr_tag("lr6e6") == 6e-6
    assert naming.parse_lr_tag("lr1p5e6") == 1.5e-6
    assert naming.parse_lr_tag("lr5e1") == 0.5


@given(st.integers(1, 9999), st.integers(4, 12))
def test_every_short_rate_survives_its_tag(digits, exponent):
    rate = float(f"{digits}e-{exponent}")
    assert naming.parse_lr_tag(naming.lr_tag(rate)) == rate


@pytest.mark.parametrize("tag", ["lr60e7", "lr1p50e6", "lr06e6", "lr5e0", "lr6e06", "LR6e6", "6e6"])
def test_a_second_spelling_of_a_tag_is_refused(tag):
    with pytest.raises(RequestError):
        naming.parse_lr_tag(tag)


@pytest.mark.parametrize("value", [0, -1e-6, 1.0, float("inf"), float("nan"), True, "fast", ""])
def test_what_is_no_rate_between_0_and_1_has_no_tag(value):
    with pytest.raises(RequestError, match="between 0 and 1"):
        naming.lr_tag(value)


@given(words, words, st.sampled_from(naming.TASKS), st.sampled_from([1e-6, 6e-7, 1.5e-5]),
       st.none() | st.integers(0, 99))  # fmt: skip
def test_a_cell_reads_back_from_its_name(model, arm, task, lr, seed):
    cell = CellName(model=model, task=task, arm=arm, lr=lr, seed=seed)
    if set(arm.split("_")) & set(naming.TASKS):
        with pytest.raises(RequestError, match="would be read as"):
            naming.format_cell(cell)
    else:
        assert naming.parse_cell(naming.format_cell(cell)) == cell


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-1.7B-Base", "qwen3_1p7b_base"),
        ("Qwen/Qwen2.5-3B/", "qwen2p5_3b"),
        ("models/SmolLM2-135M-Instruct", "smollm2_135m_instruct"),
    ],
)
def test_a_models_name_is_its_last_path_part_in_folder_form(path, name):
    assert naming.model_name(path) == name


def test_a_model_without_a_name_is_refused():
    with pytest.raises(RequestError, match=r"model\.path"):
        naming.model_name("")


@pytest.mark.parametrize(
    ("sets", "name"),
    [
        ([], "q_mbpp_nobuf_lr1e6"),
        (["replay.strategy=hard_cooldown"], "q_mbpp_hardcd_lam0p1_lr1e6"),
        (["replay.strategy=ce", "replay.lambda=1"], "q_mbpp_ce_lam1_lr1e6"),
        (["filter.strategy=top_p", "filter.value=0.9"], "q_mbpp_nobuf_topp0p9_lr1e6"),
        (["filter.strategy=top_k", "filter.value=0.25"], "q_mbpp_nobuf_topk0p25_lr1e6"),
        (["advantage.name=maxrl", "lag.steps=4"], "q_mbpp_nobuf_maxrl_lag4_lr1e6"),
        (["run.seed=1", "optim.lr=6e-7"], "q_mbpp_nobuf_lr6e7_s1"),
        (["naming.arm=warmlr", "naming.model=m2"], "m2_mbpp_warmlr_lr1e6"),
        (["task.name=my_task"], "q_mytask_nobuf_lr1e6"),
    ],
)
def test_a_recipe_names_its_cell_by_what_differs_from_the_defaults(sets, name):
    recipe = load([], ["model.path=org/Q", *sets]).recipe
    assert naming.format_cell(naming.cell_of(recipe)) == name


def test_an_arm_that_is_not_known_gets_no_lambda():
    assert naming.arm_facts("warmlr_lam0p1") == (None, None)
    assert naming.arm_facts("hardcd") == (None, None)
    assert naming.arm_facts("hardcd_lam0p1_v2") == (None, None)


def test_an_arm_with_further_settings_keeps_its_replay_facts():
    assert naming.arm_facts("nobuf_topp0p9_maxrl") == (False, None)
    assert naming.arm_facts("hardcd_lam0p25_topkabs4_lag4") == (True, 0.25)


def test_only_the_exact_form_is_a_step():
    assert naming.step_of("global_step_30") == 30
    names = ("global_step_", "global_step_30.tmp", "global_step_3a", "xglobal_step_3", "step_3")
    assert [naming.step_of(name) for name in names] == [None] * 5


def test_a_hub_path_gives_cell_and_step():
    cell, step = naming.parse_path("hf://org/repo/tiny_mbpp_nobuf_lr1e3_s2/global_step_30")
    assert (cell.model, cell.seed, step) == ("tiny", 2, 30)
