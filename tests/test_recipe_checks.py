import pytest

from rlfe.cli.main import run
from rlfe.config import check, load, shipped
from rlfe.errors import RequestError
from rlfe.schema import Recipe


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
        ({"loss": {"old": "recomputed"}, "lag": {"steps": 4}}, "lag.steps = 0, it is 4"),
        ({"mismatch": {"mode": "tis"}}, 'mismatch.mode = "tis"'),
        ({"mismatch": {"low": 3.0}}, "mismatch.low = 3"),
        ({"loss": {"clip_low": 1.0}}, "loss.clip_low = 1"),
        ({"filter": {"strategy": "top_k", "value": 4.0}}, "at most 1"),
        ({"filter": {"strategy": "top_k_abs", "value": 2.5}}, "whole number"),
        ({"train": {"max_tokens": 4096}}, "no room for a prompt"),
        ({"validate": {"samples": 4, "temperature": 0.0}}, "copies of one sample"),
        ({"diagnostics": {"k_buckets": ["0-2"]}}, "k_buckets"),
        (
            {"task": {"name": "x", "module": "x.py"}, "data": {"source": "x.jsonl"}},
            "data.source is not read with task.module",
        ),
        (
            {"task": {"name": "x", "module": "x.py"}, "data": {"columns": {"prompt": "q"}}},
            "data.columns is not read with task.module",
        ),
        ({"data": {"source": "x.jsonl.gz", "subsets": ["a"]}}, "data.subsets is for data sets"),
        ({"data": {"source": "x.parquet", "revision": "main"}}, "data.revision is for data sets"),
        ({"data": {"subsets": ["a"]}}, "data.subsets needs data.source"),
    ],
)
def test_contradictions_are_refused_with_their_keys(sections, said):
    with pytest.raises(RequestError) as caught:
        check(recipe(**sections))
    assert said in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize("bad", [["0-2"], ["1-4"], ["1-2", "2-3"], ["x"], ["2-"], ["3-2"]])
def test_buckets_are_ranges_of_mixed_groups_that_do_not_overlap(bad):
    with pytest.raises(RequestError, match="k_buckets"):
        check(recipe(train={"group_size": 4}, diagnostics={"k_buckets": bad}))


def test_settings_of_a_source_that_go_together_pass():
    columns = {"prompt": "question"}
    for data in (
        {"source": "x.jsonl", "columns": columns, "split": "train"},
        {"source": "org/name", "subsets": ["a"], "revision": "main", "columns": columns},
    ):
        assert check(recipe(data=data)) == []
    assert check(recipe(task={"name": "x", "module": "x.py"}, data={"split": "a", "size": 3})) == []


def test_every_contradiction_is_named_at_once_wherever_settings_are_shown(capsys):
    sets = ["--set", "loss.clip_low=1.5", "--set", "mismatch.low=3"]
    for words in (
        ["config", "show", "--recipe", "tiny", *sets],
        ["sweep", "lr-ladder", *sets],
        ["train", "--recipe", "tiny", *sets],
        ["train", "--recipe", "tiny", *sets, "--dry-run"],
    ):
        assert run(words, {}) == 2
        err = capsys.readouterr().err
        assert "loss.clip_low = 1.5 leaves no lower bound above 0" in err
        assert "mismatch.low = 3.0 is not below" in err


def test_settings_that_may_not_be_meant_are_named_wherever_settings_are_shown(capsys):
    sets = ["--set", "train.group_size=4"]
    assert run(["config", "show", "--recipe", "lr-ladder", *sets], {}) == 0
    assert "no buckets of success counts" in capsys.readouterr().err
    assert run(["sweep", "lr-ladder", *sets], {}) == 0
    assert capsys.readouterr().err.count("no buckets of success counts") == 1


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
