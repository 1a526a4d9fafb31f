"""What the sampler gives back: all of a step or nothing of it, matched by id (algorithms.md 11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlfe.errors import RlfeError
from rlfe.records import read_jsonl, read_jsonl_zst
from rlfe.training.loop import train
from rlfe.types import Completion, Request
from tests.training_doubles import Letters, a_job

Answers = list[tuple[str, list[Completion]]]


@pytest.fixture(autouse=True)
def exact(one_thread: None) -> None:
    """Every run here is on the exact engine: CPU, float32, one thread."""


class Echo(Letters):
    """Remembers which reply was judged for which problem in the last step, by key."""

    def judge(self, replies: Sequence[Any], judge: Any) -> Iterator[Any]:
        self.asked = sorted((reply.key, reply.problem.id, reply.text) for reply in replies)
        yield from super().judge(replies, judge)


def by_slot(answers: Answers) -> Answers:
    return sorted(answers, key=lambda answer: int(answer[0]))


def answering(job: Any, change: Callable[[Answers], Answers]) -> None:
    """The job's sampler gives its answers as `change` leaves them."""
    generate = job.sampler.generate

    def changed(requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        yield from change([(name, list(found)) for name, found in generate(requests)])

    job.sampler.generate = changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda answers: [answer for answer in answers if answer[0] != "2"],
            "gave 0 of 4 completions for slot 2 of step 1",
        ),
        (
            lambda answers: [(name, found[: 3 if name == "1" else 4]) for name, found in answers],
            "gave 3 of 4 completions for slot 1 of step 1",
        ),
        (
            lambda answers: [(name, [*found, found[0]]) for name, found in answers],
            "gave 5 of 4 completions for slot 0 of step 1",
        ),
    ],
    ids=["a group is missing", "a short group", "one too many"],
)
def test_a_step_with_too_few_completions_fails_as_a_whole(
    tiny_model: Path, tmp_path: Path, change: Callable[[Answers], Answers], said: str
) -> None:
    job = a_job(tiny_model, tmp_path / "run")
    before = job.learner.snapshot(0).fingerprint
    answering(job, change)
    with pytest.raises(RlfeError) as caught:
        train(job)
    assert said in caught.value.what
    assert "not trained on" in caught.value.hint
    assert job.learner.snapshot(0).fingerprint == before
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob("rollouts/*"))
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_answers_in_another_order_are_matched_by_id(tiny_model: Path, tmp_path: Path) -> None:
    asked = {}
    for name, change in (("plain", by_slot), ("turned", lambda answers: by_slot(answers)[::-1])):
        task = Echo()
        job = a_job(tiny_model, tmp_path / name, {"train.steps": 2, "save.every": 2}, task=task)
        answering(job, change)
        train(job)
        asked[name] = task.asked
    assert asked["plain"] == asked["turned"]
    for step in (1, 2):
        plain, turned = (
            read_jsonl_zst(tmp_path / name / "rollouts" / f"step_{step:06d}.jsonl.zst")
            for name in ("plain", "turned")
        )
        assert len({record["problem_id"] for record in plain}) >= 2
        assert plain == turned
    rewards = [
        [line["reward/mean"] for line in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("plain", "turned")
    ]
    assert rewards[0] == rewards[1]
    weights = [
        (tmp_path / name / "global_step_2" / "model.safetensors").read_bytes()
        for name in ("plain", "turned")
    ]
    assert weights[0] == weights[1]
