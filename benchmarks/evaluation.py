"""`rlfe eval` on several checkpoints against vLLM's own offline generation of the same samples.

rlfe loads, samples, stores and judges; the peer is `vllm.LLM.generate` on an engine with the same
arguments, prompts and sampling values for one checkpoint, nothing stored, nothing judged. Both run
in a process of their own, one after the other; starting an engine is reported apart. The
checkpoints are the model with its norms scaled a little, so that every one has other weights.

    python -m benchmarks.evaluation models/smollm2-135m-instruct --checkpoints 3 -n 160
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPEED = re.compile(r"(\d+) tokens/s while sampling; judging held it up for ([\d.]+) s \((\d+)%\)")
STEPS = 1e-3  # change of the norms from checkpoint to checkpoint


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--problems", type=int, default=378)
    parser.add_argument("--peer-problems", type=int, default=None, help="fewer, to save time")
    parser.add_argument("-n", type=int, default=160)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt", choices=["base", "chat"], default="chat")
    parser.add_argument("--gpu-share", type=float, default=0.8)
    parser.add_argument("--peer", type=Path, help="(internal) only the peer, on this checkpoint")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.peer:
        print("RESULT " + json.dumps(peer(options)))
        return
    with tempfile.TemporaryDirectory() as name:
        folders = checkpoints(options, Path(name))
        ours = evaluated(options, Path(name))
        command = [sys.executable, "-m", "benchmarks.evaluation", *sys.argv[1:]]
        text = logged([*command, "--peer", str(folders[0])])
    theirs = json.loads(re.findall(r"^RESULT (.*)$", text, re.M)[-1])
    facts = {
        "options": {key: str(value) for key, value in vars(options).items()},
        "rlfe": ours,
        "vllm": theirs,
        "ratio": round(ours["tokens_per_second"] / theirs["tokens_per_second"], 3),
    }
    print(json.dumps(facts, indent=1))
    if options.out:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


def checkpoints(options: argparse.Namespace, scratch: Path) -> list[Path]:
    """Folders of one series, global_step_1 to global_step_N."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    norm = next(p for name, p in reversed(list(model.named_parameters())) if p.dim() == 1)
    folders = []
    for step in range(1, options.checkpoints + 1):
        folder = scratch / "runs" / "bench_mbpp_nobuf_lr1e6" / f"global_step_{step}"
        with torch.no_grad():
            norm.mul_(1 + 8 * STEPS)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    return folders


def evaluated(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """What `rlfe eval` says of its own work, and the wall time of the whole command."""
    runs = scratch / "runs"
    words = ["--ckpt-glob", str(runs / "*" / "global_step_*"), "--runs-dir", str(runs)]
    words += ["--task", "mbpp_plus", "--limit", str(options.problems), "-n", str(options.n)]
    words += ["--max-tokens", str(options.max_tokens), "--prompt", options.prompt]
    words += ["--engine", "vllm", "--set", f"engine.gpu_share={options.gpu_share}"]
    begin = time.monotonic()
    text = logged([sys.executable, "-m", "rlfe", "eval", *words])
    wall = time.monotonic() - begin
    speed, held, share = SPEED.findall(text)[-1]
    return {
        "tokens_per_second": int(speed),
        "judging_held_up_seconds": float(held),
        "judging_held_up_percent": int(share),
        "wall_seconds": round(wall, 1),
        "said": [line for line in text.splitlines() if "sampl" in line and "step " not in line][
            -3:
        ],
    }


def logged(command: list[str]) -> str:
    """Both streams of a command, which also go to stderr; SystemExit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    print(text[-6000:], file=sys.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... failed with {done.returncode}")
    return text


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """`LLM.generate` on the engine that rlfe would start; seconds of a change of weights."""
    from rlfe.engines.vllm import VllmSampler
    from rlfe.engines.vllm_requests import sampling_params
    from rlfe.eval.settings import NEUTRAL
    from rlfe.tasks import get
    from rlfe.types import Sampling

    sampler = VllmSampler(options.peer, dtype="bfloat16", gpu_share=options.gpu_share)
    begin = time.perf_counter()
    sampler.load(options.peer)
    started = time.perf_counter() - begin
    task, prompts, values = get("mbpp_plus"), [], []
    for index, problem in enumerate(
        task.problems("test")[: options.peer_problems or options.problems]
    ):
        prompt = task.prompt(problem, options.prompt, ())
        sampling = Sampling(
            n=options.n,
            temperature=0.6,
            top_p=0.95,
            min_p=NEUTRAL["min_p"],
            max_tokens=options.max_tokens,
            seed=1000 * index,
            stop=prompt.stop,
            logprobs=False,
        )
        prompts.append({"prompt_token_ids": list(sampler.tokenizer.encode(prompt))})
        values.append(sampling_params(sampling, sampler.tokenizer, own_seed=True))
    begin = time.perf_counter()
    outputs = sampler._llm.generate(prompts, values, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    return {
        "tokens_per_second": round(tokens / seconds),
        "seconds": round(seconds, 1),
        "tokens": tokens,
        "start_seconds": round(started, 1),
        "switch_seconds": switched(sampler, options.peer),
    }


def switched(sampler: Any, folder: Path) -> float:
    """Median seconds of loading a checkpoint in place, with cache reset and proof."""
    taken = []
    for other in sorted(folder.parent.glob("global_step_*")):
        begin = time.perf_counter()
        sampler.load(other)
        taken.append(time.perf_counter() - begin)
    return round(statistics.median(taken), 2)


if __name__ == "__main__":
    main()
