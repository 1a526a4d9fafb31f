"""Ranks: one process alone, who is started how, and errors in words."""

from __future__ import annotations

import numpy as np
import pytest

from rlfe.engines.devices import need_gpus
from rlfe.engines.ranks import NEEDED, Ranks, TorchRanks, member
from rlfe.errors import RequestError, RlfeError
from rlfe.recipe_checks import check_ranks, notes
from rlfe.schema import Engine, Recipe, Train


def test_one_process_alone_gets_back_what_it_gives() -> None:
    ranks = Ranks()
    assert (ranks.first, ranks.size) == (True, 1)
    assert ranks.gather("a") == ["a"]
    assert ranks.share("b") == "b"
    assert (ranks.any(True), ranks.any(False)) == (True, False)
    assert ranks.added(np.array([1.0, 2.0]))[0].tolist() == [1.0, 2.0]
    assert ranks.once(lambda: 3) == 3
    ranks.same("x", "weights")


def test_an_error_of_the_first_rank_is_raised_as_it_is() -> None:
    def refuse() -> None:
        raise RequestError("no", hint="yes")

    with pytest.raises(RequestError, match="no") as caught:
        Ranks().once(refuse)
    assert caught.value.hint == "yes"


def test_a_process_is_a_rank_only_where_torchrun_says_so() -> None:
    assert member({}) is None
    assert member({"WORLD_SIZE": "1", "RANK": "0"}) is None
    with pytest.raises(RequestError, match="LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR") as caught:
        member({"WORLD_SIZE": "2", "RANK": "0"})
    assert "torchrun" in caught.value.hint
    assert "MASTER_PORT" in NEEDED


class Seen(TorchRanks):
    """A rank without the others: only what it makes of their library's errors."""

    def __init__(self) -> None:
        from datetime import timedelta

        self.rank, self.size, self.phase = 0, 3, "step 4: training"
        self._timeout = timedelta(minutes=2)


@pytest.mark.parametrize(
    ("text", "seconds", "said"),
    [
        ("Ranks 1, 2 failed to pass monitoredBarrier in 1 ms", 0.1, "lost ranks 1, 2 in step 4"),
        ("Ranks 1 failed to pass monitoredBarrier", 200, "waited 2 minutes for rank 1 in step 4"),
        ("[/gloo/pair.cc] Connection closed by peer", 500, "rank 0 lost another rank in step 4"),
        ("[/gloo/x.cc] Timed out waiting 1ms", 0.1, "waited 2 minutes for another rank"),
    ],
)
def test_errors_of_the_library_name_phase_and_rank(text: str, seconds: float, said: str) -> None:
    found = Seen()._lost(text, seconds)
    assert said in found.what
    assert "--resume" in found.hint


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), Seen().guarded():
        raise RuntimeError("shape '[2]' is invalid")
    with pytest.raises(RlfeError, match="lost another rank"), Seen().guarded():
        raise RuntimeError("[/gloo/pair.cc] Connection reset by peer")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"sampler": "fake", "learner": "fake"}, '"fake" trains in one process'),
        ({"sampler": "vllm", "tensor_parallel": 2}, "engine.tensor_parallel = 2: with 4 ranks"),
        ({"device": "cuda:1"}, 'engine.device = "cuda:1": every rank takes a GPU of its own'),
    ],
)
def test_settings_with_which_ranks_cannot_train_are_refused(engine, said: str) -> None:
    recipe = Recipe(engine=Engine(**engine))
    check_ranks(recipe, 1)
    with pytest.raises(RequestError, match=said.replace("(", r"\(")):
        check_ranks(recipe, 4)


def test_more_processes_than_gpus_are_refused() -> None:
    need_gpus(2, there=2)
    with pytest.raises(RequestError, match="4 processes need 4 GPUs on this machine, 1 is there"):
        need_gpus(4, there=1)


def test_a_number_of_ranks_that_was_not_planned_is_noted() -> None:
    planned = Recipe(engine=Engine(gpus_per_node=8))
    assert list(notes(planned, 8)) == []
    assert list(notes(planned, 2)) == ["engine.gpus_per_node = 8, and 2 ranks train"]
    few = Recipe(train=Train(prompts_per_step=2))
    assert list(notes(few, 4)) == ["train.prompts_per_step = 2: of 4 ranks some sample nothing"]
