"""A resumed run is the unbroken run: same metrics, same rollouts, same weights, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlfe.checkpoints import problems
from rlfe.errors import RequestError, RlfeError
from rlfe.schema import Data
from rlfe.tasks import get
from rlfe.training.job import Nobody
from rlfe.training.loop import train
from rlfe.training.state import fresh, resumed, save
from tests.test_loop import lines, rollouts, weights
from tests.training_doubles import REPLAY, Letters, a_job, a_run

ROOT = Path(__file__).parent.parent
ARMS: dict[str, dict[str, Any]] = {
    "replay": REPLAY,
    "lag": {"lag.steps": 4},
    "mini_batches": {"train.mini_batch_rollouts": 5, "train.epochs": 2},
    "lora": {"lora.rank": 4, "lora.alpha": 8, "lag.steps": 1, **REPLAY},
}


@pytest.fixture(autouse=True)
def exact(one_thread: None) -> None:
    """Every run here is on the exact engine: CPU, float32, one thread."""


class StopAfter(Nobody):
    """Asks to stop once this process has finished that many steps."""

    def __init__(self, step: int) -> None:
        self.wanted, self.done = step, 0

    def step(self, record: Any) -> None:
        self.done += 1

    def stopping(self) -> bool:
        return self.done + 1 >= self.wanted


def same(first: Path, second: Path, steps: int) -> None:
    assert lines(first) == lines(second)
    assert weights(first, steps) == weights(second, steps)
    for step in range(1, steps + 1):
        assert rollouts(first, step) == rollouts(second, step)


@pytest.mark.parametrize("arm", ARMS)
def test_an_interruption_at_every_step_changes_nothing(
    tiny_model, tmp_path: Path, arm: str
) -> None:
    changes = {**ARMS[arm], "train.steps": 6}
    a_run(tiny_model, tmp_path / "whole", changes)
    for step in range(1, 6):
        ending = a_run(tiny_model, tmp_path / "cut", changes, resume=True, watch=StopAfter(1))
        assert (ending.status, ending.step) == ("interrupted", step)
    assert a_run(tiny_model, tmp_path / "cut", changes, resume=True).status == "done"
    same(tmp_path / "whole", tmp_path / "cut", 6)


def test_an_empty_filter_at_the_seam_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    class Rare(Letters):
        """Nobody is right at steps 3 and 4: the filter keeps nothing around the seam."""

        def judge(self, replies: Any, judge: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            for key, verdict in super().judge(replies, judge):
                hard = self.calls + self.skipped in (3, 4)
                yield key, type(verdict)(status=verdict.status.FAILED) if hard else verdict

        skipped = 0

    changes = {"filter.strategy": "top_p", "filter.value": 0.9, "train.steps": 6, **REPLAY}
    a_run(tiny_model, tmp_path / "whole", changes, task=Rare())
    a_run(tiny_model, tmp_path / "cut", changes, task=Rare(), watch=StopAfter(3))
    second = Rare()
    second.skipped = 3
    a_run(tiny_model, tmp_path / "cut", changes, task=second, resume=True)
    assert [line["filter/empty"] for line in lines(tmp_path / "whole")][2:4] == [1, 1]
    same(tmp_path / "whole", tmp_path / "cut", 6)


@pytest.mark.parametrize("arm", ["replay", "lag"])
def test_five_kills_at_random_moments_change_nothing(tiny_model, tmp_path: Path, arm: str) -> None:
    changes = {**ARMS[arm], "train.steps": 14, "save.keep": 3}
    a_run(tiny_model, tmp_path / "whole", changes)
    words = [sys.executable, "-m", "tests.killed_runs", str(tiny_model), str(tmp_path / "cut")]
    done = subprocess.run(
        [*words, "5", "7", json.dumps(changes)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["exit"] == 0, done.stderr
    assert len(said["died"]) == 5
    same(tmp_path / "whole", tmp_path / "cut", 14)
    assert [path.name for path in (tmp_path / "cut").glob(".*")] == [".rlfe"]
    assert problems(tmp_path / "cut" / "global_step_14") == []


def test_a_kill_before_the_first_state_starts_again_with_the_same_result(
    tiny_model, tmp_path
) -> None:
    a_run(tiny_model, tmp_path / "whole", REPLAY)
    a_run(tiny_model, tmp_path / "cut", REPLAY, watch=StopAfter(1))
    shutil.rmtree(tmp_path / "cut" / "state")  # as if the kill had come before it was written
    a_run(tiny_model, tmp_path / "cut", REPLAY, resume=True)
    same(tmp_path / "whole", tmp_path / "cut", 4)


def test_lines_and_rollouts_beyond_the_state_are_cut(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run", watch=StopAfter(3))
    older = tmp_path / "state_3"
    shutil.copytree(tmp_path / "run" / "state", older)
    a_run(tiny_model, tmp_path / "run", resume=True)
    whole = lines(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "state")
    shutil.copytree(older, tmp_path / "run" / "state")
    job = a_job(tiny_model, tmp_path / "run", resume=True)
    assert resumed(job).step == 3
    assert lines(tmp_path / "run") == whole[:3]
    assert not (tmp_path / "run" / "rollouts" / "step_000004.jsonl.zst").exists()


def test_nothing_left_to_do_is_said(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run")
    before = lines(tmp_path / "run")
    ending = a_run(tiny_model, tmp_path / "run", resume=True)
    assert (ending.status, ending.step) == ("nothing_left", 4)
    assert lines(tmp_path / "run") == before


@pytest.mark.parametrize("part", ["state.json", "learner/moments.safetensors", "replay.npz"])
def test_a_missing_part_of_the_state_is_an_error(tiny_model, tmp_path: Path, part: str) -> None:
    a_run(tiny_model, tmp_path / "run", {**REPLAY}, watch=StopAfter(3))
    (tmp_path / "run" / "state" / part).unlink()
    with pytest.raises(RlfeError, match="no whole state") as caught:
        a_run(tiny_model, tmp_path / "run", REPLAY, resume=True)
    assert part.split("/")[-1] in caught.value.what


def test_a_lost_state_is_no_fresh_start(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "state")
    with pytest.raises(RlfeError, match="checkpoints up to step 4 but no state"):
        a_run(tiny_model, tmp_path / "run", resume=True)


def test_a_cut_state_file_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run", watch=StopAfter(3))
    file = tmp_path / "run" / "state" / "learner" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(RlfeError, match="another size"):
        a_run(tiny_model, tmp_path / "run", resume=True)


def test_other_settings_are_refused_with_their_keys(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run", watch=StopAfter(3))
    with pytest.raises(RequestError, match=r"optim\.lr: 0\.01 then, 0\.02 now"):
        a_run(tiny_model, tmp_path / "run", {"optim.lr": 0.02}, resume=True)


def test_a_state_of_other_settings_is_refused_too(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run", watch=StopAfter(3))
    a_run(tiny_model, tmp_path / "other", {"optim.lr": 0.02}, watch=StopAfter(3))
    shutil.rmtree(tmp_path / "run" / "state")
    shutil.copytree(tmp_path / "other" / "state", tmp_path / "run" / "state")
    with pytest.raises(RequestError, match=r"state was saved under other settings:\n  optim\.lr"):
        a_run(tiny_model, tmp_path / "run", resume=True)


def test_other_problems_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    a_run(tiny_model, tmp_path / "run", watch=StopAfter(3))
    with pytest.raises(RequestError, match="another list of problems"):
        a_run(tiny_model, tmp_path / "run", resume=True, task=Letters(problems=6))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on a file's size")
def test_a_full_disk_keeps_the_earlier_state(tiny_model: Path, tmp_path: Path) -> None:
    import resource

    a_run(tiny_model, tmp_path / "whole", REPLAY)
    a_run(tiny_model, tmp_path / "cut", REPLAY, watch=StopAfter(3))
    weights_size = (tiny_model / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (weights_size // 2, before[1]))  # as a quota
    try:
        with pytest.raises(RlfeError, match="disk full while writing") as caught:
            a_run(tiny_model, tmp_path / "cut", REPLAY, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.exit_code == 1
    assert "--resume" in caught.value.hint
    assert not list((tmp_path / "cut").glob(".*partial"))
    a_run(tiny_model, tmp_path / "cut", REPLAY, resume=True)
    same(tmp_path / "whole", tmp_path / "cut", 4)


def test_a_full_disk_while_the_state_is_saved_keeps_the_earlier_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tiny_model, tmp_path / "whole", REPLAY)
    job = a_job(tiny_model, tmp_path / "cut", {**REPLAY, "save.state_every": None})
    later = job.learner.save_state_later

    def short_of_room() -> Any:
        save = later()

        def no_room(folder: Path) -> None:
            if (tmp_path / "cut" / "state").exists():
                (folder / "weights.safetensors").write_bytes(b"half")
                raise OSError(28, "No space left on device")
            save(folder)

        return no_room

    monkeypatch.setattr(job.learner, "save_state_later", short_of_room)
    with pytest.raises(RlfeError, match=r"disk full while writing .*state"):
        train(job)
    a_run(tiny_model, tmp_path / "cut", REPLAY, resume=True)
    same(tmp_path / "whole", tmp_path / "cut", 4)


VOWELS = """
def problems(split):
    return [{"id": f"v/{i}", "prompt": "Say " + "ab" * i} for i in range(5)]

def prompt(problem, style):
    return problem.prompt

def judge(problem, text):
    return any(letter in text for letter in "aeiou")
"""


def test_an_own_task_edited_at_the_seam_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "vowels.py"
    path.write_text(VOWELS)
    run = tmp_path / "run"
    a_run(tiny_model, run, task=get("vowels", str(path)), watch=StopAfter(2))
    path.write_text(VOWELS.replace("aeiou", "xyz"))
    with pytest.raises(RequestError, match="task vowels is not the one") as caught:
        a_run(tiny_model, run, task=get("vowels", str(path)), resume=True)
    assert "judging rule (version): vowels.py " in caught.value.what
    assert "problems or tests (data_sha256): " in caught.value.what
    path.write_text(VOWELS)
    assert a_run(tiny_model, run, task=get("vowels", str(path)), resume=True).status == "done"


def test_tests_that_changed_at_the_seam_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"problem": "Say 1.", "tests": [{"input": "", "output": "1"}]}
    data = Data(source=str(path))
    changes = {"data.source": str(path), "train.prompts_per_step": 1, "train.group_size": 2}
    changes |= {"diagnostics.k_buckets": ["1"], "model.max_len": 256}

    def job(**other: Any) -> Any:
        return a_job(
            tiny_model, tmp_path / "run", changes, task=get("deepcoder", data=data), **other
        )

    path.write_text(json.dumps(row) + "\n")
    begun = job()
    saved = fresh(begun)
    saved.step = 1
    save(begun, saved)
    assert resumed(job(resume=True)).step == 1
    path.write_text(json.dumps({**row, "tests": [{"input": "", "output": "2"}]}) + "\n")
    with pytest.raises(RequestError, match=r"problems or tests \(data_sha256\)") as caught:
        resumed(job(resume=True))
    assert "judging rule" not in caught.value.what
