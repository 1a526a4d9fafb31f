"""rlfe's sampling against vLLM's own offline generation: tokens per second, same engine settings.

The peer is `vllm.LLM.generate` on the engine that rlfe started, with the same prompts, sampling
values and log-probabilities, in turns with rlfe in one process. `--defaults` adds an engine that
only gets vLLM's own defaults (compiler, CUDA graphs, number of sequences) beside model, dtype,
lengths and memory.

    python benchmarks/vllm_sampling.py MODEL_FOLDER --problems 64 -n 8 --max-tokens 256
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def requests_of(tokenizer: Any, options: argparse.Namespace) -> list:
    """MBPP+ prompts in base style, `blocks` requests of n samples each."""
    from rlfe.tasks import get
    from rlfe.types import Request, Sampling

    task = get("mbpp_plus")
    made = []
    for index, problem in enumerate(task.problems("test")[: options.problems]):
        prompt = task.prompt(problem, "base", ())
        ids = tokenizer.encode(prompt)
        for block in range(options.blocks):
            sampling = Sampling(
                n=options.n,
                temperature=options.temperature,
                top_p=options.top_p,
                max_tokens=options.max_tokens,
                seed=100_000 * index + 1000 * block,
                stop=prompt.stop,
            )
            made.append(Request(id=f"{index}/{block}", prompt_ids=ids, sampling=sampling))
    return made


def ours(sampler: Any, requests: list) -> int:
    """Tokens that rlfe's sampler yields; the texts are looked at as a judge would."""
    total = 0
    for _, parts in sampler.generate(requests):
        total += sum(len(part.token_ids) for part in parts if part.text is not None)
    return total


def peer(llm: Any, tokenizer: Any, requests: list, *, own_seed: bool) -> int:
    """Tokens of `LLM.generate` for the same work."""
    from rlfe.engines.vllm_requests import sampling_params

    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    values = [sampling_params(r.sampling, tokenizer, own_seed=own_seed) for r in requests]
    outputs = llm.generate(prompts, values, use_tqdm=False)
    return sum(len(part.token_ids) for output in outputs for part in output.outputs)


def rates(work: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each, in turns; a first round warms up and is not counted."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            begin = time.perf_counter()
            tokens = run()
            rate = tokens / (time.perf_counter() - begin)
            print(f"round {number}: {name:12} {tokens} tokens, {rate:,.0f} tokens/s", flush=True)
            if number:
                found[name].append(rate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu-share", type=float, default=0.4)
    parser.add_argument("--sequences", type=int, default=None)
    parser.add_argument("--compilation", default="graphs", choices=["eager", "graphs", "full"])
    parser.add_argument("--same-process", action="store_true")
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    facts = measured(options)
    print(json.dumps(facts, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(facts, indent=1) + "\n")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    from rlfe.engines.vllm import VllmSampler

    sampler = VllmSampler(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_len=options.max_len,
        gpu_share=options.gpu_share,
        sequences=options.sequences,
        compilation=options.compilation,
        same_process=options.same_process,
    )
    begin = time.perf_counter()
    sampler.load(Path(options.model))
    start_seconds = time.perf_counter() - begin
    requests, own_seed = requests_of(sampler.tokenizer, options), sampler.seeds == "request"
    llm = sampler._llm  # the peer runs on the very same engine
    found = rates(
        {
            "rlfe": lambda: ours(sampler, requests),
            "vllm": lambda: peer(llm, sampler.tokenizer, requests, own_seed=own_seed),
        },
        options.rounds,
    )
    tokenizer = sampler.tokenizer
    sampler.close()
    if options.defaults:
        found |= rates({"defaults": with_defaults(options, tokenizer, requests)}, options.rounds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "options": vars(options),
        "start_seconds": round(start_seconds, 1),
        "tokens_per_second": {name: round(value) for name, value in medians.items()},
        "ratio": {name: round(medians["rlfe"] / value, 3) for name, value in medians.items()},
    }


def with_defaults(options: argparse.Namespace, tokenizer: Any, requests: list) -> Any:
    """The same work on an engine that vLLM's defaults describe."""
    from vllm import LLM

    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_len,
        gpu_memory_utilization=options.gpu_share,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    return lambda: peer(llm, tokenizer, requests, own_seed=True)


if __name__ == "__main__":
    main()
