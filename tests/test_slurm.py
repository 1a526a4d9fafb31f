"""Array scripts, run by a shell that plays sbatch: one element after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlfe.cli import main
from rlfe.slurm import eval_script, sweep_script
from tests.test_cli_eval import GLOB, make_run

ROOT = Path(__file__).parents[1]
TWO_CELLS = """
[model]
path = "org/small"
[engine]
sampler = "fake"
learner = "fake"
[prompt]
style = "base"
[data]
size = 3
[train]
steps = 1
max_tokens = 20
[matrix]
"optim.lr" = [1e-5, 1e-6]
"""
# Reads --array, --dependency and the script's own #SBATCH lines; an element's id is in the
# environment, its words go to the named log. Jobs end at once, so a dependency is met or never is.
SBATCH = r"""#!/bin/bash
array= after= script=
for word in "$@"; do case "$word" in
  --array=*) array=${word#--array=} ;;
  --dependency=afterok:*) after=${word#--dependency=afterok:} ;;
  --parsable) ;;
  *) script=$word ;;
esac; done
own() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
array=${array:-$(own array)}
number=$(( $(cat "$FAKE/last" 2>/dev/null || echo 100) + 1 )); echo $number > "$FAKE/last"
echo "$number;cluster"
if [ -n "$after" ] && [ "$(cat "$FAKE/$after")" != 0 ]; then
  echo "DependencyNeverSatisfied" >> "$FAKE/journal"; exit 0
fi
worst=0
for element in $(seq "${array%-*}" "${array#*-}"); do
  log=$(own output | sed "s/%a/$element/")
  SLURM_ARRAY_TASK_ID=$element bash "$script" > "$log" 2>&1; code=$?
  echo "$element $code" >> "$FAKE/journal"
  [ $code = 0 ] || worst=$code
done
echo $worst > "$FAKE/$number"
"""
RLFE = """#!/bin/bash
if [ -e "$FAKE/broken-$SLURM_ARRAY_TASK_ID" ]; then echo "node failed" >&2; exit 9; fi
exec "$FAKE_PYTHON" -m rlfe "$@"
"""


class Slurm:
    """The stand-in: its journal has `element exit` for each that ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "slurm"
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        for name, text in (("sbatch", SBATCH), ("rlfe", RLFE)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "FAKE": str(self.folder),
            "FAKE_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.environment.pop("SLURM_ARRAY_TASK_ID", None)

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environment, text=True, capture_output=True, check=True
        )
        return done.stdout

    def journal(self) -> list[str]:
        return (self.folder / "journal").read_text().splitlines()

    def breaks(self, element: int, broken: bool) -> None:
        file = self.folder / f"broken-{element}"
        file.touch() if broken else file.unlink()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.chdir(tmp_path)
    return Slurm(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(list(words), {}) == 0
    return capsys.readouterr().out


def tables(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (root / "runs/_tables").iterdir()}


def test_an_evaluation_in_parts_survives_a_failed_element(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    Path("eval.sh").write_text(printed(capsys, "eval", *GLOB, "--slurm", "2"))
    slurm.breaks(2, True)
    slurm("bash", "eval.sh")
    assert slurm.journal() == ["1 0", "2 9", "DependencyNeverSatisfied"]
    assert Path("rlfe-eval-2.log").read_text() == "node failed\n"
    assert not Path("runs/_tables/scores.csv").exists()
    slurm.breaks(2, False)
    slurm("sbatch", "--array=2", "eval.sh")
    slurm("sbatch", "--array=0", "eval.sh")
    assert slurm.journal()[3:] == ["2 0", "0 0"]
    assert "0 samples drawn" in Path("rlfe-eval-0.log").read_text()
    spread = tables(tmp_path)
    make_run(tmp_path / "alone")
    os.chdir("alone")
    assert main.run(["eval", *GLOB], {}) == 0
    assert tables(Path()) == spread


def test_a_script_holds_the_command_for_parts_and_for_tables(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    words = ("eval", *GLOB, "-n", "8", "--require", "gsm8k/pass@1>=0", "--gpus", "4")
    script = printed(capsys, *words, "--slurm", "3")
    assert "#SBATCH --array=1-3\n#SBATCH --gpus=4\n#SBATCH --requeue\n" in script
    command = "rlfe eval --ckpt-glob 'runs/*/global_step_*' -n 8"
    assert f"  exec {command} --require 'gsm8k/pass@1>=0'\n" in script
    assert script.endswith(f'exec {command} --shard "$SLURM_ARRAY_TASK_ID/3"\n')
    assert not Path("runs/_tables").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--shard", "1/2"), "--slurm and --shard exclude each other"),
        (("--ray",), "--slurm and --ray exclude each other"),
        (("--dry-run",), "--slurm and --dry-run exclude each other"),
        (("--fresh",), "--slurm with --fresh: every requeued part would start anew"),
        (("--limit", "1"), "--slurm 2: one of the tasks has 1 problems"),
    ],
)
def test_what_a_script_cannot_hold_is_refused(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    make_run(tmp_path)
    assert main.run(["eval", *GLOB, "--slurm", "2", *words], {}) == 2
    assert says in capsys.readouterr().err


def test_a_sweep_goes_on_where_an_element_failed(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(TWO_CELLS)
    Path("mine.sh").write_text(printed(capsys, "sweep", "mine.toml", "--slurm"))
    slurm.breaks(1, True)
    slurm("sbatch", "mine.sh")
    assert slurm.journal() == ["0 0", "1 9"]
    rows = json.loads(printed(capsys, "sweep", "mine.toml", "--json"))["rows"]
    assert [row["state"] for row in rows] == ["done", "to do"]
    slurm.breaks(1, False)
    slurm("sbatch", "--array=1", "mine.sh")
    rows = json.loads(printed(capsys, "sweep", "mine.toml", "--json"))["rows"]
    assert [row["state"] for row in rows] == ["done", "done"]


def test_scripts_quote_what_a_shell_would_change() -> None:
    script = sweep_script("x", [["rlfe", "train", "--set", 'a="b c"']], gpus=0)
    assert "#SBATCH --array=0-0\n#SBATCH --gpus=0\n" in script
    assert """0) exec rlfe train --set 'a="b c"' ;;""" in script
    script = eval_script("x", ["rlfe", "$HOME"], ["rlfe", "a b"], 2)
    assert """exec rlfe '$HOME' --shard "$SLURM_ARRAY_TASK_ID/2\"""" in script
    assert "  exec rlfe 'a b'\n" in script
