"""A made-up experiment on disk, as `rlfe train` and `rlfe eval` would leave it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlfe.config import dump, load
from rlfe.eval.settings import sample_key
from rlfe.eval.store import Judged, Sample, Store
from rlfe.eval.tables import RATES, parquet_bytes
from rlfe.naming import cell_of, format_cell
from rlfe.records import append_jsonl

MODEL = "madeup"
FACTS = {"engine": {"sampler": "fake"}, "seed": 0}


def make_experiment(
    root: Path,
    *,
    steps: Sequence[int] = (30, 60, 90),
    problems: int = 20,
    n: int = 16,
    lrs: Sequence[float] = (6e-6,),
    seeds: Sequence[int] = (0,),
    samples: bool = True,
    settings: Sequence[str] = (),
) -> list[Path]:
    """Runs with two arms; returns their folders. Replay forgets less, by construction."""
    source = np.random.default_rng(1)
    sizes = {"mbpp_plus": (problems, n), "mbpp_base": (problems, n), "gsm8k": (problems + 5, 8)}
    skill = {task: source.normal(0, 2.5, size) for task, (size, _) in sizes.items()}
    write_evals(
        root / "runs" / "_base" / MODEL / "evals", MODEL, {0: skill}, sizes, source, samples
    )
    made = []
    for lr in lrs:
        for seed in seeds:
            for replay in (False, True):
                sets = [f"model.path=models/{MODEL}", "prompt.style=base", f"optim.lr={lr}"]
                sets += [f"run.seed={seed}", f"train.steps={steps[-1]}"]
                sets += [*settings, *(["replay.strategy=hard_cooldown"] if replay else [])]
                recipe = load([], sets).recipe
                run = root / "runs" / format_cell(cell_of(recipe))
                run.mkdir(parents=True)
                (run / "config.toml").write_text(dump(recipe))
                (run / "provenance.json").write_text(json.dumps({"rlfe": "0", "ended": None}))
                write_metrics(run / "metrics.jsonl", steps[-1], source)
                skills = {s: moved(skill, s / steps[-1], replay, source) for s in steps}
                write_evals(run / "evals", run.name, skills, sizes, source, samples)
                made.append(run)
    return made


def moved(
    skill: dict[str, np.ndarray], share: float, replay: bool, source: np.random.Generator
) -> dict[str, np.ndarray]:
    """Logits after a share of the training: better programs, worse arithmetic."""
    shift = {"mbpp_plus": 0.9, "mbpp_base": 0.9, "gsm8k": -0.3 if replay else -1.0}
    return {
        task: logit_P + share * shift[task] + source.normal(0, 0.4, len(logit_P))
        for task, logit_P in skill.items()
    }


def write_metrics(path: Path, steps: int, source: np.random.Generator) -> None:
    for step in range(1, steps + 1):
        reward = 0.3 + 0.3 * (1 - math.exp(-step / 40)) + source.normal(0, 0.02)
        line = {"step": step, "reward/mean": reward, "kl/k3": 1e-4 * step, "entropy": 0.6}
        line |= {"filter/kept_ratio": 0.7, "clip/wclip_active": 0.1, "clip/wclip_active/1": 0.2}
        append_jsonl(path, line)


def write_evals(
    folder: Path,
    cell: str,
    skills: dict[int, dict[str, np.ndarray]],
    sizes: dict[str, tuple[int, int]],
    source: np.random.Generator,
    samples: bool,
) -> None:
    """The three files of counts, side measures and settings, and samples of the plus task."""
    counts, rates, settings = [], [], {}
    for step, tasks in skills.items():
        for task, logit_P in tasks.items():
            n = sizes[task][1]
            text = f"{sample_key({**FACTS, 'task': task})}-n{n}"
            text = text if task == "gsm8k" else f"{sample_key({**FACTS, 'task': 'mbpp'})}-n{n}"
            correct_P = source.binomial(n, 1 / (1 + np.exp(-logit_P)))
            key = {"cell": cell, "step": str(step), "task": task, "settings": text}
            for i, right in enumerate(correct_P):
                problem = {"problem": f"{task.split('_')[0]}/{i}", "n": str(n)}
                counts.append({**key, **problem, "correct": str(right)})
            values = [str(n * len(correct_P)), *("0.05",) * 6, "80.0"]
            rates.append({**key, **dict(zip(RATES, values, strict=True))})
            asked = task.replace("_base", "_plus")
            settings[text] = {**FACTS, "task": asked, "n": n, "judge": "toy v1"}
            if samples and task == "mbpp_plus":
                write_samples(folder, step, task, correct_P, n)
    columns = ("cell", "step", "task", "settings", "problem", "n", "correct")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores_counts.parquet").write_bytes(parquet_bytes(counts, columns))
    lines = [",".join(("cell", "step", "task", "settings", *RATES))]
    lines += [",".join(row.values()) for row in rates if not row["task"].endswith("_base")]
    (folder / "scores_rates.csv").write_text("\n".join(lines) + "\n")
    (folder / "scores_settings.json").write_text(json.dumps(settings))


def write_samples(folder: Path, step: int, task: str, correct_P: np.ndarray, n: int) -> None:
    path = folder / task / sample_key({**FACTS, "task": task}) / f"step_{step:06d}.jsonl.zst"
    with Store(path, "toy v1").open({"weights": "w"}) as store:
        for i, right in enumerate(correct_P[:8]):
            texts = [Sample(f"def f(): # {j} </script> \ud800", "stop", 5) for j in range(8)]
            store.add_block(f"mbpp/{i}", 0, texts)
            good = min(8, int(right))
            statuses = ["passed"] * good + ["failed"] * (8 - good)
            verdicts = [Judged(str(j), s, "", 0.0, {}) for j, s in enumerate(statuses)]
            store.add_verdicts({(f"mbpp/{i}", 0): verdicts})
