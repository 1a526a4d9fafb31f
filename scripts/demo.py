"""The main job on a real model in minutes: train two cells, evaluate, publish, load back.

    python scripts/demo.py .demo          (what `make demo` runs, in an environment of its own)

Every step is printed as the command that you would type. It is a smoke run at real settings'
shape: four MBPP problems, a handful of steps, a 135M model on the CPU. It shows that everything
works together and how the output looks; it says nothing about forgetting.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CELLS = {"nobuf": [], "hardcd_lam0p1": ["--set", "replay.strategy=hard_cooldown"]}
EVAL = ["--recipe", "demo", "--task", "mbpp_plus", "--task", "gsm8k"]


def run(*command: str, folder: Path) -> None:
    """Print a command as a user would type it, run it in `folder`, stop the demo if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    started = time.monotonic()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment)
    if done.returncode:
        sys.exit(f"the demo stopped: exit {done.returncode} from {shlex.join(command)}")
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".demo").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("runs", "published", "eval.csv", "eval.parquet", "eval.png"):
        path = folder / old
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    started = time.monotonic()
    scripts = Path(os.path.relpath(HERE, folder))
    run("python", str(scripts / "fetch_model.py"), "smollm2-135m-instruct", folder=folder)
    for settings in CELLS.values():
        run("rlfe", "train", "--recipe", "demo", *settings, folder=folder)
    checkpoints = ["--ckpt-glob", "runs/*/global_step_*", "--base", "smollm2-135m-instruct"]
    outputs = ["--csv", "eval.csv", "--plot", "eval.png"]
    run("rlfe", "eval", *checkpoints, *EVAL, *outputs, folder=folder)
    cells = sorted(
        path.name for path in (folder / "runs").iterdir() if not path.name.startswith("_")
    )
    runs = [f"runs/{cell}" for cell in cells]
    run("rlfe", "push", *runs, "--to-folder", "published", "--yes", folder=folder)
    last = max((folder / runs[0]).glob("global_step_*"), key=lambda p: int(p.name.split("_")[-1]))
    subfolder = f"{cells[0]}/{last.name}"
    run("python", str(scripts / "load_back.py"), "published", subfolder, folder=folder)
    print("\nThis was a smoke run: four training problems, four steps, twelve samples a point. It")
    print("shows that everything works and how results look; it measures no forgetting.")
    print(f"All of it took {time.monotonic() - started:.0f} s. Look at {folder.name}/eval.png,")
    print(f"{folder.name}/eval.csv and {folder.name}/published/README.md (the model card).")


if __name__ == "__main__":
    main()
