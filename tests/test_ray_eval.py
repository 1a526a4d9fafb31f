"""`rlfe eval --ray` on real clusters: the bytes of one process, whatever is killed in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlfe import ray_cluster
from rlfe.cli import main
from rlfe.config import dump, load
from rlfe.errors import RequestError, RlfeError
from tests.hub_stand_in import serve
from tests.ray_nodes import children, environment, start, two_nodes
from tests.test_cli_eval import GLOB, make_run
from tests.test_eval_remote import UPLOAD

CELL = "tiny_mbpp_nobuf_lr1e3"
SETS = [
    "prompt.style=base", "engine.threads=1", "engine.device=cpu", "engine.sample_batch=8",
    "model.max_len=512", "eval.gsm8k.n=8", "eval.gsm8k.limit=16", "eval.gsm8k.max_tokens=48",
]  # fmt: skip
WORDS = ("eval", *GLOB, "--base")
SAMPLES = 3 * 16 * 8


def tiny_runs(root: Path, model: Path) -> Path:
    run = root / "runs" / CELL
    run.mkdir(parents=True)
    for step in (2, 4):
        shutil.copytree(model, run / f"global_step_{step}")
    recipe = load([], [f"model.path={model}", *SETS]).recipe
    (run / "config.toml").write_text(dump(recipe))
    return root


def tables(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (root / "runs/_tables").iterdir()}


def ended(child: subprocess.Popen[str]) -> str:
    """Its words, after it has ended well."""
    _, errors = child.communicate(timeout=900)
    assert child.returncode == 0, errors
    return errors


def stored(root: Path) -> int:
    """Bytes of samples on disk."""
    return sum(file.stat().st_size for file in root.rglob("step_*.jsonl.zst"))


def wait_for_samplers(child: subprocess.Popen[str], count: int) -> None:
    """With -v, each says when it is ready."""
    assert child.stderr is not None
    while count:
        line = child.stderr.readline()
        assert line, child.wait()
        count -= line.endswith("is ready\n")


def wait_for_samples(root: Path, child: subprocess.Popen[str]) -> None:
    while stored(root) < 2000:
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tables of one process."""
    root = tiny_runs(tmp_path_factory.mktemp("whole"), tiny_model)
    ended(start(root, *WORDS))
    return tables(root)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes() as (found, _):
        yield found


def test_a_local_cluster_gives_the_bytes_of_one_process_and_is_gone_afterwards(
    tmp_path: Path,
) -> None:
    for name in ("alone", "spread"):
        make_run(tmp_path / name)
    ended(start(tmp_path / "alone", "eval", *GLOB))
    errors = ended(start(tmp_path / "spread", "eval", *GLOB, "--ray", "--gpus", "2"))
    assert tables(tmp_path / "alone") == tables(tmp_path / "spread")
    lines = errors.splitlines()
    assert lines[1] == "Ray: 1 nodes, 1 samplers with 1 CPUs each"  # 24 samples: one is enough
    assert all("ray" not in line.lower() for line in lines[2:])  # Ray itself says nothing
    assert not children("ray::Worker")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--ray", "127.0.0.1:1"), 7, "no Ray cluster answers at 127.0.0.1:1"),
        (("--ray", "nonsense"), 2, "--ray nonsense is no HOST:PORT"),
        (("--ray", "ray://gpu01:10001"), 2, "that is the address for Ray clients"),
        (("--ray", "--shard", "1/2"), 2, "--ray and --shard exclude each other"),
    ],
)
def test_what_cannot_be_connected_to_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...], code: int, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    assert main.run(["eval", *GLOB, *words], {}) == code
    assert says in capsys.readouterr().err


def test_ray_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="ray, which is not installed") as told, \
            ray_cluster.cluster("local"):  # fmt: skip
        pass
    assert told.value.hint == "pip install 'rlfe[ray]'"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("local", "Ray cannot be started here: The node timed out"),
        ("auto", "Ray cannot be used at auto: The node timed out"),
    ],
)
def test_a_ray_that_does_not_start_is_said(
    monkeypatch: pytest.MonkeyPatch, address: str, says: str
) -> None:
    import ray

    def slow(*_: object, **__: object) -> None:
        raise Exception("The node timed out\nduring startup")  # as Ray does

    monkeypatch.setattr(ray, "init", slow)
    environment: dict[str, str] = {}
    with pytest.raises(RlfeError, match=says), ray_cluster.cluster(address, environment):
        pass
    assert environment == {}


def test_the_address_is_the_given_one_then_the_environments_then_a_local_cluster() -> None:
    environment = {"RAY_ADDRESS": "head:6379"}
    assert ray_cluster.chosen_address("auto", environment) == "auto"
    assert ray_cluster.chosen_address("", environment) == "head:6379"
    assert ray_cluster.chosen_address("", {}) == "local"


def test_samplers_are_counted_by_what_a_node_has() -> None:
    node = ray_cluster.Node(id="", host="", cpus=4, gpus=8)
    assert ray_cluster.Needs(cpus=1, gpus=0).fit(node) == 4
    assert ray_cluster.Needs(cpus=64, gpus=3).fit(node) == 2


@pytest.mark.slow
def test_a_cluster_of_our_own_listens_on_the_loopback_interface_only() -> None:
    code = """
        import subprocess, sys
        from rlfe.ray_cluster import cluster
        with cluster("local", num_cpus=1) as found:
            print([node.cpus for node in found.nodes()], flush=True)
            sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "[1]\n"
        found = listening(children(""))
    finally:
        child.communicate()
    assert len(found) >= 3
    assert all(address in LOOPBACK for address in found)


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(pids: list[int]) -> list[str]:
    """Addresses, as the kernel writes them, on which these processes take connections."""
    sockets = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(handle))
            except OSError:
                continue
    rows = []
    for table in ("tcp", "tcp6"):
        lines = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        rows += [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    return [line[1].split(":")[0] for line in rows]


@pytest.mark.slow
def test_two_nodes_give_the_bytes_of_one_process(
    tiny_model: Path, tmp_path: Path, address: str, whole: dict[str, bytes]
) -> None:
    root = tiny_runs(tmp_path, tiny_model)
    errors = ended(start(root, *WORDS, "--ray", address, "-v"))
    assert "Ray: 2 nodes, 2 samplers with 1 CPUs each" in errors
    assert f"{SAMPLES} samples drawn, {SAMPLES} judged" in errors
    assert tables(root) == whole
    again = ended(start(root, *WORDS, "--ray", address))
    assert "0 samples drawn, 0 judged, models loaded: 0" in again
    assert tables(root) == whole


@pytest.mark.slow
def test_the_address_may_stand_in_the_environment(
    tiny_model: Path, tmp_path: Path, address: str, whole: dict[str, bytes]
) -> None:
    root = tiny_runs(tmp_path, tiny_model)
    errors = ended(start(root, *WORDS, "--ray", RAY_ADDRESS=address))
    assert "Ray: 2 nodes" in errors
    assert tables(root) == whole


@pytest.mark.slow
def test_a_killed_actor_costs_its_units_only(
    tiny_model: Path, tmp_path: Path, address: str, whole: dict[str, bytes]
) -> None:
    root = tiny_runs(tmp_path, tiny_model)
    child = start(root, *WORDS, "--ray", address, "-v")
    wait_for_samplers(child, 2)
    os.kill(children("ray::Worker")[0], signal.SIGKILL)
    errors = ended(child)
    assert "is lost (ActorDiedError" in errors
    assert "units were lost with their samplers and given out again" in errors
    assert f"{SAMPLES} samples drawn, {SAMPLES} judged" in errors
    assert tables(root) == whole


@pytest.mark.slow
def test_ctrl_c_keeps_what_came_and_one_process_goes_on(
    tiny_model: Path, tmp_path: Path, address: str, whole: dict[str, bytes]
) -> None:
    root = tiny_runs(tmp_path, tiny_model)
    child = start(root, *WORDS, "--ray", address)
    wait_for_samples(root, child)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    errors = ended(start(root, *WORDS))
    drawn = int(errors.split(" samples drawn")[0].split()[-1])
    assert 0 < drawn < SAMPLES
    assert tables(root) == whole


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_running_and_loses_nothing(
    tiny_model: Path, tmp_path: Path, address: str, whole: dict[str, bytes]
) -> None:
    root = tiny_runs(tmp_path, tiny_model)
    child = start(root, *WORDS, "--ray", address)
    wait_for_samples(root, child)
    child.kill()
    child.communicate()
    deadline = time.monotonic() + 60
    while children("ray::Worker"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    ended(start(root, *WORDS, "--ray", address))
    assert tables(root) == whole


@pytest.mark.slow
def test_checkpoints_on_the_hub_are_fetched_by_the_nodes(tmp_path: Path, address: str) -> None:
    make_run(tmp_path / "here")
    hub = serve(tmp_path / "hub")
    cache = tmp_path / "cache"
    env = {**hub.environment(), "XDG_CACHE_HOME": str(cache)}
    try:
        subprocess.run(
            [sys.executable, "-c", UPLOAD, str(tmp_path / "here/runs")],
            env=environment(**env), check=True,
        )  # fmt: skip
        ended(start(tmp_path / "here", "eval", *GLOB))
        away = tmp_path / "away"
        away.mkdir()
        words = ("eval", "--ckpt-glob", "hf://alice/series/*/global_step_*")
        ended(start(away, *words, "--ray", "local", **env))
        assert tables(away)["scores.csv"] == tables(tmp_path / "here")["scores.csv"]
        assert not list(cache.rglob("*.safetensors"))
        again = ended(start(away, *words, **env))
        assert "0 samples drawn, 0 judged, models loaded: 0" in again
    finally:
        hub.close()


@pytest.mark.slow
def test_a_killed_node_costs_its_units_only(
    tiny_model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    root = tiny_runs(tmp_path, tiny_model)
    with two_nodes() as (address, raylet):
        child = start(root, *WORDS, "--ray", address, "-v")
        wait_for_samplers(child, 2)
        os.kill(raylet, signal.SIGKILL)
        errors = ended(child)
    assert "is lost (" in errors
    assert f"{SAMPLES} samples drawn, {SAMPLES} judged" in errors
    assert tables(root) == whole
