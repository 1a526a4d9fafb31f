"""engine.devices chooses the visible GPUs; asking for more than one process uses is said."""

import json

import pytest

from rlfe import config
from rlfe.cli.main import run
from rlfe.engines.devices import VISIBLE, choose
from rlfe.engines.fallback import settled
from rlfe.errors import RequestError
from rlfe.recipe_checks import notes
from rlfe.schema import Engine, Recipe


def test_the_named_gpus_are_the_visible_ones():
    environment = {}
    choose(Engine(devices="2, 3"), environment, lambda: 2)
    assert environment == {VISIBLE: "2,3"}
    choose(Engine(devices="2,3"), environment, lambda: 2)  # again, in the same process
    assert environment == {VISIBLE: "2,3"}


@pytest.mark.parametrize(
    "engine",
    [
        Engine(),
        Engine(devices="0,1", device="cpu"),
        Engine(devices="0", sampler="fake", learner="fake"),
    ],
)
def test_without_cuda_or_a_choice_nothing_is_touched(engine):
    environment = {}
    choose(engine, environment, lambda: 8)
    assert environment == {}


def test_a_gpu_that_a_scheduler_hides_stays_hidden():
    environment = {VISIBLE: "4,5"}
    with pytest.raises(RequestError, match="GPU 0 is not among the visible ones"):
        choose(Engine(devices="0,4"), environment, lambda: 2)
    choose(Engine(devices="5"), environment, lambda: 1)
    assert environment == {VISIBLE: "5"}


def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(RequestError, match="names 8 GPUs, of which 1 is there"):
        choose(Engine(devices="0,1,2,3,4,5,6,7"), {}, lambda: 1)
    choose(Engine(devices="0,1"), {}, lambda: 0)  # no GPU at all: the CPU computes


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (
            {"gpus_per_node": 8},
            ["8 GPUs are asked for, one is used: rlfe train --gpus 8 would use all"],
        ),
        (
            {"devices": "0,1"},
            ["2 GPUs are asked for, one is used: rlfe train --gpus 2 would use all"],
        ),
        ({"gpus_per_node": 1, "devices": "3"}, []),
        ({"gpus_per_node": 4, "tensor_parallel": 4, "sampler": "vllm"}, []),
        (
            {"gpus_per_node": 8, "tensor_parallel": 4, "sampler": "vllm"},
            [
                "8 GPUs are asked for, one learns, 4 sample: rlfe train --gpus 8 "
                "--set engine.tensor_parallel=1 would use all"
            ],
        ),
    ],
)
def test_gpus_that_one_process_does_not_use_are_noted(engine, said):
    assert list(notes(Recipe(engine=Engine(**engine)))) == said


def test_the_plan_shows_the_notes_that_the_record_will_have(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--recipe", "deepcoder-top-p-0.9", "--dry-run", "--json"], {}) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)["run"]["notes"]
    recipe = settled(config.load(["deepcoder-top-p-0.9"]))[0].recipe  # vllm may not be here
    assert told == list(notes(recipe))
    assert any(text.startswith("8 GPUs are asked for") for text in told)
    assert any(text.startswith("lora.alpha and lora.targets are not used") for text in told)
    assert all(text in " ".join(err.split()) for text in told)
