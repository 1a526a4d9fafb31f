"""The update alone under several settings of `[compute]`: seconds, model FLOP/s, peak memory.

The learner of `rlfe train` on one device computes the same batch of recorded rollouts
(`benchmarks.ranks`) again and again; nothing is sampled. The peak of the device is measured by a
large matrix product in the same process.

    python -m benchmarks.update models/smollm2-135m-instruct --shape qwen3-1.7b --tokens 1024 \\
        checkpointing=true compiles=true,checkpointing=true compiles=true,tokens=8192
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import rows_of_step
from benchmarks.training import SHAPES, WARM_UP, shaped


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model folder; with --shape only its tokenizer is used")
    parser.add_argument("settings", nargs="+", help="key=value,... of the learner; one run each")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a rollout")
    parser.add_argument("--steps", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    import torch

    from rlfe.engines.flops import measured_peak

    options = parsed()
    cuda = options.device == "cuda"
    peak = measured_peak(torch.device("cuda")) if cuda else None  # a CPU computes in float32
    chosen = {words: values_of(words) for words in options.settings}
    facts = {"options": {k: str(v) for k, v in vars(options).items()}, "peak": peak, "runs": []}
    if peak is not None:
        print(f"peak of a bfloat16 matrix product: {peak / 1e12:.1f} TFLOP/s")
    with tempfile.TemporaryDirectory() as name:
        if options.shape:
            options.model = str(shaped(options, Path(name)))
        for words, values in chosen.items():
            run = {"settings": words, **ran(options, values, peak)}
            facts["runs"].append(run)
            told(run)
            if options.out:
                options.out.write_text(json.dumps(facts, indent=1) + "\n")


def values_of(words: str) -> dict[str, Any]:
    """`compiles=true,tokens=8192` as arguments of the learner; SystemExit if it is none."""
    try:
        pairs = (each.split("=", 1) for each in words.split(",") if each)
        return {name: json.loads(value) for name, value in pairs}
    except ValueError as error:
        raise SystemExit(f"{words} is not key=value,... with JSON values: {error}") from error


def told(run: dict[str, Any]) -> None:
    of_peak = "" if run["mfu"] is None else f"  MFU {run['mfu']:.1%}"
    print(
        f"{run['settings']:50} {run['median_seconds']:8.3f} s  {run['tflops']:9.3f} TFLOP/s"
        f"{of_peak}  {run['peak_gib']:6.1f} GiB",
        flush=True,
    )


def ran(options: argparse.Namespace, values: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """Seconds of each update with one set of settings, and what they make of the device."""
    import torch

    from rlfe.engines.learner import TransformersLearner
    from rlfe.training.losses import LossSettings
    from rlfe.training.objective import StepLoss

    learner = TransformersLearner(options.model, dtype="bfloat16", device=options.device, **values)
    batch = rows_of_step(options, learner, 0)
    loss = StepLoss(LossSettings(max_tokens=options.tokens), batch)
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.steps):
        learner.work()
        begin = time.perf_counter()
        learner.forward_backward(batch, loss)
        learner.optim_step(1e-6)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - begin, 3))
    work, middle = learner.work(), statistics.median(seconds[WARM_UP:] or seconds)
    facts = {
        "seconds": seconds,
        "median_seconds": middle,
        "passes": work.passes,
        "tflops": work.flops / middle / 1e12,
        "mfu": None if peak is None else work.flops / middle / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    }
    learner.close()
    del learner
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return facts


if __name__ == "__main__":
    main()
