"""Checkpoints and states are written behind the training, in order, as they were when kept."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlfe.checkpoints import problems
from rlfe.engines import learner as learning
from rlfe.errors import RlfeError
from rlfe.records import read_jsonl
from rlfe.training import saving
from rlfe.training.loop import train
from rlfe.training.writing import Writer
from tests.test_engine_contract import MeanLogp
from tests.test_head import a_batch
from tests.test_recompute import a_learner
from tests.training_doubles import REPLAY, a_job, a_run

WAIT = 30.0  # seconds after which a test that hangs fails instead


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer(lambda text: None)
    yield made
    made.close()


def writing_threads() -> list[str]:
    ours = ("rlfe-writing", "rlfe-copying")
    return [t.name for t in threading.enumerate() if t.name.startswith(ours)]


def test_works_of_a_step_run_in_order_and_nobody_waits_for_them(writer: Writer) -> None:
    release, done = threading.Event(), list[str]()

    def slow() -> None:
        assert release.wait(WAIT)
        done.append("checkpoint")

    writer.submit(3, lambda: slow)
    writer.submit(3, lambda: lambda: done.append("state"))
    assert done == []
    release.set()
    writer.wait()
    assert done == ["checkpoint", "state"]


def test_the_next_steps_copies_are_made_when_the_last_ones_are_written(writer: Writer) -> None:
    seen = list[str]()

    def copied(name: str) -> Callable[[], Callable[[], None]]:
        def prepare() -> Callable[[], None]:
            seen.append(f"copy {name}")
            return lambda: seen.append(f"write {name}")

        return prepare

    for step in (1, 2):
        writer.submit(step, copied(f"{step}"))
    writer.wait()
    assert seen == ["copy 1", "write 1", "copy 2", "write 2"]


def test_after_a_failure_nothing_is_written_and_it_is_raised_at_once() -> None:
    said, done = list[str](), list[str]()
    writer = Writer(said.append)
    began = threading.Event()

    def fails() -> None:
        assert began.wait(WAIT)
        raise RlfeError("disk full while writing x")

    writer.submit(1, lambda: fails)
    writer.submit(1, lambda: lambda: done.append("state"))
    began.set()
    with pytest.raises(RlfeError, match="disk full"):
        writer.submit(2, lambda: lambda: done.append("later"))
    writer.close()
    assert done == []
    assert said == ["writing failed: disk full while writing x"]
    assert writing_threads() == []


def test_closing_lets_the_works_end_and_raises_nothing() -> None:
    done, said = list[str](), list[str]()
    writer = Writer(said.append)

    def fails() -> None:
        raise OSError("gone")

    writer.submit(1, lambda: lambda: done.append("first"))
    writer.submit(1, lambda: fails)
    writer.close()
    assert done == ["first"]
    assert said == ["writing failed: gone"]


def files(folder: Path) -> dict[str, Any]:
    """Everything a run wrote but what names times and places."""
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    apart = ("logs/", "config.toml", "provenance.json", "metrics.jsonl", ".rlfe/")
    return {name: content(name, p) for name, p in found.items() if not name.startswith(apart)}


def content(name: str, path: Path) -> Any:
    """A file's bytes; of tensors the header by its meaning, for its metadata has no order."""
    data = path.read_bytes()
    if not name.startswith("state/snapshots/"):
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@pytest.mark.parametrize(
    "changes",
    [REPLAY, {"lag.steps": 2}, {"lora.rank": 4, "lora.alpha": 8}],
    ids=["replay", "lag", "lora"],
)
def test_what_is_written_behind_is_what_is_written_at_once(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
    changes: dict[str, Any],
) -> None:
    settings = {**changes, "save.every": 1, "train.steps": 3}
    a_run(tiny_model, tmp_path / "behind", settings)
    monkeypatch.setattr(saving, "Copying", type("Nothing", (), {}))
    a_run(tiny_model, tmp_path / "at_once", settings)
    behind, at_once = files(tmp_path / "behind"), files(tmp_path / "at_once")
    assert sorted(behind) == sorted(at_once)
    assert [name for name in behind if behind[name] != at_once[name]] == []
    assert behind["global_step_1/model.safetensors"] != behind["global_step_3/model.safetensors"]


def held_up(job: Any, until: threading.Event) -> None:
    """The job's checkpoints are not written before the event."""
    later = job.learner.export_later

    def waiting(sample: Any = None) -> Any:
        write, facts = later(sample)

        def slow(folder: Path) -> None:
            assert until.wait(WAIT), "nothing went on while a checkpoint was being written"
            write(folder)

        return slow, facts

    job.learner.export_later = waiting


def test_the_next_step_samples_while_a_checkpoint_is_written(
    tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    job = a_job(tiny_model, tmp_path / "run", {"save.every": 2, "train.steps": 3})
    asked, release = list[int](), threading.Event()
    generate, run = job.sampler.generate, tmp_path / "run"

    def sampled(requests: Sequence[Any]) -> Any:
        asked.append(len(asked) + 1)
        if asked[-1] == 3:
            assert not (run / "global_step_2").exists()
            assert not (run / "state").exists()
            release.set()
        return generate(requests)

    job.sampler.generate = sampled  # type: ignore[method-assign]
    held_up(job, release)
    assert train(job).status == "done"
    assert asked == [1, 2, 3]
    assert problems(run / "global_step_2") == problems(run / "global_step_3") == []
    assert json.loads((run / "state" / "state.json").read_text())["step"] == 3
    assert writing_threads() == []


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step(
    tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    settings = {"save.every": 1, "train.steps": 6}
    job = a_job(tiny_model, tmp_path / "run", settings)
    later, run = job.learner.export_later, tmp_path / "run"

    def short_of_room(sample: Any = None) -> Any:
        write, facts = later(sample)

        def no_room(folder: Path) -> None:
            if (run / "global_step_2").exists():
                (folder / "model.safetensors").write_bytes(b"half")
                raise OSError(28, "No space left on device")
            write(folder)

        return no_room, facts

    job.learner.export_later = short_of_room  # type: ignore[attr-defined]
    with pytest.raises(RlfeError, match=r"disk full while writing .*global_step_3"):
        train(job)
    assert len(read_jsonl(run / "metrics.jsonl")) in (3, 4)  # it was noticed within a step
    assert json.loads((run / "state" / "state.json").read_text())["step"] == 2
    assert not list(run.glob(".*partial"))
    assert "writing failed: disk full" in (run / "logs" / "train.log").read_text()
    a_run(tiny_model, run, settings, resume=True)
    a_run(tiny_model, tmp_path / "whole", settings)
    assert files(run) == files(tmp_path / "whole")


def test_a_step_that_fails_leaves_what_was_kept_before_whole(
    tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    job = a_job(tiny_model, tmp_path / "run", {"save.every": 2, "train.steps": 4})
    release = threading.Event()
    held_up(job, release)
    generate, calls = job.sampler.generate, list[int]()

    def breaks(requests: Sequence[Any]) -> Any:
        calls.append(1)
        if len(calls) == 3:
            release.set()
            raise RuntimeError("the engine is gone")
        return generate(requests)

    job.sampler.generate = breaks  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="engine is gone"):
        train(job)
    assert problems(tmp_path / "run" / "global_step_2") == []
    assert json.loads((tmp_path / "run" / "state" / "state.json").read_text())["step"] == 2
    assert writing_threads() == []


def test_what_is_kept_is_as_it_was_before_the_next_update(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    held, began = threading.Event(), threading.Event()
    copies = learning.host_copies

    def slow(*arguments: Any) -> Any:
        began.set()
        assert held.wait(WAIT)
        return copies(*arguments)

    learner = a_learner(tiny_model)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    learner.export(tmp_path / "first")
    learner.forward_backward(a_batch(), MeanLogp(30))
    monkeypatch.setattr(learning, "host_copies", slow)
    write, _ = learner.export_later()
    assert began.wait(WAIT)
    steps = threading.Thread(target=learner.optim_step, args=(1e-2,))
    steps.start()
    steps.join(0.2)
    assert steps.is_alive(), "the weights moved while they were being copied"
    held.set()
    steps.join(WAIT)
    write(tmp_path / "second")
    learner.export(tmp_path)
    one, two, three = (
        (tmp_path / place / "model.safetensors").read_bytes() for place in ("first", "second", "")
    )
    assert one == two != three
    learner.close()
    assert writing_threads() == []


def test_copies_that_are_written_are_held_by_nobody(tiny_model: Path, tmp_path: Path) -> None:
    learner = a_learner(tiny_model)
    copies: list[weakref.ref[Any]] = []
    later = learner._copies.later

    def seen(make: Callable[[], Any]) -> Any:
        found = later(make)
        copies.append(weakref.ref(found.result()[0]["model.norm.weight"]))
        return found

    learner._copies.later = seen  # type: ignore[method-assign]
    for _ in range(3):  # without an update between them
        learner.save_state(tmp_path)
    assert [copy() for copy in copies] == [None] * 3
