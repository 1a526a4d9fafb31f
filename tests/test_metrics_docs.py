"""docs/metrics.md names every key that a run writes."""

import re
from pathlib import Path

import pytest

from rlfe.records import read_jsonl
from rlfe.types import Problem
from tests.training_doubles import REPLAY, Letters, a_run

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
SUBSET = re.compile(r"/(k=\d+|\d+(-\d+)?)$")


class HeldOut(Letters):
    """Letters with other problems in the test split."""

    def problems(self, split):
        if split == "train":
            return super().problems(split)
        return (Problem(id="letters/held-out", task=self.name, split=split, prompt="say e"),)


def documented():
    """Names in the first column; a name without a slash continues the one before."""
    names, wildcards = set(), []
    for line in PAGE.read_text().splitlines():
        cells = line.split("|")
        stem = ""
        for name in re.findall(r"`([^`]+)`", cells[1]) if len(cells) > 2 else []:
            stem = name.rsplit("/", 1)[0] + "/" if "/" in name else stem
            if name.endswith(("...", "*")):
                wildcards.append(name.rstrip(".*"))
            else:
                names |= {name, stem + name.rsplit("/", 1)[-1]}
        for name in re.findall(r"`([a-z_]+/\w[^`]*)`", line):
            names.add(name)
    return names, tuple(wildcards)


def test_every_key_of_a_run_is_on_the_page(tmp_path):
    changes = {
        **REPLAY,
        "engine.sampler": "fake",
        "engine.learner": "fake",
        "lag.steps": 1,
        "validate.every": 1,
        "validate.before_train": True,
    }
    a_run("unused", tmp_path / "run", changes, task=HeldOut())
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    names, wildcards = documented()
    keys = {SUBSET.sub("", key) for line in lines for key in line}
    keys = {key.replace("validate_before/", "validate/") for key in keys}
    missing = {key for key in keys if key not in names and not key.startswith(wildcards)}
    assert len(lines) == 4
    assert missing == set()


FAKE = {"engine.sampler": "fake", "engine.learner": "fake"}


def always():
    """Full names in the first column."""
    for line in PAGE.read_text().splitlines():
        cells = line.split("|")
        stem = ""
        for name in re.findall(r"`([^`]+)`", cells[1]) if len(cells) > 2 else []:
            stem = name.rsplit("/", 1)[0] + "/" if "/" in name else stem
            yield name if "/" in name else stem + name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"filter.strategy": "top_p", "filter.value": 0.9},
        {**REPLAY, "loss.old": "recomputed", "validate.every": 2},
    ],
    ids=["bare", "empty steps", "replay, recomputed and validation"],
)
def test_every_name_on_the_page_is_in_every_line(tmp_path, changes):
    task = HeldOut("\x00" if "filter.strategy" in changes else "aeiouAEIOU")
    a_run("unused", tmp_path / "run", {**FAKE, **changes}, task=task)
    names = set(always())
    assert {"replay/weight_ess", "mismatch/p95", "validate/reward", "clip/adv_mass"} <= names
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert names - set(line) == set()


def test_what_is_absent_is_null_and_not_0(tmp_path):
    a_run("unused", tmp_path / "run", FAKE)
    line = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    for room in ("replay/", "mismatch/changed", "validate/"):
        assert {value for name, value in line.items() if name.startswith(room)} == {None}
