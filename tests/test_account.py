"""provenance.json tells what ran, on what, how it went on and how it ended."""

import json

import pytest

from rlfe.training import account
from rlfe.training.advantages import used
from rlfe.training.filters import score_name
from rlfe.training.job import Nobody
from rlfe.training.losses import LossSettings
from rlfe.training.objective import describe
from tests.training_doubles import REPLAY, Letters, a_run

FAKE = {"engine.sampler": "fake", "engine.learner": "fake"}


class StopAtOnce(Nobody):
    def stopping(self):
        return True


def record(folder):
    return json.loads((folder / "provenance.json").read_text())


def test_names_come_from_what_runs(tmp_path):
    changes = {**FAKE, **REPLAY, "advantage.name": "rloo", "loss.clip_high": 0.28}
    a_run("unused", tmp_path / "run", {**changes, "filter.strategy": "top_p"})
    told = record(tmp_path / "run")["training"]
    assert told["advantage"] == "rloo"
    assert told["objective"] == "clipped importance sampling [0.8, 1.28] per token"
    assert told["aggregation"] == "token-mean"
    assert (told["filter"], told["filter_score"]) == ("top_p", "std of a group's rewards")
    assert told["replay"] == "hard_cooldown"
    assert told["sampler"] == "fake"


def test_a_buffer_that_is_not_kept_is_not_called_replay(tmp_path):
    a_run("unused", tmp_path / "run", {**FAKE, **REPLAY, "replay.lambda": 0.0})
    told = record(tmp_path / "run")
    assert told["training"]["replay"] == "none"
    assert "replay.lambda = 0: no replay buffer is kept" in told["notes"]


@pytest.mark.parametrize(
    ("name", "told"), [("grpo", "grpo"), ("dr_grpo", "dr_grpo (centered)"), ("maxrl", "maxrl")]
)
def test_an_estimator_is_named_with_the_function_that_computes_it(name, told):
    assert used(name) == told


def test_a_dual_clip_and_ratios_per_sequence_are_told():
    settings = LossSettings(max_tokens=8, dual_clip=3.0, is_level="sequence")
    assert describe(settings) == (
        "clipped importance sampling [0.8, 1.2] per sequence with dual clip 3"
    )
    assert score_name("length") == "length"


def test_the_machine_is_recorded(tmp_path):
    a_run("unused", tmp_path / "run", FAKE)
    told = record(tmp_path / "run")["hardware"]
    assert set(told) == {"gpus", "gpu_count", "cuda", "cpu", "cpu_cores"}
    assert told["gpu_count"] == len(told["gpus"])
    assert told["cpu"]
    assert told["cpu_cores"] >= 1


def test_the_cpus_name_comes_from_the_kernel(tmp_path, monkeypatch):
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\n")
    monkeypatch.setattr(account, "CPU_FACTS", facts)
    assert account.cpu_model() == "AMD EPYC 9654"


def test_notes_on_settings_and_data_stand_in_the_record(tmp_path):
    task = Letters()
    task.notes = ["no train split in codeforces"]
    a_run("unused", tmp_path / "run", {**FAKE, "lora.alpha": 64.0}, task=task)
    assert record(tmp_path / "run")["notes"] == [
        "lora.alpha and lora.targets are not used: lora.rank = 0 trains all weights",
        "no train split in codeforces",
    ]


def test_each_resume_adds_an_entry_and_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    a_run("unused", folder, FAKE, watch=StopAtOnce())
    first = record(folder)
    assert "resumed" not in first
    assert first["ended"] == "interrupted after step 1"
    a_run("unused", folder, FAKE, resume=True, watch=StopAtOnce())
    a_run("unused", folder, FAKE, resume=True)
    told = record(folder)
    assert [entry["step"] for entry in told["resumed"]] == [1, 2]
    assert set(told["resumed"][0]) == {"step", "command", "git_commit", "packages", "hardware"}
    assert told["command"] == first["command"]
    assert told["hardware"] == first["hardware"]
    assert (told["ended"], told["ended_by"]) == (None, None)


def test_the_rule_that_ended_a_run_is_recorded(tmp_path):
    changes = {**FAKE, "filter.strategy": "top_p", "filter.value": 0.9}
    a_run(
        "unused",
        tmp_path / "run",
        {**changes, "filter.empty_stop_steps": 2},
        task=Letters("\x00"),
    )
    told = record(tmp_path / "run")
    assert told["ended_by"] == "empty"
    assert "kept nothing for 2 steps" in told["ended"]
