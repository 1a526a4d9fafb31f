import pytest

from rlfe.config import load, shipped
from rlfe.errors import RequestError
from rlfe.schema import Recipe
from rlfe.training.checks import check


def recipe(**sections):
    return Recipe.model_validate(sections)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"advantage": {"name": "maxrl"}, "reward": {"kind": "fraction"}},
            "reward.kind = fraction",
        ),
        (
            {"advantage": {"name": "maxrl"}, "reward": {"format_penalty": -0.1}},
            "reward.format_penalty = -0.1",
        ),
        (
            {"advantage": {"name": "maxrl"}, "reward": {"normalization": "mean"}},
            "reward.normalization = mean",
        ),
        ({"advantage": {"name": "dr_grpo"}}, "seq-mean-token-sum-norm"),
        ({"loss": {"old": "recomputed"}, "lag": {"steps": 4}}, "lag.steps = 4"),
        ({"mismatch": {"mode": "tis"}}, "mismatch.mode = tis"),
        ({"mismatch": {"low": 3.0}}, "mismatch.low = 3"),
        ({"loss": {"clip_low": 1.0}}, "loss.clip_low = 1"),
        ({"filter": {"strategy": "top_k", "value": 4.0}}, "(0, 1]"),
        ({"filter": {"strategy": "top_k_abs", "value": 2.5}}, "whole number"),
        ({"train": {"max_tokens": 4096}}, "no room for a prompt"),
        ({"validate": {"samples": 4, "temperature": 0.0}}, "copies of one sample"),
        ({"diagnostics": {"k_buckets": ["0-2"]}}, "k_buckets"),
    ],
)
def test_contradictions_are_refused_with_their_keys(sections, said):
    with pytest.raises(RequestError) as caught:
        check(recipe(**sections))
    assert said in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_passes(name):
    resolved = load([name]).recipe
    assert all(isinstance(note, str) for note in check(resolved))


def test_settings_that_go_together_pass():
    assert check(Recipe()) == []
    good = {
        "advantage": {"name": "dr_grpo"},
        "loss": {"aggregation": "seq-mean-token-sum-norm", "old": "recomputed"},
        "mismatch": {"mode": "tis"},
        "filter": {"strategy": "top_k_abs", "value": 4.0},
    }
    assert check(recipe(**good)) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"group_size": 1}}, "every advantage is 0"),
        ({"filter": {"strategy": "top_k", "value": 0.25}}, "may keep flat groups"),
        ({"lora": {"rank": 0, "alpha": 64}}, "not used"),
        ({"replay": {"strategy": "hard", "lambda": 0.0}}, "no replay buffer"),
        ({"train": {"group_size": 4}}, "no buckets"),
    ],
)
def test_settings_that_may_not_be_meant_are_named(sections, said):
    assert any(said in note for note in check(recipe(**sections)))
