"""Checkpoints on the Hub: scored from there, one at a time, with local names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.hub_stand_in import serve
from tests.test_cli_eval import CELL, make_run

UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo("alice/series")
api.upload_folder(repo_id="alice/series", folder_path=sys.argv[1])
"""


def test_a_glob_on_the_hub_gives_the_scores_of_the_local_run(tmp_path: Path) -> None:
    place = tmp_path / "local"
    place.mkdir()
    make_run(place)
    hub = serve(tmp_path / "hub")
    env = {
        **os.environ, **hub.environment(), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip

    def rlfe(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlfe", "eval", *words]
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)

    try:
        subprocess.run([sys.executable, "-c", UPLOAD, str(place / "runs")], env=env, check=True)
        assert rlfe(place, "--ckpt-glob", "runs/*/global_step_*").returncode == 0
        away = tmp_path / "away"
        away.mkdir()
        glob = "hf://alice/series/*/global_step_*"
        done = rlfe(away, "--ckpt-glob", glob)
        assert done.returncode == 0, done.stderr
        assert "24 samples drawn" in done.stderr
        assert scores(place) == scores(away)
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        again = rlfe(away, "--ckpt-glob", glob)
        assert "0 samples drawn, 0 judged, models loaded: 0" in again.stderr
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        rlfe(away, "--ckpt-glob", glob, "-n", "8", "--steps", "10", "--keep")
        assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 1
        nothing = rlfe(away, "--ckpt-glob", "hf://alice/series/*/global_step_99")
        assert nothing.returncode == 5
        shutil.rmtree(tmp_path / "cache")
    finally:
        hub.close()


def scores(root: Path) -> bytes:
    assert (root / "runs" / CELL / "config.toml").is_file()
    return (root / "runs/_tables/scores.csv").read_bytes()
