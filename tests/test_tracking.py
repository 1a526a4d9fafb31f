import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from rlfe.errors import RlfeError
from rlfe.training import loop
from rlfe.training.clock import Clock
from rlfe.training.recording import disagreement, open_trackers, sample_rows
from rlfe.training.rollouts import sampled_groups
from rlfe.training.selection import select
from rlfe.training.tracking import SampleRow, Start, Trackers, run_id, step_line, tracked
from rlfe.types import StepRecord
from tests.training_doubles import a_job, a_run

RECORD = StepRecord(
    step=31,
    version=31,
    behavior_version=26,
    metrics={
        "reward/mean": 0.25,
        "filter/kept_groups": 4,
        "filter/groups": 16,
        "replay/rollouts": 128,
        "kl/k3": 0.0012,
        "clip/wclip_active": None,
        "loss/total": float("nan"),
        "status": "ok",
    },
    seconds={"sample": 1.5, "score": 0.25},
)
ROWS = [SampleRow(30, "2+2", "4 ```", 1.0, 0.5), SampleRow(30, "3+3", "7", None, 0.0)]


class FakeWandb(ModuleType):
    """Records what it is given; `broken` fails at that call."""

    def __init__(self, *, api_key=None, broken=None):
        super().__init__("wandb")
        self.key, self.broken, self.calls = api_key, broken, []

    def _note(self, call, *args):
        self.calls.append((call, *args))
        if call == self.broken:
            raise RuntimeError("network is down")

    def setup(self):
        return SimpleNamespace(settings=SimpleNamespace(api_key=self.key))

    def init(self, **given):
        self._note("init", given)
        return SimpleNamespace(
            log=lambda values, step: self._note("log", values, step),
            finish=lambda: self._note("finish"),
        )

    def Settings(self, **given):
        return given

    def Table(self, columns, data):
        return {"columns": columns, "data": data}


def start(tmp_path, step=0):
    return Start(
        project="deepcoder_RAGEN_final_3",
        name="Qwen/Qwen2.5-Coder-7B-200-GRPO-top-p-0.9",
        run_id="abc123",
        folder=tmp_path,
        config={"train.steps": 200},
        step=step,
    )


def opened(tmp_path, monkeypatch, fake, *, samples=False):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said: list[str] = []
    return Trackers(["console", "wandb"], start(tmp_path), samples=samples, warn=said.append), said


def test_only_finite_numbers_are_sent():
    values = tracked(RECORD)
    assert values["kl/k3"] == 0.0012
    assert values["seconds/sample"] == 1.5
    assert values["behavior_version"] == 26
    assert not {"clip/wclip_active", "loss/total", "status"} & values.keys()


def test_wandb_gets_names_id_and_steps_and_continues_the_same_history(tmp_path, monkeypatch):
    fake = FakeWandb(api_key="secret")
    trackers, said = opened(tmp_path, monkeypatch, fake)
    trackers.log(RECORD)
    trackers.close()
    given = fake.calls[0][1]
    assert given["project"] == "deepcoder_RAGEN_final_3"
    assert given["name"] == "Qwen/Qwen2.5-Coder-7B-200-GRPO-top-p-0.9"
    assert (given["id"], given["resume"], given["mode"]) == ("abc123", "allow", None)
    assert given["settings"] == {"console": "off", "save_code": False}
    assert fake.calls[1] == ("log", tracked(RECORD), 31)
    assert fake.calls[2] == ("finish",)
    assert said == []


def test_wandb_without_a_key_writes_offline_instead_of_asking(tmp_path, monkeypatch):
    fake = FakeWandb()
    opened(tmp_path, monkeypatch, fake)
    assert fake.calls[0][1]["mode"] == "offline"


def test_samples_leave_the_machine_only_when_asked_for(tmp_path, monkeypatch):
    fake = FakeWandb()
    silent, _ = opened(tmp_path, monkeypatch, fake)
    silent.samples(ROWS, step=30)
    assert [call[0] for call in fake.calls] == ["init"]
    asked, _ = opened(tmp_path, monkeypatch, fake, samples=True)
    asked.samples(ROWS, step=30)
    table = fake.calls[-1][1]["samples"]
    assert table["columns"] == ["step", "prompt", "completion", "reward", "advantage"]
    assert table["data"][1] == [30, "3+3", "7", None, 0.0]


@pytest.mark.parametrize("broken", ["init", "log"])
def test_a_tracker_that_fails_warns_once_and_is_left_out(tmp_path, monkeypatch, broken):
    fake = FakeWandb(broken=broken)
    trackers, said = opened(tmp_path, monkeypatch, fake)
    for _ in range(3):
        trackers.log(RECORD)
    trackers.close()
    assert said == ["tracker wandb is off from here on: network is down"]
    assert trackers.names == ()
    assert [call[0] for call in fake.calls].count(broken) == 1


def test_a_library_that_is_not_installed_warns_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    said: list[str] = []
    trackers = Trackers(["trackio"], start(tmp_path), samples=False, warn=said.append)
    trackers.log(RECORD)
    assert len(said) == 1
    assert "trackio" in said[0]


def test_no_library_is_imported_unless_asked_for(tmp_path, monkeypatch):
    for name in ("wandb", "trackio", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    said: list[str] = []
    Trackers(["console"], start(tmp_path), samples=True, warn=said.append).log(RECORD)
    assert said == []


def test_trackio_gets_names_steps_and_tables(tmp_path, monkeypatch):
    calls = []
    fake = SimpleNamespace(
        init=lambda **given: calls.append(given),
        log=lambda values, step: calls.append((values, step)),
        finish=lambda: calls.append("finish"),
        Table=lambda dataframe: dataframe,
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    trackers = Trackers(["trackio"], start(tmp_path), samples=True, warn=pytest.fail)
    trackers.log(RECORD)
    trackers.samples(ROWS, step=30)
    trackers.close()
    assert (calls[0]["project"], calls[0]["resume"]) == ("deepcoder_RAGEN_final_3", "allow")
    assert calls[0]["name"] == "Qwen/Qwen2.5-Coder-7B-200-GRPO-top-p-0.9-abc123"
    assert calls[1] == (tracked(RECORD), 31)
    assert calls[2][0]["samples"]["completion"].tolist() == ["4 ```", "7"]
    assert calls[3] == "finish"


def test_tensorboard_purges_what_a_resumed_run_repeats(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def add_text(self, name, text, step=None):
            calls.append((name, text, step))

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    trackers = Trackers(["tensorboard"], start(tmp_path, step=30), samples=True, warn=pytest.fail)
    trackers.log(RECORD)
    trackers.samples(ROWS, step=30)
    trackers.close()
    assert calls[0] == (str(tmp_path / "tensorboard" / "abc123"), 31)
    assert ("kl/k3", 0.0012, 31) in calls
    text = next(call[1] for call in calls if call[0] == "samples")
    assert "````\n4 ```\n````" in text
    assert calls[-1] == "close"


def test_the_id_of_a_run_is_made_once(tmp_path):
    file = tmp_path / ".rlfe" / "tracker_id"
    first = run_id(file)
    assert run_id(file) == first
    assert len(first) == 12


def test_the_console_line_is_aligned():
    assert step_line(RECORD, steps=200) == (
        "step  31/200  reward  0.250  groups   4/16   replayed  128  kl 1.20e-03     1.8 s"
    )
    bare = StepRecord(step=1, version=1, behavior_version=0, metrics={}, seconds={})
    assert step_line(bare, steps=9) == (
        "step 1/9  reward      -  groups   -/-    replayed    0  kl        -     0.0 s"
    )


FAKE_ENGINE = {"engine.sampler": "fake", "engine.learner": "fake"}


def opened_id(tmp_path, monkeypatch, folder, loggers):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    job = a_job("unused", tmp_path / folder, {**FAKE_ENGINE, "track.loggers": loggers})
    open_trackers(job, 0)
    return fake.calls[0][1]["id"]


@pytest.mark.parametrize("loggers", [["wandb"], ["console", "wandb"]])
def test_runs_of_one_name_never_share_a_history(tmp_path, monkeypatch, loggers):
    ids = {opened_id(tmp_path, monkeypatch, f"{place}/run", loggers) for place in ("a", "b")}
    assert len(ids) == 2
    assert not any("run" in name for name in ids)
    kept = (tmp_path / "a" / "run" / ".rlfe" / "tracker_id").read_text().strip()
    assert kept in ids


def test_trackers_are_closed_when_a_step_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise RlfeError("disk full")

    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(loop, "write_rollouts", fail)
    with pytest.raises(RlfeError, match="disk full"):
        a_run("unused", tmp_path / "run", {**FAKE_ENGINE, "track.loggers": ["wandb"]})
    assert fake.calls[-1] == ("finish",)


def test_a_dropped_group_has_no_advantage_in_the_sample_table(tmp_path):
    job = a_job("unused", tmp_path / "run", FAKE_ENGINE)
    job.sampler.load(job.learner.snapshot(0))
    chosen = select(job, sampled_groups(job, 0, Clock()))
    texts = job.data.texts()
    assert [row.advantage for row in sample_rows(chosen, 0, texts)].count(None) == 0
    nothing = replace(chosen, kept=(), advantages=())
    assert {row.advantage for row in sample_rows(nothing, 0, texts)} == {None}


@pytest.mark.parametrize(
    ("mean", "clipped", "said"),
    [
        (0.2, 0.0, "0.2 per token on average (lag.fresh_limit = 0.05)"),
        (0.01, 0.07, "7.00% of the tokens are outside the clip range (lag.fresh_clip = 0.05)"),
        (None, None, ""),
    ],
)
def test_the_warning_of_freshness_names_the_limit_that_broke(mean, clipped, said):
    metrics = {"lag/fresh_mean_abs": mean, "lag/fresh_clip": clipped}
    assert disagreement(metrics, 0.05, 0.05) == said
