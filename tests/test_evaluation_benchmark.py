"""`benchmarks/evaluation.py`: it reads what `rlfe eval` says, and the peer asks the same."""

import json
from pathlib import Path

import pytest

from benchmarks.evaluation import (
    CELL,
    RESULT,
    compared,
    job_of,
    parsed,
    read_peer,
    read_report,
    requests_of,
)
from rlfe.engines.tokenizer import HfTokenizer
from rlfe.randomness import derive
from tests.test_cli_eval import make_run, rlfe
from tests.tiny_model import write_tiny_model


def test_what_rlfe_eval_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    result = rlfe("--ckpt-glob", "runs/*/global_step_*", "--json")
    read = read_report(json.loads(result.stdout)["run"], wall=12.34)
    assert (read["samples"], read["judged"], read["wall_seconds"]) == (24, 24, 12.3)
    assert len(read["switch_seconds"]) == 1
    assert read["switch_seconds_max"] == read["switch_seconds"][0]
    assert read["tokens_per_second_without_hold_up"] >= read["tokens_per_second"] > 0
    assert read["tokens_per_second_of_work"] <= read["tokens_per_second"]


def test_hold_up_and_changes_of_weights_are_told_apart() -> None:
    run = {
        "tokens": 90_000, "sampled": 480, "judged": 480, "sample_seconds": 10.0,
        "wait_seconds": 1.0, "work_seconds": 12.0, "load_seconds": [30.0, 0.5, 0.9, 0.7],
    }  # fmt: skip
    read = read_report(run, wall=60.0)
    assert read["tokens_per_second"] == 9000
    assert read["tokens_per_second_without_hold_up"] == 10_000
    assert read["tokens_per_second_of_work"] == 7500
    assert (read["judging_held_up_percent"], read["start_seconds"]) == (10.0, 30.0)
    assert (read["switch_seconds_median"], read["switch_seconds_max"]) == (0.7, 0.9)


def test_ratios_are_medians_over_rounds_and_wait_for_the_peer() -> None:
    names = ("", "_without_hold_up", "_of_work")
    rounds = [
        {
            "rlfe": {f"tokens_per_second{name}": mine for name in names},
            "vllm": {"tokens_per_second": 1000},
        }
        for mine in (900, 980, 970)
    ]
    assert compared(rounds)["ratio_while_sampling"] == 0.97
    assert compared([{"rlfe": rounds[0]["rlfe"]}]) == {}
    assert compared([{"rlfe": rounds[0]["rlfe"], "vllm": {"failed": "no memory"}}]) == {}


def test_lines_of_libraries_are_not_taken_for_the_result() -> None:
    text = "Loading\n" + RESULT + '{"tokens": 3}\nRESULTS of nothing\n'
    assert read_peer(text) == {"tokens": 3}


def test_the_peer_sends_the_requests_of_the_evaluation(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "runs" / CELL / "global_step_1")
    job = job_of(parsed([str(folder), "--problems", "3", "-n", "12", "--max-tokens", "20"]), folder)
    requests = requests_of(job, HfTokenizer(folder))
    assert [(r.id, r.sampling.n) for r in requests] == [
        (f"{problem}/{block}", n) for problem in range(3) for block, n in ((0, 8), (1, 4))
    ]
    assert {(r.sampling.temperature, r.sampling.top_p) for r in requests} == {(0.6, 0.95)}
    seed = derive(0, "eval", f"{CELL}/global_step_1", "mbpp_plus", job.problems[2].id, 1)
    assert requests[5].sampling.seed == seed
