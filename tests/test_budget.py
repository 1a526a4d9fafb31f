"""A study's budget is compared with what its runs took, at the end of a run and in the card."""

import json
from pathlib import Path

import pytest

from rlfe.budget import overruns, step_seconds, used_gpus
from rlfe.cli.main import run
from rlfe.schema import Engine, Study
from tests.hub_runs import make_run
from tests.test_hub_card import made

STUDY = Study(budget_gpu_hours=2.0, max_wall_minutes=120)


@pytest.mark.parametrize(
    ("seconds", "gpus", "said"),
    [
        ([], 1, []),
        ([3600.0, 3600.0], 1, []),
        ([4000.0, 4000.0], 1, ["2.22 GPU hours, more than study.budget_gpu_hours = 2"]),
        ([2000.0], 4, ["2.22 GPU hours"]),
        ([7260.0], 1, ["2.02 GPU hours", "121.0 minutes, more than study.max_wall_minutes = 120"]),
    ],
)
def test_an_overrun_is_named_with_its_limit(seconds, gpus, said):
    found = overruns(STUDY, seconds, gpus)
    assert len(found) == len(said)
    assert all(text in sentence for text, sentence in zip(said, found, strict=True))


def test_a_study_without_limits_is_never_overrun():
    assert overruns(Study(), [1e9]) == []


def test_seconds_are_summed_over_steps_and_phases():
    lines = [{"seconds": {"sample": 1.5, "train": 0.5}}, {"step": 2}, {"seconds": {"save": 1.0}}]
    assert step_seconds(lines) == 3.0
    assert used_gpus(Engine(sampler="vllm", tensor_parallel=4)) == 4
    assert used_gpus(Engine(tensor_parallel=4)) == 1


def test_the_end_of_a_run_says_what_it_took_beyond_the_study(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--recipe", "tiny", "--engine", "fake", "--json"]
    assert run([*words, "--set", "study.max_wall_minutes=1e-9"], {}) == 0
    out, err = capsys.readouterr()
    assert "more than study.max_wall_minutes = 1e-09" in " ".join(err.split())
    assert len(json.loads(out)["run"]["overruns"]) == 1


def test_the_card_shows_an_overrun_of_all_cells_together(tmp_path):
    cells = [make_run(tmp_path / "runs", steps=(30,), replay=replay) for replay in (False, True)]
    for cell in cells:
        give_budget(cell / "config.toml")
    text = made(*cells).card_text()
    assert "Budget: steps took 0.02 GPU hours, more than study.budget_gpu_hours = 0.01" in text
    assert "Budget:" not in made(cells[0]).card_text()


def give_budget(config: Path) -> None:
    text = config.read_text()
    config.write_text(text.replace("budget_gpu_hours = 0.0", "budget_gpu_hours = 0.01"))
