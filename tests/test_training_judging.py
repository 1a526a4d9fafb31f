"""Judging streams behind generation, and neither side outlives the other's failure."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.sandbox.parts import Case, Outcome
from rlfe.sandbox.verdicts import Verdicts
from rlfe.tasks import get
from rlfe.tasks.base import Reply
from rlfe.training import judging
from rlfe.training.clock import Clock
from rlfe.training.judging import Arriving, Judging, sampled_and_judged
from rlfe.types import Completion, Finish, Problem, Prompt, Status, Verdict

WAIT = 30.0  # seconds after which a test that hangs fails instead
PASSED, FAILED = Verdict(status=Status.PASSED), Verdict(status=Status.FAILED)


def reply(key: str, text: str = "a") -> Reply:
    problem = Problem(id="p", task="t", split="train", prompt="")
    return Reply(key=key, problem=problem, prompt=Prompt(format="f"), text=text, finish=Finish.STOP)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "rlfe-judging"]


def said(text: str) -> Completion:
    return Completion(token_ids=(1,), logprobs=(0.0,), text=text, finish=Finish.STOP, policy_step=0)


def a_job(generate: Callable[[Any], Iterator[Any]], judge: Callable[..., Any]) -> Any:
    """What `sampled_and_judged` reads of a job."""
    return SimpleNamespace(
        sampler=SimpleNamespace(generate=generate),
        task=SimpleNamespace(judge=judge),
        judge=None,
        within=lambda text: None,
    )


def judged(job: Any, clock: Clock | None = None) -> Any:
    def replies(name: str, completions: Sequence[Completion]) -> list[Reply]:
        return [reply(f"{name}/{i}", done.text) for i, done in enumerate(completions)]

    return sampled_and_judged(job, [], replies, clock or Clock(), "step 1")


def test_a_reply_is_judged_before_the_next_one_is_sampled() -> None:
    seen = threading.Event()

    def generate(_: Any) -> Iterator[Any]:
        yield "0", [said("a")]
        assert seen.wait(WAIT), "the first reply was not judged while the second was sampled"
        yield "1", [said("b")]

    def judge(replies: Sequence[Reply], _: Any) -> Iterator[tuple[str, Verdict]]:
        for each in replies:
            yield each.key, PASSED if each.text == "a" else FAILED
            seen.set()

    done, verdicts = judged(a_job(generate, judge))
    assert list(done) == ["0", "1"]
    assert verdicts == {"0/0": PASSED, "1/0": FAILED}
    assert threads() == []


def test_a_judge_that_wants_all_replies_at_once_gets_them() -> None:
    def judge(replies: Sequence[Reply], _: Any) -> list[tuple[str, Verdict]]:
        return [(replies[i].key, FAILED) for i in reversed(range(len(replies)))]

    answers = [(str(n), [said("x"), said("y")]) for n in range(3)]
    _, verdicts = judged(a_job(lambda _: iter(answers), judge))
    assert sorted(verdicts) == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]


def test_what_is_left_after_generation_is_the_phase_judge() -> None:
    def judge(replies: Sequence[Reply], _: Any) -> Iterator[tuple[str, Verdict]]:
        for each in replies:
            time.sleep(0.05)
            yield each.key, PASSED

    def generate(_: Any) -> Iterator[Any]:
        for number in range(4):
            yield str(number), [said("a")]
            time.sleep(0.1)  # longer than a judgement takes

    clock = Clock()
    judged(a_job(generate, judge), clock)
    seconds = clock.seconds()
    assert seconds["sample"] >= 0.4
    assert seconds["judge"] < 0.1  # one after the other it would be 0.2


def test_a_judge_that_fails_ends_sampling_and_is_what_is_raised() -> None:
    closed, failed = threading.Event(), threading.Event()

    def generate(_: Any) -> Iterator[Any]:
        try:
            for number in range(1000):
                yield str(number), [said("a")]
                failed.wait(WAIT)
        finally:
            closed.set()

    def judge(replies: Sequence[Reply], _: Any) -> Iterator[tuple[str, Verdict]]:
        yield replies[0].key, PASSED
        failed.set()
        raise ValueError("broken judge")

    with pytest.raises(ValueError, match="broken judge"):
        judged(a_job(generate, judge))
    assert closed.wait(WAIT)
    assert threads() == []


def test_a_sampler_that_fails_sends_the_judge_home() -> None:
    judged_keys = []

    def generate(_: Any) -> Iterator[Any]:
        yield "0", [said("a")]
        raise RuntimeError("out of memory")

    def judge(replies: Sequence[Reply], _: Any) -> Iterator[tuple[str, Verdict]]:
        for each in replies:
            judged_keys.append(each.key)
            yield each.key, PASSED

    with pytest.raises(RuntimeError, match="out of memory"):
        judged(a_job(generate, judge))
    assert judged_keys in ([], ["0/0"])
    assert threads() == []


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
def test_an_interrupt_does_not_wait_for_a_judge_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "STOP_SECONDS", 0.05)
    release = threading.Event()

    def judge(replies: Sequence[Reply], _: Any) -> Iterator[tuple[str, Verdict]]:
        for each in replies:
            release.wait(WAIT)
            yield each.key, PASSED

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            judged(a_job(lambda _: iter([("0", [said("a")])]), judge))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        release.set()
    assert time.monotonic() - start < WAIT / 2
    while threads() and time.monotonic() - start < WAIT:
        time.sleep(0.01)
    assert threads() == []


class Pool:
    """A judge whose programs all pass at once; notes that one was started."""

    scale, probe_seconds = 1.0, 0.02

    def __init__(self) -> None:
        self.verdicts, self.started = Verdicts(), threading.Event()

    def submit(self, case: Case, deliver: Callable[[Case, Outcome], None]) -> None:
        self.started.set()
        deliver(case, Outcome(status=Status.PASSED, detail="", seconds=0.0, parts=()))


def test_programs_start_while_later_replies_are_still_missing() -> None:
    task, pool = get("mbpp"), cast(Any, Pool())
    problem = task.problems("train")[0]
    prompt = task.prompt(problem, "chat")
    texts = ["I do not know.", f"```python\ndef {problem.entry_point}():\n    return 1\n```"]
    replies = [
        Reply(key=str(i), problem=problem, prompt=prompt, text=text, finish=Finish.STOP)
        for i, text in enumerate(texts)
    ]
    with Judging(lambda arriving: task.judge(arriving, pool)) as beside:
        beside.submit(replies[1:])
        assert pool.started.wait(WAIT)
        beside.submit(replies[:1])
        streamed = beside.verdicts()
    found = {key: verdict.status for key, verdict in streamed.items()}
    assert found == {"0": Status.NO_ANSWER, "1": Status.PASSED}
    assert streamed == dict(task.judge(replies, cast(Any, Pool())))


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=4), st.integers(-20, 20))
def test_once_ended_arriving_replies_are_a_list(parts: list[list[int]], place: int) -> None:
    made, wanted = Arriving(), []
    for part in parts:
        replies = [reply(str(number)) for number in part]
        made.add(replies)
        wanted += replies
    made.end()
    assert list(made) == wanted
    assert len(made) == len(wanted)
    assert made[place:] == wanted[place:]
    if -len(wanted) <= place < len(wanted):
        assert made[place] == wanted[place]
    else:
        with pytest.raises(IndexError):
            made[place]
