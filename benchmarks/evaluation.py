"""`rlfe eval` on several checkpoints against vLLM's own offline generation of the same samples.

rlfe loads, samples, stores and judges all checkpoints in one call; the peer is `vllm.LLM.generate`
on an engine with the same arguments and the same requests (prompts, sampling values, seeds, blocks)
for the first checkpoint, warmed up, nothing stored, nothing judged. Both run in a process of their
own, one after the other; starting an engine is reported apart. The checkpoints are the model with
its last norm scaled a little, so that every one has other weights. What rlfe did is printed, and
written to `--out`, before the peer starts.

    python -m benchmarks.evaluation models/smollm2-135m-instruct --checkpoints 3 -n 160
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlfe.eval.jobs import Job
    from rlfe.types import Request

SCALE = 8e-3  # change of the last norm from checkpoint to checkpoint: one bf16 step at least
CELL = "bench_mbpp_nobuf_lr1e6"
WARM_REQUESTS, WARM_TOKENS = 64, 8  # kernels that are compiled at their first use
RESULT = "RESULT "  # how the peer's line begins; libraries may print others


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--problems", type=int, default=378, help="the first N problems")
    parser.add_argument("--peer-problems", type=int, help="fewer, to save time")
    parser.add_argument("-n", type=int, default=160, help="samples per problem")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt", choices=["base", "chat"], default="chat")
    parser.add_argument("--gpu-share", type=float, default=0.8)
    parser.add_argument("--workers", type=int, help="judge workers; default: the cores")
    parser.add_argument("--rounds", type=int, default=1, help="rlfe and peer in turn, so often")
    parser.add_argument("--peer", type=Path, help="(internal) only the peer, on this checkpoint")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    options = parsed()
    if options.peer:
        print(RESULT + json.dumps(peer(options)))
        return
    facts: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}}
    facts["rounds"] = []
    with tempfile.TemporaryDirectory() as name:
        folders = checkpoints(options, Path(name))
        for _ in range(options.rounds):
            one = {"rlfe": evaluated(options, folders[0].parent.parent)}
            facts["rounds"].append(one)
            told(options, facts)
            one["vllm"] = of_peer(options, folders[0])
            told(options, facts)
    if any("failed" in one["vllm"] for one in facts["rounds"]):
        raise SystemExit("the peer failed: its log stands above")


def told(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Print what is known so far, and write it."""
    facts |= compared(facts["rounds"])
    text = json.dumps(facts, indent=1)
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n")


def compared(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the rounds of rlfe's tokens per second as shares of the peer's."""
    whole = [one for one in rounds if "tokens_per_second" in one.get("vllm", {})]
    names = ("tokens_per_second", "tokens_per_second_without_hold_up", "tokens_per_second_of_work")
    return {
        f"ratio_{name.removeprefix('tokens_per_second').strip('_') or 'while_sampling'}": round(
            statistics.median(o["rlfe"][name] / o["vllm"]["tokens_per_second"] for o in whole), 3
        )
        for name in names
        if whole
    }


def checkpoints(options: argparse.Namespace, scratch: Path) -> list[Path]:
    """Folders of one series, global_step_1 to global_step_N."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    norm = next(p for name, p in reversed(list(model.named_parameters())) if p.dim() == 1)
    folders = []
    for step in range(1, options.checkpoints + 1):
        folder = scratch / "runs" / CELL / f"global_step_{step}"
        with torch.no_grad():
            norm.mul_(1 + SCALE)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    return folders


# rlfe


def evaluated(options: argparse.Namespace, runs: Path) -> dict[str, Any]:
    """What `rlfe eval` says of its own work, and the wall time of the whole command."""
    words = ["--ckpt-glob", str(runs / "*" / "global_step_*"), "--runs-dir", str(runs)]
    words += ["--task", "mbpp_plus", "--limit", str(options.problems), "-n", str(options.n)]
    words += ["--max-tokens", str(options.max_tokens), "--prompt", options.prompt]
    words += ["--engine", "vllm", *(word for one in sets(options) for word in ("--set", one))]
    words += ["--workers", str(options.workers)] if options.workers else []
    begin = time.monotonic()
    # --fresh: no samples and no verdicts of an earlier round count
    text = answered([sys.executable, "-m", "rlfe", "eval", *words, "--fresh", "--json"])
    return read_report(json.loads(text)["run"], time.monotonic() - begin)


def sets(options: argparse.Namespace) -> list[str]:
    return [f"engine.gpu_share={options.gpu_share}"]


def read_report(run: Mapping[str, Any], wall: float) -> dict[str, Any]:
    """The `run` part of the JSON document of `rlfe eval` in the terms of this comparison.

    `of_work` counts everything from the first request to the last table: also changes of
    weights, and scores.
    """
    tokens, sampling, held = run["tokens"], run["sample_seconds"], run["wait_seconds"]
    first, *switches = run["load_seconds"]
    return {
        "tokens": tokens,
        "samples": run["sampled"],
        "judged": run["judged"],
        "tokens_per_second": round(tokens / sampling),
        "tokens_per_second_without_hold_up": round(tokens / (sampling - held)),
        "tokens_per_second_of_work": round(tokens / run["work_seconds"]),
        "sampling_seconds": round(sampling, 1),
        "judging_held_up_seconds": round(held, 2),
        "judging_held_up_percent": round(100 * held / sampling, 1),
        "start_seconds": round(first, 1),
        "switch_seconds": switches,
        "switch_seconds_median": statistics.median(switches) if switches else None,
        "switch_seconds_max": max(switches, default=None),
        "wall_seconds": round(wall, 1),
    }


def answered(command: list[str]) -> str:
    """The stdout of a command; its stderr goes on to ours. SystemExit if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(command[:5])} ... failed with {done.returncode}")
    return done.stdout


# the peer


def of_peer(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the peer's process measured, or that it failed."""
    command = [sys.executable, "-m", "benchmarks.evaluation", *sys.argv[1:], "--peer", str(folder)]
    begin = time.monotonic()
    try:
        text = answered(command)
    except SystemExit as error:
        return {"failed": str(error)}
    return read_peer(text) | {"wall_seconds": round(time.monotonic() - begin, 1)}


def read_peer(text: str) -> dict[str, Any]:
    """The last result among the lines of the peer's process."""
    lines = [line for line in text.splitlines() if line.startswith(RESULT)]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    return found


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """`LLM.generate` on the engine that rlfe would start."""
    from rlfe.engines.vllm_requests import sampling_params
    from rlfe.eval.samplers import make_engine

    job = job_of(options, options.peer)
    sampler: Any = make_engine(job)
    begin = time.perf_counter()
    sampler.load(job.target.path)
    started = time.perf_counter() - begin
    requests = requests_of(job, sampler.tokenizer)
    own_seed = sampler.seeds == "request"
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    values = [sampling_params(r.sampling, sampler.tokenizer, own_seed=own_seed) for r in requests]
    warmed = warm(sampler._llm, prompts, values)
    begin = time.perf_counter()
    outputs = sampler._llm.generate(prompts, values, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    return {
        "tokens_per_second": round(tokens / seconds),
        "seconds": round(seconds, 1),
        "tokens": tokens,
        "samples": sum(len(output.outputs) for output in outputs),
        "start_seconds": round(started, 1),
        "warm_up_seconds": round(warmed, 2),  # rlfe's first checkpoint bears this
    }


def warm(llm: Any, prompts: Sequence[Any], values: Sequence[Any]) -> float:
    """Seconds of some short requests; the prefix cache is empty afterwards."""
    begin = time.perf_counter()
    short = [copy(value) for value in values[:WARM_REQUESTS]]
    for value in short:
        value.max_tokens = WARM_TOKENS
    llm.generate(list(prompts[:WARM_REQUESTS]), short, use_tqdm=False)
    llm.reset_prefix_cache()
    return time.perf_counter() - begin


def job_of(options: argparse.Namespace, folder: Path) -> Job:
    """The job that `rlfe eval` makes of a checkpoint under these options."""
    from rlfe import config
    from rlfe.checkpoints import find
    from rlfe.eval import plan
    from rlfe.tasks import get

    recipe = config.load((), sets(options), {}, {"engine.sampler": "vllm"}).recipe
    target = plan.checkpoint_target(find([str(folder)]).found[0])
    subject = plan.Subject(target=target, recipe=recipe, fallback=recipe, has_run=False)
    flags = {"n": options.n, "max_tokens": options.max_tokens, "prompt": options.prompt}
    flags |= {"limit": options.peer_problems or options.problems}
    asked = plan.Asked(tasks=("mbpp_plus",), flags=flags)
    (job,) = plan.plan_jobs([subject], asked, lambda name, _: get(name))
    return job


def requests_of(job: Job, tokenizer: Any) -> list[Request]:
    """The requests that `rlfe eval` sends for a job of which nothing is there."""
    from rlfe.eval import runner
    from rlfe.eval.judging import Report
    from rlfe.eval.store import Store

    missing = job.missing(Store(job.store_path, job.rule))
    return runner.requests_of(job, tokenizer, missing, Report())[0]


if __name__ == "__main__":
    main()
