"""`rlfe sweep --ray`: cells as processes on nodes, resumed elsewhere, stopped by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rlfe.cli import main
from rlfe.cli.sweep_ray import CellRunner, Place, cell_needs
from rlfe.config import load
from rlfe.errors import RequestError
from rlfe.ray_cluster import Cluster, Needs, Node
from rlfe.records import read_jsonl
from rlfe.schema import Recipe
from tests.ray_nodes import REPOSITORY, children, environment, start, two_nodes
from tests.test_slurm import TWO_CELLS

CELL = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("begun", *sys.argv[1:], flush=True)
time.sleep(float(sys.argv[1]))
"""
NAMES = ["small_mbpp_nobuf_lr1e5", "small_mbpp_nobuf_lr1e6"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "cell.py").write_text(CELL)
    (tmp_path / "seen").touch()
    return Place(folder=tmp_path, proof=tmp_path / "seen")


def begun(log: Path) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or "begun" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cell_runs_in_the_folder_and_its_words_go_to_its_log(place: Place) -> None:
    log = place.folder / "a.log"
    answer = CellRunner(place).run(["cell", "0", "--x"], log)
    assert (answer.code, answer.unseen) == (0, "")
    assert log.read_text() == "begun 0 --x\n"


def test_a_node_without_the_folder_says_so(place: Place) -> None:
    place.proof.unlink()
    answer = CellRunner(place).run(["cell", "0"], place.folder / "a.log")
    assert answer.unseen == str(place.proof)


def test_a_cell_is_told_to_stop_even_where_ctrl_c_is_blocked(place: Place) -> None:
    runner, log = CellRunner(place), place.folder / "a.log"
    answers = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray's processes do
    try:
        thread = threading.Thread(target=lambda: answers.append(runner.run(["cell", "60"], log)))
        thread.start()
        begun(log)
        runner.stop()
        thread.join(timeout=30)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert [answer.code for answer in answers] == [130]


def test_a_cell_dies_with_what_started_it(place: Place) -> None:
    code = f"""
        from pathlib import Path
        from rlfe.cli.sweep_ray import CellRunner, Place
        folder = Path({str(place.folder)!r})
        CellRunner(Place(folder=folder, proof=folder / "seen")).run(["cell", "61"], folder / "log")
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(), cwd=REPOSITORY
    )
    begun(place.folder / "log")
    running = children(f"{sys.executable} -m cell 61", everywhere=True)
    assert len(running) == 1
    child.kill()
    child.wait()
    deadline = time.monotonic() + 30
    while children(f"{sys.executable} -m cell 61", everywhere=True):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class FakeCluster(Cluster):
    def __init__(self, *nodes: Node) -> None:
        super().__init__("fake")
        self._nodes = list(nodes)

    def nodes(self) -> list[Node]:
        return self._nodes


def recipe(*sets: str) -> Recipe:
    return load([], ["prompt.style=base", *sets]).recipe


def test_a_cell_takes_the_gpus_that_its_engine_computes_on() -> None:
    gpus = FakeCluster(Node(id="", host="a", cpus=8, gpus=8))
    parallel = recipe("engine.sampler=vllm", "engine.tensor_parallel=4")
    assert cell_needs([recipe(), parallel], None, gpus) == Needs(cpus=1, gpus=4)
    assert cell_needs([recipe()], 2, gpus) == Needs(cpus=1, gpus=2)
    assert cell_needs([recipe("engine.device=cpu", "engine.threads=3")], None, gpus) == Needs(
        cpus=3, gpus=0
    )
    assert cell_needs([recipe()], None, FakeCluster()) == Needs(cpus=1, gpus=0)
    with pytest.raises(RequestError, match="Ray chooses the GPUs of a cell"):
        cell_needs([recipe("engine.devices='0,1'")], None, gpus)


def test_cells_that_no_node_can_hold_are_refused() -> None:
    nodes = FakeCluster(
        Node(id="", host="a", cpus=8, gpus=2), Node(id="", host="b", cpus=8, gpus=5)
    )
    assert nodes.room(Needs(cpus=1, gpus=2)) == 3
    with pytest.raises(RequestError, match="8 GPUs and 1 CPUs are needed on one node; the largest"):
        nodes.room(Needs(cpus=1, gpus=8))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--run", "--ray"), "--run and --ray exclude each other"),
        (("--ray", "--slurm"), "--ray and --slurm exclude each other"),
        (("--ray", "--jobs", "2"), "--jobs 2 with --ray"),
        (("--gpus", "2"), "--gpus 2 is for --ray and --slurm"),
        (("--ray", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(TWO_CELLS)
    assert main.run(["sweep", "mine.toml", *words], {}) in (2, 7)
    assert says in capsys.readouterr().err


def rows(root: Path) -> list[tuple[str, str]]:
    child = start(root, "sweep", "mine.toml", "--json")
    found = json.loads(child.communicate()[0])["rows"]
    return [(row["cell"], row["state"]) for row in found]


def wait_for_steps(root: Path, child: subprocess.Popen[str]) -> None:
    while not any(read_jsonl(root / "runs" / name / "metrics.jsonl") for name in NAMES):
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_cells_on_two_nodes_go_on_when_a_process_and_a_node_are_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TWO_CELLS.replace("steps = 1", "steps = 400"))
    with two_nodes() as (address, raylet):
        child = start(tmp_path, "sweep", "mine.toml", "--ray", address)
        wait_for_steps(tmp_path, child)
        os.kill(children("ray::CellRunner")[0], signal.SIGKILL)
        time.sleep(2)
        os.kill(raylet, signal.SIGKILL)
        _, errors = child.communicate(timeout=500)
    assert child.returncode == 0, errors
    assert errors.count("goes on elsewhere") >= 2
    assert rows(tmp_path) == [(name, "done") for name in NAMES]
    for name in NAMES:
        steps = [row["step"] for row in read_jsonl(tmp_path / "runs" / name / "metrics.jsonl")]
        assert steps == list(range(1, 401))
    assert not list((tmp_path / "runs/_sweep").glob(".seen-*"))


@pytest.mark.slow
def test_ctrl_c_lets_cells_end_their_step_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TWO_CELLS.replace("steps = 1", "steps = 400"))
    child = start(tmp_path, "sweep", "mine.toml", "--ray")
    wait_for_steps(tmp_path, child)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 130, errors
    assert "exit 130" in errors
    assert "begun" in {state for _, state in rows(tmp_path)}
    again = start(tmp_path, "sweep", "mine.toml", "--ray")
    _, errors = again.communicate(timeout=500)
    assert again.returncode == 0, errors
    assert rows(tmp_path) == [(name, "done") for name in NAMES]
