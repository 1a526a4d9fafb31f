"""The same GRPO steps by one process and by several ranks: losses, norms, weights, seconds.

The rollouts are recorded text: MBPP's own solutions (as many tokens as asked, repeated to that
length) with advantages drawn at random, so that every run computes the same steps. One process is
the learner of `rlfe train` on one GPU, several ranks that of `rlfe train --gpus N` under torchrun;
they run one after the other, and then one process with half the token budget: other micro-batches
round otherwise, which is what lower precision costs by itself. What is compared: the loss and
gradient norm of every step, all log-probabilities of the last pass, the weights at the end; and the
update's tokens per second (medians over the steps after the first). Works on a CPU too, with small
sizes.

    python -m benchmarks.ranks models/smollm2-135m-instruct --ranks 2
    python -m benchmarks.ranks models/smollm2-135m-instruct --shape qwen3-1.7b --tokens 1024
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training import SHAPES, WARM_UP, shaped
from rlfe.engines.microbatches import TOKEN_BUDGET

PROMPT_TOKENS = 256  # a longer prompt is left out


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model folder; with --shape only its tokenizer is used")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=512, help="rollouts of a step")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a rollout")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--set", action="append", default=[], help="key=value of the learner")
    parser.add_argument("--member", type=Path, help="(internal) one run; results go to this file")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.member:
        member_of_a_run(options)
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = shaped(options, scratch) if options.shape else Path(options.model)
        one = ran(options, model, scratch, "one")
        several = ran(options, model, scratch, "several", ranks=options.ranks)
        half = [f"tokens={TOKEN_BUDGET[options.device] // 2}"]
        facts = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "one": one,
            "several": several,
            "several_against_one": compared(one, several, scratch),
            "half_budget_against_one": compared(
                one, ran(options, model, scratch, "half", settings=half), scratch
            ),
            "ratio_tokens_per_second": round(
                several["tokens_per_second"] / one["tokens_per_second"], 3
            ),
        }
    print(json.dumps(facts, indent=1))
    if options.out:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


def ran(
    options: argparse.Namespace,
    model: Path,
    scratch: Path,
    name: str,
    *,
    ranks: int = 1,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """One run in processes of its own; its facts, with arrays beside them in `scratch`."""
    start, file = [sys.executable], scratch / f"{name}.json"
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [str(model), "--member", str(file), "--device", options.device]
    for option in ("rows", "tokens", "steps", "lr"):
        words += [f"--{option}", str(getattr(options, option))]
    for setting in (*options.set, *settings):
        words += ["--set", setting]
    subprocess.run([*start, "-m", "benchmarks.ranks", *words], check=True)
    facts: dict[str, Any] = json.loads(file.read_text())
    return facts | {"arrays": f"{name}.npz"}


def compared(first: dict[str, Any], second: dict[str, Any], scratch: Path) -> dict[str, float]:
    """Distances of a run from the first, over all steps and at their end."""
    a, b = (np.load(scratch / each["arrays"]) for each in (first, second))
    moved, moved2 = (each["weights_N"] - each["start_N"] for each in (a, b))
    logp, logp2 = a["logp_BL"], b["logp_BL"]
    return {
        "largest_difference_of_losses": largest(first["losses"], second["losses"]),
        "relative_difference_of_norms": largest(1.0, np.divide(second["norms"], first["norms"])),
        "mean_difference_of_logprobs": float(np.abs(logp - logp2)[logp != 0].mean()),
        "cosine_of_weight_changes": float(
            moved @ moved2 / (np.linalg.norm(moved) * np.linalg.norm(moved2))
        ),
    }


def largest(first: Any, second: Any) -> float:
    return float(np.abs(np.asarray(first) - np.asarray(second)).max())


def member_of_a_run(options: argparse.Namespace) -> None:
    """As one process, or as a rank of several: the steps, and the first rank's record."""
    from rlfe.engines.ranks import Ranks, TorchRanks, end_now, member
    from rlfe.training.losses import LossSettings
    from rlfe.training.objective import StepLoss

    ranks = member(os.environ) or Ranks()
    if isinstance(ranks, TorchRanks):
        ranks.join(options.device, minutes=10, expired=lambda problem: end_now(1))
    learner = made(options, ranks)
    batches = [rows_of_step(options, learner, step) for step in range(options.steps)]
    start = weights_of(learner)
    seen: dict[str, Any] = {"losses": [], "norms": [], "seconds": []}
    for batch in batches:
        begin = time.perf_counter()
        found = learner.forward_backward(
            batch, StepLoss(LossSettings(max_tokens=options.tokens), batch)
        )
        seen["norms"].append(learner.optim_step(options.lr))
        seen["seconds"].append(round(time.perf_counter() - begin, 3))
        seen["losses"].append(found.sums["loss/total"])
    end = weights_of(learner)
    if ranks.first:
        counted = seen["seconds"][WARM_UP:] or seen["seconds"]
        tokens = int(batches[-1].mask_BL.sum())
        seen["tokens_per_second"] = round(tokens / statistics.median(counted))
        np.savez(
            options.member.with_suffix(".npz"), logp_BL=found.logp_BL, start_N=start, weights_N=end
        )
        options.member.write_text(json.dumps(seen))
    if isinstance(ranks, TorchRanks):
        ranks.close()


def made(options: argparse.Namespace, ranks: Any) -> Any:
    """The learner of `rlfe train` with its defaults and the given settings."""
    from rlfe.engines.learner import TransformersLearner
    from rlfe.engines.ranks import TorchRanks

    values: dict[str, Any] = {"dtype": "bfloat16", "device": options.device}
    values |= {name: json.loads(text) for name, text in (s.split("=", 1) for s in options.set)}
    if isinstance(ranks, TorchRanks):
        from rlfe.engines.sharded import ShardedLearner

        return ShardedLearner(options.model, ranks=ranks, **values)
    return TransformersLearner(options.model, **values)


def rows_of_step(options: argparse.Namespace, learner: Any, step: int) -> Any:
    """A batch of recorded rollouts; behaviour log-probabilities are the starting model's own."""
    from dataclasses import replace

    from transformers import AutoTokenizer

    from rlfe.tasks import get
    from rlfe.types import Batch

    task, tokenizer = get("mbpp"), AutoTokenizer.from_pretrained(options.model)
    rng, made = np.random.default_rng(step), []
    problems = task.problems("train")
    while len(made) < options.rows:
        problem = problems[rng.integers(len(problems))]
        prompt = tokenizer(task.prompt(problem, "base", ()).text)["input_ids"]
        answer = tokenizer(problem.answer)["input_ids"]
        if len(prompt) <= PROMPT_TOKENS and answer:
            made.append((prompt, (answer * (options.tokens // len(answer) + 1))[: options.tokens]))
    width = max(len(prompt) + len(answer) for prompt, answer in made)
    ids_BL = np.zeros((len(made), width), np.int64)
    mask_BL = np.zeros(ids_BL.shape, bool)
    for row, (prompt, answer) in enumerate(made):
        ids_BL[row, : len(prompt) + len(answer)] = prompt + answer
        mask_BL[row, len(prompt) : len(prompt) + len(answer)] = True
    batch = Batch(
        ids_BL=ids_BL,
        mask_BL=mask_BL,
        behavior_logp_BL=np.zeros(ids_BL.shape, np.float32),
        advantage_B=rng.normal(0, 1, len(made)),
        weight_B=np.ones(len(made)),
        successes_B=np.full(len(made), 4),
        group_B=np.arange(len(made)) // 8,
        source_B=np.zeros(len(made), np.int8),
    )
    return replace(batch, behavior_logp_BL=learner.logprobs(batch).astype(np.float32))


def weights_of(learner: Any) -> np.ndarray:
    """The float32 weights of the first layer's MLP as one vector."""
    name = next(n for n in learner._trained if n.endswith("mlp.down_proj.weight"))
    held = learner._trained[name].detach()
    whole = held.full_tensor() if hasattr(held, "full_tensor") else held  # of several ranks
    flat: np.ndarray = whole.flatten().cpu().numpy()
    return flat.copy()


if __name__ == "__main__":
    main()
