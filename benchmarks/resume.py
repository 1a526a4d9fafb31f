"""A run that is killed with SIGKILL and resumed, against one that is not: metrics step by step.

On a GPU two runs of one recipe differ by themselves: kernels add in another order, and one token
drawn otherwise changes a rollout. The steps before the kill show by how much; after it the
difference should be no larger. Both runs train on MBPP with real rewards. Without a GPU:
`--engine transformers --set engine.device=cpu`.

    python -m benchmarks.resume models/smollm2-135m-instruct --steps 12 --kill-after 5
    python -m benchmarks.resume models/smollm2-135m-instruct --beside   # on two GPUs at once
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMPARED = (
    "reward/mean",
    "tokens/sampled",
    "entropy",
    "loss/total",
    "optim/grad_norm",
    "mismatch/abs_mean",
)
POLL_SECONDS = 0.05


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-after", type=int, default=5, help="finished steps")
    parser.add_argument("--state-every", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--beside", action="store_true", help="both at once: GPU 0 and GPU 1")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--keep", type=Path, help="folder for the runs and their logs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        scratch = options.keep or Path(name)
        gpus = ("0", "1") if options.beside else (None, None)  # None: as this process
        whole = pool.submit(unbroken, options, scratch / "whole", gpus[0])
        if not options.beside:
            whole.result()
        killed = pool.submit(broken, options, scratch / "killed", gpus[1])
        at, first, second = killed.result(), whole.result(), metrics(scratch / "killed")
    facts = {
        "options": {key: str(value) for key, value in vars(options).items()},
        **at,
        "steps": {"unbroken": first, "killed": second},
        "largest_difference": {
            "before_the_kill": differences(first, second, range(at["resumed_from"])),
            "after_it": differences(first, second, range(at["resumed_from"], options.steps)),
        },
    }
    print(json.dumps(facts, indent=1))
    if options.out:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


def command(options: argparse.Namespace, folder: Path) -> list[str]:
    settings = {
        "model.path": options.model.resolve(),
        "model.max_len": 1024,
        "naming.model": "bench",
        "task.name": "mbpp",
        "prompt.style": "base",
        "train.steps": options.steps,
        "train.prompts_per_step": options.prompts,
        "train.group_size": 8,
        "train.max_tokens": options.max_tokens,
        "train.temperature": 0.7,
        "optim.lr": 1e-6,
        "save.every": options.steps,
        "save.state_every": options.state_every,
        "engine.sampler": options.engine,
        "engine.gpu_share": 0.3,
    }
    words = [sys.executable, "-m", "rlfe", "train", "--runs-dir", str(folder)]
    for setting in [*(f"{name}={value}" for name, value in settings.items()), *options.set]:
        words += ["--set", setting]
    return words


def started(words: list[str], folder: Path, gpu: str | None) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def finished(words: list[str], folder: Path, gpu: str | None) -> None:
    if started(words, folder, gpu).wait():
        raise SystemExit(f"rlfe train failed:\n{(folder / 'log').read_text()[-3000:]}")


def unbroken(options: argparse.Namespace, folder: Path, gpu: str | None) -> list[dict[str, Any]]:
    finished(command(options, folder), folder, gpu)
    return metrics(folder)


def broken(options: argparse.Namespace, folder: Path, gpu: str | None) -> dict[str, Any]:
    """Kill the run once enough steps are recorded, and let it go on; what was where."""
    run = started(command(options, folder), folder, gpu)
    while len(metrics(folder)) < options.kill_after:
        if run.poll() is not None:
            raise SystemExit(f"it ended early:\n{(folder / 'log').read_text()[-3000:]}")
        time.sleep(POLL_SECONDS)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    recorded = len(metrics(folder))
    states = [json.loads(path.read_text())["step"] for path in folder.glob("*/state/state.json")]
    begin = time.monotonic()
    finished([*command(options, folder), "--resume"], folder, gpu)
    return {
        "killed_after": recorded,
        "resumed_from": max(states, default=0),
        "seconds_of_the_second_part": round(time.monotonic() - begin, 1),
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl: of each step what is compared."""
    found = []
    for path in folder.glob("*/metrics.jsonl"):
        for line in path.read_text().split("\n")[:-1]:
            record = json.loads(line)
            found.append({"step": record["step"]} | {name: record.get(name) for name in COMPARED})
    return found


def differences(
    first: list[dict[str, Any]], second: list[dict[str, Any]], places: range
) -> Mapping[str, float]:
    """The largest difference of each metric over some steps, relative for counts and norms."""
    found = {}
    for name in COMPARED:
        pairs = [(first[p][name], second[p][name]) for p in places]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        share = name in ("tokens/sampled", "optim/grad_norm")
        apart = [abs(a - b) / ((abs(a) if share else 0) or 1) for a, b in known]
        found[name] = max(apart, default=0.0)
    return found


if __name__ == "__main__":
    main()
