"""Whole runs of `lag-staleness` at the loopback server, from the command line.

The run that is killed is started as a program; its server lives in this process and outlives it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlfe.checkpoints import problems
from rlfe.cli import main
from tests import tinker_runs
from tests.tinker_runs import NAME, check_run, command, lines

pytest.importorskip("tinker", reason="tinker is not installed (rlfe[tinker])")

from tests.tinker_server import Fault, Server

ROOT = Path(__file__).parents[1]
FLOAT32 = 1e-4  # the server scores a row whole, the sampler token by token


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rlfe(*words: str) -> int:
    return main.run(list(words), {})


def test_the_study_runs_at_the_service_and_leaves_what_others_read(
    tinker_server: Server, tiny_model: Path, tmp_path: Path, one_thread: None, capsys: Any
) -> None:
    assert rlfe(*command(tmp_path, tiny_model)) == 0
    check_run(lines(tmp_path), precision=FLOAT32)
    run = tmp_path / "runs" / NAME
    for step in (4, 8):
        assert problems(run / f"global_step_{step}", need_tokenizer_config=True) == []
        assert (run / f"global_step_{step}" / "adapter" / "adapter_model.safetensors").is_file()
    shown = capsys.readouterr()
    for path in run.rglob("*"):  # neither the key nor the address is written anywhere
        if path.is_file():
            data = path.read_bytes()
            assert b"tml-loopback" not in data
            assert tinker_server.url.encode() not in data, path
    assert "tml-loopback" not in shown.out + shown.err
    assert 'sampler = "tinker"' in (run / "config.toml").read_text()
    words = ["--task", "gsm8k", "-n", "2", "--k", "1", "--max-tokens", "8", "--limit", "2"]
    assert rlfe("eval", "--ckpt-glob", f"runs/{NAME}/global_step_8", *words) == 0
    shown = capsys.readouterr()  # a checkpoint is evaluated here, without the service
    assert "engine transformers float32" in shown.out + shown.err


def test_a_server_that_dies_costs_one_step(
    tinker_server: Server,
    tiny_model: Path,
    tmp_path: Path,
    one_thread: None,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlfe.engines.tinker_service.SILENT_SECONDS", 0.5)
    monkeypatch.setattr("rlfe.engines.tinker_service.PAUSE_SECONDS", 0.1)
    plain, steps = tinker_server.optim_step, []

    def dying(data: Any) -> Any:
        steps.append(1)
        tinker_server.gone = len(steps) == 4
        return plain(data)

    tinker_server.optim_step = dying  # type: ignore[method-assign]
    assert rlfe(*command(tmp_path, tiny_model)) == 7
    told = capsys.readouterr().err
    assert re.search("was lost while (computing gradients|stepping the optimiser)", told)
    assert "The state after step 3 is whole" in told
    assert "--resume" in told
    tinker_server.gone = False
    assert rlfe(*command(tmp_path, tiny_model, "--resume")) == 0
    check_run(lines(tmp_path), precision=FLOAT32)


def test_each_refusal_of_the_service_is_one_error(
    tinker_server: Server, tiny_model: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def refused(code: int, said: str, *words: str) -> None:
        assert rlfe(*command(tmp_path, tiny_model, *words)) == code
        told = capsys.readouterr().err
        assert told.count("error:") == 1
        assert said in told
        assert "Traceback" not in told

    refused(5, "does not train other/model", "--set", "service.model=other/model")
    refused(2, "lora.rank = 0", "--set", "lora.rank=0")
    for key in ("tml-wrong", "wrong"):
        monkeypatch.setenv("TINKER_API_KEY", key)
        refused(4, "refuses the key")
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    refused(7, "nothing answers at http://127.0.0.1:9")


def test_a_server_without_custom_losses_is_one_error_and_the_run_goes_on_later(
    tinker_server: Server, tiny_model: Path, tmp_path: Path, one_thread: None, capsys: Any
) -> None:
    tinker_server.reduction, short = "mean", ("--set", "train.steps=2")
    assert rlfe(*command(tmp_path, tiny_model, *short)) == 1
    told = capsys.readouterr().err
    assert told.count("error:") == 1
    assert "does not take custom losses as the API has them" in told
    tinker_server.reduction = "sum"
    assert rlfe(*command(tmp_path, tiny_model, *short, "--resume")) == 0
    assert [line["lag"] for line in lines(tmp_path)] == [0, 1]


@pytest.mark.slow  # three programs that import torch
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    tinker_server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(*words: str, name: str = NAME) -> subprocess.Popen[bytes]:
        words = tuple(command(tmp_path, tiny_model, *words, name=name))
        return subprocess.Popen([sys.executable, "-m", "rlfe", *words], env=environment)

    whole = "tiny_letters_maxrl_lag4_lr1e3_s1"
    assert start(name=whole).wait() == 0
    process = start()
    until = time.monotonic() + 300
    while len(lines(tmp_path)) < 6 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 6 <= len(lines(tmp_path)) < 8
    assert start("--resume").wait() == 0
    check_run(lines(tmp_path), precision=FLOAT32)
    assert _plain(lines(tmp_path)) == _plain(lines(tmp_path, whole))
    assert tinker_runs.NAME == NAME


def _plain(found: list[dict[str, Any]]) -> str:
    """What does not depend on the clock."""
    kept = [
        {k: v for k, v in line.items() if not k.startswith(("seconds", "time", "memory", "speed"))}
        for line in found
    ]
    return json.dumps(kept, sort_keys=True)


def test_faults_at_every_path_are_survived(
    tinker_server: Server, tiny_model: Path, tmp_path: Path, one_thread: None
) -> None:
    paths = ("asample", "retrieve_future", "forward_backward", "optim_step")
    tinker_server.faults = [Fault(path, status=503, skip=1) for path in paths]
    tinker_server.faults += [Fault("save_weights_for_sampler", status=429, skip=1)]
    assert rlfe(*command(tmp_path, tiny_model, "--set", "train.steps=2")) == 0
    assert len(lines(tmp_path)) == 2
    assert {fault.times for fault in tinker_server.faults} == {0}
