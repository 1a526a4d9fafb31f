"""GRPO steps of rlfe against TRL's GRPOTrainer with colocated vLLM: rollouts per second.

Same model, prompts, number of rollouts, length limit, dtype (float32 master weights, bfloat16
compute) and share of the GPU for vLLM; each side runs in a process of its own, one after the other,
or with --beside at the same time, each on a GPU of its own. Starting (weights, engine, graphs) is
reported apart; the first step is not counted, since both sides warm up in it. Needs a CUDA device,
vllm and trl==1.16.

    python -m benchmarks.training models/smollm2-135m-instruct --steps 4
    python -m benchmarks.training models/smollm2-135m-instruct --shape qwen3-1.7b \\
        --max-tokens 1024 --checkpointing --micro-batch 16 --steps 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SHAPES = {
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
}
WARM_UP = 1  # steps that are not counted
ROOM = 1024  # tokens for the longest prompt
WATCH_SECONDS = 0.2
PASSED = ("prompts", "group", "steps", "micro_batch", "max_tokens", "checkpointing", "gpu_share")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model folder; with --shape only its tokenizer is used")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--micro-batch", type=int, default=64, help="rows of TRL's micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--gpu-share", type=float, default=0.3)
    parser.add_argument("--set", action="append", default=[], help="further settings of rlfe")
    parser.add_argument("--side", choices=["rlfe", "trl"], help="one of the two only")
    parser.add_argument("--beside", action="store_true", help="both at once: GPU 0 and GPU 1")
    parser.add_argument("--gpus", type=int, default=1, help="of rlfe alone: ranks")
    parser.add_argument("--keep", type=Path, help="folder for logs and metrics of both sides")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    sides = [options.side] if options.side else ["rlfe", "trl"]
    with tempfile.TemporaryDirectory() as name:
        scratch = options.keep or Path(name)
        scratch.mkdir(parents=True, exist_ok=True)
        model = shaped(options, Path(name)) if options.shape else Path(options.model)
        with ThreadPoolExecutor(len(sides) if options.beside else 1) as pool:
            works = {
                side: pool.submit(SIDES[side], options, model.resolve(), scratch.resolve(), gpu)
                for gpu, side in enumerate(sides)
            }
            found = {side: work.result() for side, work in works.items()}
    facts = {"options": {k: str(v) for k, v in vars(options).items()}, **found}
    if len(found) == len(SIDES) and all("rollouts_per_second" in f for f in found.values()):
        for key in ("rollouts_per_second", "tokens_per_second", "peak_gib"):
            facts[f"ratio_{key}"] = round(found["rlfe"][key] / found["trl"][key], 3)
    print(json.dumps(facts, indent=1))
    if options.out:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


def shaped(options: argparse.Namespace, folder: Path) -> Path:
    """A model folder with random bfloat16 weights of a real shape and the given tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    target = folder / options.shape
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[options.shape], **ends))
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


class Memory(threading.Thread):
    """The most memory in use on a GPU, as nvidia-smi tells it: whatever process holds it.

    Of the GPUs named as in CUDA_VISIBLE_DEVICES; of several the fullest.
    """

    def __init__(self, gpus: str | None) -> None:
        super().__init__(daemon=True)
        self.peak, self._over, self._gpus = 0, threading.Event(), gpus

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        command += ["-i", self._gpus] if self._gpus else []
        while not self._over.wait(WATCH_SECONDS):
            try:
                text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return  # no such GPU: the peak stays 0
            self.peak = max(self.peak, *map(int, text.split()))

    def gib(self) -> float:
        self._over.set()
        self.join()
        return round(self.peak / 1024, 1)


def run_logged(command: list[str], log: Path, gpus: str | None) -> tuple[int, float]:
    """Exit status and peak GiB of a command whose output goes to `log`; `gpus`: all it sees."""
    memory, environment = Memory(gpus), dict(os.environ)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    memory.start()
    with log.open("w") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ).returncode
    return status, memory.gib()


def chosen_gpus(options: argparse.Namespace, gpu: int) -> str | None:
    return str(gpu) if options.beside else os.environ.get("CUDA_VISIBLE_DEVICES")


def rlfe_side(options: argparse.Namespace, model: Path, scratch: Path, gpu: int) -> dict[str, Any]:
    settings = {
        "model.path": model,
        "model.max_len": options.max_tokens + ROOM,
        "naming.model": "bench",
        "task.name": "bench",
        "task.module": Path(__file__).with_name("training_task.py"),
        "prompt.style": "base",
        "train.steps": options.steps,
        "train.prompts_per_step": options.prompts,
        "train.group_size": options.group,
        "train.max_tokens": options.max_tokens,
        "optim.lr": 1e-6,
        "save.every": 10 * options.steps,
        "engine.sampler": "vllm",
        "engine.gpu_share": options.gpu_share,
    }
    if options.checkpointing:
        settings["compute.gradient_checkpointing"] = "true"
    chosen = [f"{name}={value}" for name, value in settings.items()] + options.set
    runs = scratch / "runs"
    command = [sys.executable, "-m", "rlfe", "train", "--runs-dir", str(runs), "--overwrite"]
    command += ["--gpus", str(options.gpus)] if options.gpus > 1 else []
    for setting in chosen:
        command += ["--set", setting]
    begin = time.monotonic()
    status, peak = run_logged(command, scratch / "rlfe.log", chosen_gpus(options, gpu))
    wall = time.monotonic() - begin
    lines = [json.loads(line) for path in runs.glob("*/metrics.jsonl") for line in path.open()]
    if status or len(lines) <= WARM_UP:
        return failed(status, scratch / "rlfe.log")
    phases = [line["seconds"] for line in lines]
    steps = [sum(phase.values()) for phase in phases]
    return {
        **rates(steps, [line["tokens/sampled"] for line in lines], options),
        "peak_gib": peak,
        "wall_seconds": round(wall, 1),
        "phases": {name: [round(p.get(name, 0.0), 2) for p in phases] for name in phases[-1]},
        "mismatch_mean": [line.get("mismatch/abs_mean") for line in lines],
        "speed": [
            {k: v for k, v in line.items() if k.startswith(("speed", "memory", "update/"))}
            for line in lines
        ],
    }


TRL = """
import json, sys, time, uuid
from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from benchmarks.training_task import rewarded, texts

Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex)  # nothing is cached here
o = json.loads(sys.argv[1])
tokens, marks = [], []

def reward(prompts, completions, completion_ids, **_):
    tokens.append(sum(map(len, completion_ids)))
    return [float(rewarded(text)) for text in completions]

class Marks(TrainerCallback):
    def on_step_begin(self, *_, **__):
        marks.append(["begin", time.monotonic()])
    def on_step_end(self, *_, **__):
        marks.append(["end", time.monotonic()])

rows = o["prompts"] * o["group"]
config = GRPOConfig(
    output_dir=o["scratch"] + "/trl", max_steps=o["steps"], logging_steps=1, save_strategy="no",
    report_to="none", disable_tqdm=True, seed=0, learning_rate=1e-6, lr_scheduler_type="constant",
    per_device_train_batch_size=o["micro_batch"],
    gradient_accumulation_steps=rows // o["micro_batch"], num_generations=o["group"],
    max_completion_length=o["max_tokens"], temperature=1.0, beta=0.0, bf16=o["cuda"],
    gradient_checkpointing=o["checkpointing"], model_init_kwargs={"dtype": "float32"},
    use_vllm=o["cuda"], vllm_mode="colocate", vllm_gpu_memory_utilization=o["gpu_share"],
    vllm_max_model_length=o["max_tokens"] + o["room"], use_cpu=not o["cuda"],
)
data = Dataset.from_list([{"prompt": text} for text in texts()])
trainer = GRPOTrainer(model=o["model"], reward_funcs=reward, args=config, train_dataset=data,
                      callbacks=[Marks()])
trainer.train()
begin = [t for kind, t in marks if kind == "begin"][0]
ends = [t for kind, t in marks if kind == "end"]
history = [row for row in trainer.state.log_history if "loss" in row]
print("RESULT " + json.dumps({
    "steps": [b - a for a, b in zip([begin, *ends], ends)], "tokens": tokens,
    "mismatch_mean": [r.get("sampling/sampling_logp_difference/mean") for r in history],
}))
"""


def trl_side(options: argparse.Namespace, model: Path, scratch: Path, gpu: int) -> dict[str, Any]:
    import torch

    facts = {
        "model": str(model),
        "scratch": str(scratch),
        "cuda": torch.cuda.is_available(),
        "room": ROOM,
        **{name: getattr(options, name) for name in PASSED},
    }
    command = [sys.executable, "-c", TRL, json.dumps(facts)]
    begin = time.monotonic()
    status, peak = run_logged(command, scratch / "trl.log", chosen_gpus(options, gpu))
    wall = time.monotonic() - begin
    text = (scratch / "trl.log").read_text()
    results = [line[7:] for line in text.splitlines() if line.startswith("RESULT ")]
    if status or not results:
        return failed(status, scratch / "trl.log")
    found = json.loads(results[-1])
    return {
        **rates(found["steps"], found["tokens"], options),
        "peak_gib": peak,
        "wall_seconds": round(wall, 1),
        "mismatch_mean": found["mismatch_mean"],
    }


def failed(status: int, log: Path) -> dict[str, Any]:
    return {"failed": status, "log": log.read_text()[-3000:]}


def rates(steps: list[float], tokens: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps after the warm-up; with one step alone, that one."""
    counted = slice(WARM_UP, None) if len(steps) > WARM_UP else slice(None)
    seconds = statistics.median(steps[counted])
    sampled = statistics.median(tokens[counted])
    return {
        "step_seconds": [round(value, 2) for value in steps],
        "tokens": tokens,
        "rollouts_per_second": round(options.prompts * options.group / seconds, 1),
        "tokens_per_second": round(sampled / seconds),
    }


SIDES = {"rlfe": rlfe_side, "trl": trl_side}

if __name__ == "__main__":
    main()
