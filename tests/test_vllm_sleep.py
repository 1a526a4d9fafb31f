"""vLLM's sleep: what is woken when, on an engine that records its calls (a GPU is needed else)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlfe.engines import vllm as engine
from rlfe.engines.base import Snapshot
from rlfe.engines.vllm import VllmSampler
from rlfe.errors import RlfeError
from rlfe.types import Request, Sampling

SAMPLING = Sampling(n=1, temperature=1.0, max_tokens=2, seed=0)
REQUEST = Request(id="a", prompt_ids=(1, 2), sampling=SAMPLING)
SNAPSHOT = Snapshot(version=3, fingerprint="f", weights={})


class Engine:
    """An `LLM` and its `llm_engine` in one; refuses what memory that sleeps cannot do."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.asleep, self.waiting = calls, set[str](), list[str]()
        self.llm_engine = self.engine_core = self
        self.number, self.breaks, self.room = 0, False, True

    def sleep(self, level: int) -> None:
        assert not self.asleep, "it sleeps already"
        assert not self.waiting, "requests are left"
        self.calls.append(f"sleep {level}")
        self.room = False
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> bool:
        assert set(tags) <= self.asleep, "it is awake already"
        assert self.room, "torch still holds what the learner has freed"
        self.calls.append("wake " + " ".join(tags))
        self.asleep -= set(tags)
        return not self.asleep

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        self.calls.append(method)
        if method == "rlfe_free_bytes":
            return [7]
        if method in ("rlfe_load", "rlfe_load_folder", "rlfe_check_folder"):
            assert "weights" not in self.asleep, "weights arrive while theirs sleep"
            if self.breaks:
                raise RuntimeError("out of memory")
        return [{"fingerprint": "f", "compared": ["norm"], "differs": []}]

    def reset_prefix_cache(self) -> bool:
        assert not self.asleep, "the cache is not there"
        self.calls.append("reset")
        return True

    def enqueue(self, prompts: Any, params: Any, **_: Any) -> list[str]:
        assert not self.asleep, "it would wait for ever"
        self.number += 1
        self.waiting.append(str(self.number))
        return [f"{self.number}-x"]

    def step(self) -> Iterator[Any]:
        assert not self.asleep
        self.calls.append("sample")
        flat = SimpleNamespace(logprobs=[-0.5], start_indices=[0])
        part = SimpleNamespace(token_ids=[4], finish_reason="length", text="x", logprobs=flat)
        found = [
            SimpleNamespace(request_id=name, finished=True, outputs=[part]) for name in self.waiting
        ]
        self.waiting = []
        return iter(found)

    def abort_request(self, names: list[str], internal: bool) -> None:
        self.waiting = []

    def shutdown(self) -> None:
        self.calls.append("stop")


def a_sampler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[VllmSampler, list[str]]:
    calls = list[str]()
    monkeypatch.setattr(engine, "need_vllm", lambda: None)
    monkeypatch.setattr(engine, "sampling_params", lambda *_, **__: None)
    monkeypatch.setattr(engine, "refusals", lambda: (ValueError,))
    made = VllmSampler(folder, device="cpu", same_process=True)
    made._settings = engine.replace(made._settings, sleep=True, on_cpu=False)

    def start() -> None:
        calls.append("start")
        made._llm = Engine(calls)

    def empty_cache() -> None:
        made._llm.room = True

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(made, "_start", start)
    return made, calls


def test_new_weights_come_between_waking_the_weights_and_the_cache(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    sampler, calls = a_sampler(monkeypatch, tiny_model)
    for _ in range(2):
        assert sampler.load(SNAPSHOT) == "f"
        assert [name for name, _ in sampler.generate([REQUEST])] == ["a"]
    first = ["start", "rlfe_load", "reset", "sample", "sleep 1"]
    assert calls[:5] == first
    assert calls[5:] == [
        *("wake weights", "rlfe_load", "wake kv_cache", "reset"),
        *("sample", "sleep 1"),
    ]


def test_a_folder_is_loaded_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    sampler, calls = a_sampler(monkeypatch, tiny_model)
    list(sampler.generate([REQUEST]))
    del calls[:]
    sampler.load(tiny_model)
    assert calls == ["wake weights", "rlfe_load_folder", "wake kv_cache", "reset"]


def test_sampling_again_without_a_load_wakes_all_with_the_old_weights(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    sampler, calls = a_sampler(monkeypatch, tiny_model)
    list(sampler.generate([REQUEST]))
    del calls[:]
    list(sampler.generate([REQUEST]))
    assert calls == ["wake weights kv_cache", "sample", "sleep 1"]


def test_questions_do_not_wake_it(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    sampler, calls = a_sampler(monkeypatch, tiny_model)
    list(sampler.generate([REQUEST]))
    del calls[:]
    assert sampler.free_bytes() == 7
    sampler.float_head(True)
    assert calls == ["rlfe_free_bytes", "rlfe_float_head"]


def test_an_engine_that_fails_half_awake_is_replaced_by_one_that_is_awake(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    sampler, calls = a_sampler(monkeypatch, tiny_model)
    list(sampler.generate([REQUEST]))
    sampler._llm.breaks = True
    with pytest.raises(RlfeError, match="cannot take the new weights: out of memory"):
        sampler.load(SNAPSHOT)
    del calls[:]
    sampler.load(SNAPSHOT)
    list(sampler.generate([REQUEST]))
    assert calls == ["start", "rlfe_load", "reset", "sample", "sleep 1"]


def half(sampler: VllmSampler) -> None:
    """A caller that leaves before the first request has ended."""
    requests = [REQUEST, Request(id="b", prompt_ids=(3,), sampling=SAMPLING)]
    left = sampler.generate(requests)
    next(left)
    left.close()


ACTS = {
    "snapshot": lambda sampler, folder: sampler.load(SNAPSHOT),
    "folder": lambda sampler, folder: sampler.load(folder),
    "generate": lambda sampler, folder: list(sampler.generate([REQUEST])),
    "half": lambda sampler, folder: half(sampler),
    "nothing": lambda sampler, folder: list(sampler.generate([])),
    "ask": lambda sampler, folder: sampler.free_bytes(),
    "restart": lambda sampler, folder: sampler.restart(),
}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(sorted(ACTS)), max_size=8))
def test_no_order_of_calls_asks_a_sleeping_engine_for_more_than_it_can_do(
    tiny_model: Path, names: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sampler, _ = a_sampler(monkeypatch, tiny_model)
        for name in [*names, "generate"]:
            ACTS[name](sampler, tiny_model)  # type: ignore[no-untyped-call]
        assert sampler._llm.asleep == {"weights", "kv_cache"}
