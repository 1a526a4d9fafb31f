"""One look at the vLLM engine on a GPU: start, reload, hand-over, mismatch, speed, sleep, LoRA.

Needs a CUDA device, vllm, and a model folder; no network. Each phase that fails is recorded and
the next one runs, so that one call tells as much as it can. Prints a JSON summary and writes it.

    python scripts/gpu_smoke.py MODEL_FOLDER --out gpu_smoke.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Facts = dict[str, Any]


def requests_of(tokenizer: Any, count: int, n: int, max_tokens: int, temperature: float) -> list:
    """Base prompts of the first MBPP training problems, one request each."""
    from rlfe.tasks import get
    from rlfe.types import Request, Sampling

    task = get("mbpp")
    made = []
    for index, problem in enumerate(task.problems("train")[:count]):
        prompt = task.prompt(problem, "base", ())
        sampling = Sampling(
            n=n, temperature=temperature, max_tokens=max_tokens, seed=1000 * index, stop=prompt.stop
        )
        made.append(Request(id=problem.id, prompt_ids=tokenizer.encode(prompt), sampling=sampling))
    return made


def batch_of(pairs: list[tuple[tuple[int, ...], Any]]) -> Any:
    """A batch of (prompt tokens, completion) rows; advantages are not used."""
    from rlfe.types import Batch

    rows = [(*prompt, *done.token_ids) for prompt, done in pairs]
    ids_BL = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask_BL, logp_BL = np.zeros(ids_BL.shape, bool), np.zeros(ids_BL.shape, np.float32)
    for index, (row, (prompt, done)) in enumerate(zip(rows, pairs, strict=True)):
        ids_BL[index, : len(row)] = row
        mask_BL[index, len(prompt) : len(row)] = True
        logp_BL[index, len(prompt) : len(row)] = done.logprobs
    nothing_B = np.zeros(len(rows))
    whole_B = np.zeros(len(rows), np.int64)
    return Batch(
        ids_BL=ids_BL,
        mask_BL=mask_BL,
        behavior_logp_BL=logp_BL,
        advantage_B=nothing_B,
        weight_B=nothing_B,
        successes_B=whole_B,
        group_B=whole_B,
        source_B=whole_B.astype(np.int8),
    )


def sampled(sampler: Any, requests: list) -> tuple[dict, Facts]:
    """All completions, and how fast they came."""
    begin, first, done = time.monotonic(), None, {}
    for name, parts in sampler.generate(requests):
        first = first or time.monotonic() - begin
        done[name] = parts
    seconds = time.monotonic() - begin
    tokens = sum(len(part.token_ids) for parts in done.values() for part in parts)
    facts = {
        "seconds": round(seconds, 3),
        "first_request_seconds": round(first or 0.0, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds),
        "finish": _counts(part.finish.value for parts in done.values() for part in parts),
    }
    return done, facts


def _counts(values: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found


def mismatch(learner: Any, requests: list, done: dict, rows: int) -> Facts:
    """Trainer's minus engine's log-probability over the tokens of the first rows."""
    pairs = [(r.prompt_ids, part) for r in requests for part in done[r.id]][:rows]
    batch = batch_of(pairs)
    delta = np.abs(learner.logprobs(batch) - batch.behavior_logp_BL)[batch.mask_BL]
    return {
        "rows": len(pairs),
        "tokens": len(delta),
        "mean": float(delta.mean()),
        "p95": float(np.quantile(delta, 0.95)),
        "max": float(delta.max()),
    }


def noisy(learner: Any, size: float, *, lora: bool = False) -> None:
    """Change the learner's weights, as some updates would."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if lora == (".lora_" in name):
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.add_(noise * (size if lora else size * parameter.std()))


class Smoke:
    """The phases, in order; each answers with facts."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.model, self.options, self.scratch = Path(options.model), options, scratch
        self.sampler: Any = None
        self.learner: Any = None

    def _sampler(self, **other: Any) -> Any:
        from rlfe.engines.vllm import VllmSampler

        values = {"dtype": "bfloat16", "max_len": 1024, "gpu_share": 0.4, "sequences": 512}
        return VllmSampler(self.model, **(values | other))

    def start(self) -> Facts:
        """An engine in a process of its own, and a warm-up."""
        self.sampler = self._sampler()
        begin = time.monotonic()
        self.sampler.load(self.model)
        seconds = time.monotonic() - begin
        requests = requests_of(self.sampler.tokenizer, 8, 2, 16, 1.0)
        sampled(self.sampler, requests)
        return {"seconds": round(seconds, 2), "seeds": self.sampler.seeds}

    def speed(self) -> Facts:
        """64 x 8 rollouts of up to 256 tokens, twice, at two settings."""
        facts: Facts = {}
        for temperature in (1.0, 0.6):
            requests = requests_of(self.sampler.tokenizer, 64, 8, 256, temperature)
            runs = [sampled(self.sampler, requests)[1] for _ in range(2)]
            facts[f"temperature {temperature}"] = runs
        return facts

    def learn(self) -> Facts:
        """A float32 learner beside the sampler; a changed version of it as a folder."""
        from rlfe.engines.learner import TransformersLearner

        self.learner = TransformersLearner(self.model, dtype="bfloat16", device="cuda")
        noisy(self.learner, 0.02)
        folder = self.scratch / "global_step_1"
        folder.mkdir()
        begin = time.monotonic()
        self.learner.export(folder)
        return {"export_seconds": round(time.monotonic() - begin, 2)}

    def reload(self) -> Facts:
        """There and back in place; fingerprints differ; the prefix cache does not survive."""
        requests = requests_of(self.sampler.tokenizer, 8, 1, 32, 0.0)
        first = sampled(self.sampler, requests)[0]
        seconds, prints = [], []
        for folder in (self.scratch / "global_step_1", self.model, self.scratch / "global_step_1"):
            begin = time.monotonic()
            prints.append(self.sampler.load(folder))
            seconds.append(round(time.monotonic() - begin, 3))
        second = sampled(self.sampler, requests)[0]
        changed = sum(first[r.id][0].token_ids != second[r.id][0].token_ids for r in requests)
        return {
            "seconds": seconds,
            "fingerprints_differ": prints[0] != prints[1] and prints[0] == prints[2],
            "greedy_replies_changed": f"{changed}/{len(requests)}",
            "engine_starts": self.sampler.engine_starts,
        }

    def handover(self) -> Facts:
        """A snapshot from the learner's memory, and the mismatch after it."""
        self.sampler.load(self.model)
        seconds = []
        for version in (1, 2):
            begin = time.monotonic()
            snapshot = self.learner.snapshot(version)
            taken = time.monotonic() - begin
            same = self.sampler.load(snapshot) == snapshot.fingerprint
            seconds.append([round(taken, 3), round(time.monotonic() - begin - taken, 3)])
        facts: Facts = {"snapshot_and_load_seconds": seconds, "fingerprint_agrees": same}
        for on, temperature in ((False, 1.0), (True, 1.0), (True, 0.6)):
            self.sampler.float_head(on)
            requests = requests_of(self.sampler.tokenizer, 64, 8, 256, temperature)
            done, speed = sampled(self.sampler, requests)
            self.learner._temperature = temperature  # the learner of a run has one
            facts[f"float head {on}, temperature {temperature}"] = {
                "tokens_per_second": speed["tokens_per_second"],
                "mismatch": mismatch(self.learner, requests, done, 128),
            }
        return facts

    def verify(self) -> Facts:
        """Greedy tokens after a reload against a fresh engine's."""
        self.sampler.load(self.scratch / "global_step_1")
        requests = requests_of(self.sampler.tokenizer, 32, 1, 64, 0.0)
        begin = time.monotonic()
        differs = self.sampler.verify_reload(requests)
        seconds = round(time.monotonic() - begin, 1)
        return {"differs": len(differs), "of": len(requests), "seconds": seconds}

    def sleep(self) -> Facts:
        """In this process: tensors handed over as they are; memory given back between calls."""
        self.sampler.close()
        self.sampler = self._sampler(same_process=True, sleep=True)
        begin = time.monotonic()
        self.sampler.load(self.model)
        facts: Facts = {"start_seconds": round(time.monotonic() - begin, 2)}
        awake = self.sampler.free_bytes()
        snapshot = self.learner.snapshot(3)
        begin = time.monotonic()
        facts["fingerprint_agrees"] = self.sampler.load(snapshot) == snapshot.fingerprint
        facts["load_seconds"] = round(time.monotonic() - begin, 3)
        requests = requests_of(self.sampler.tokenizer, 64, 8, 256, 1.0)
        facts["first"] = sampled(self.sampler, requests)[1]
        asleep = self.sampler.free_bytes()
        facts["free_gib"] = {"awake": awake / 2**30, "asleep": asleep / 2**30}
        begin = time.monotonic()
        facts["fingerprint_agrees_again"] = self.sampler.load(snapshot) == snapshot.fingerprint
        facts["wake_and_load_seconds"] = round(time.monotonic() - begin, 3)
        done, facts["second"] = sampled(self.sampler, requests)
        self.learner._temperature = 1.0
        facts["mismatch"] = mismatch(self.learner, requests, done, 64)
        return facts

    def lora(self) -> Facts:
        """An adapter by request."""
        from rlfe.engines.learner import TransformersLearner
        from rlfe.engines.weights import Lora

        self.sampler.close()
        lora = Lora(rank=16, alpha=32, targets="all-linear", seed=0)
        learner = TransformersLearner(self.model, dtype="bfloat16", device="cuda", lora=lora)
        noisy(learner, 0.02, lora=True)
        self.sampler = self._sampler(lora=lora)
        self.sampler.load(self.model)
        snapshot = learner.snapshot(1)
        begin = time.monotonic()
        same = self.sampler.load(snapshot) == snapshot.fingerprint
        seconds = round(time.monotonic() - begin, 3)
        requests = requests_of(self.sampler.tokenizer, 16, 4, 128, 1.0)
        done, facts = sampled(self.sampler, requests)
        facts |= {"load_seconds": seconds, "fingerprint_agrees": same}
        return facts | {"mismatch": mismatch(learner, requests, done, 64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", default="gpu_smoke.json")
    parser.add_argument("--phases", default="start,speed,learn,reload,handover,verify,sleep,lora")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="rlfe-smoke-"))
    smoke, facts, begin = Smoke(options, scratch), {}, time.monotonic()
    for phase in options.phases.split(","):
        run: Callable[[], Facts] = getattr(smoke, phase)
        try:
            facts[phase] = run()
        except Exception:
            facts[phase] = {"error": traceback.format_exc()[-3000:]}
        facts["total_seconds"] = round(time.monotonic() - begin, 1)
        Path(options.out).write_text(json.dumps(facts, indent=1) + "\n")
    if smoke.sampler is not None:
        smoke.sampler.close()
    shutil.rmtree(scratch)
    facts["versions"] = versions()
    Path(options.out).write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


def versions() -> dict[str, str]:
    import torch
    import transformers
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": gpu,
    }


if __name__ == "__main__":
    main()
