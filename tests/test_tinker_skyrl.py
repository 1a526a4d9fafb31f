"""The Tinker engine against SkyRL's server (skyrl 0.3.0, JAX on a CPU), started here.

`RLFE_SKYRL_PYTHON` names the interpreter of an environment with `skyrl[jax,tinker]`, and
`RLFE_SKYRL_CLIENT` a folder with an older client that speaks its wire (CONTRIBUTING.md).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tinker_runs import command, lines

PYTHON, CLIENT = os.environ.get("RLFE_SKYRL_PYTHON"), os.environ.get("RLFE_SKYRL_CLIENT")
ROOT = Path(__file__).parents[1]
FLOAT32 = 1e-4
START_SECONDS, RUN_SECONDS = 600, 1800  # it compiles everything anew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON and CLIENT), reason="RLFE_SKYRL_PYTHON and RLFE_SKYRL_CLIENT are not set"
    ),
]


@pytest.fixture
def skyrl(tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a SkyRL server on the tiny model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--base-model", str(tiny_model), "--backend", "jax", "--port", str(port)]
    words += ["--backend-config", '{"max_lora_adapters": 8, "max_lora_rank": 8}']
    words += ["--checkpoints-base", str(tmp_path / "skyrl")]
    words += ["--database-url", f"sqlite:///{tmp_path / 'skyrl.db'}"]
    log = (tmp_path / "skyrl.log").open("wb")
    process = subprocess.Popen(
        [str(PYTHON), str(ROOT / "tests" / "skyrl_launcher.py"), "api", *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while not _answers(url):
        assert process.poll() is None, (tmp_path / "skyrl.log").read_text()[-2000:]
        assert time.monotonic() < until
        time.sleep(1)
    yield url
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    log.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture
def start(skyrl: str, tiny_model: Path, tmp_path: Path):
    """Starts `rlfe train` at the server, with the client that speaks its wire."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": skyrl,
        "TINKER_API_KEY": "tml-none-is-asked-for",
        "PYTHONPATH": f"{CLIENT}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }

    def starting(*words: str) -> subprocess.Popen[str]:
        words = tuple(command(tmp_path, tiny_model, "--set", "service.reduction=mean", *words))
        line = [sys.executable, "-m", "rlfe", *words]
        return subprocess.Popen(
            line, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )

    return starting


def test_a_run_at_skyrl_is_killed_and_goes_on_and_its_stale_samplers_are_noticed(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process, until = start("--set", "lag.steps=0"), time.monotonic() + RUN_SECONDS
    while len(lines(tmp_path)) < 6 and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = start("--set", "lag.steps=0", "--resume")
    again.communicate(timeout=RUN_SECONDS)
    assert again.returncode == 0
    found = lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 9))
    assert {line["lag"] for line in found} == {0}
    assert max(line["lag/fresh_mean_abs"] for line in found) <= FLOAT32
    assert max(abs(line["ratio/max"] - 1) for line in found) <= FLOAT32
    assert any(line.get("clip/adv_share/1") for line in found)
    stale = start("--set", "train.steps=12", "--overwrite")  # one slot for trainer and samplers
    told = stale.communicate(timeout=RUN_SECONDS)[1]
    assert stale.returncode == 1
    assert "the service does not keep tinker://" in told
