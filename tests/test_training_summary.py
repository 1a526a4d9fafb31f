"""The speed report: of a step, at the end of a run, and the plan of memory before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlfe.cli import memory_plan
from rlfe.cli.main import run
from rlfe.cli.memory_plan import first_gpu, memory_facts, memory_line, memory_warning
from rlfe.cli.training_summary import summary, summary_lines
from rlfe.records import read_jsonl
from rlfe.training.clock import speeds
from tests.test_memory import QWEN3_1P7B, a_recipe
from tests.training_doubles import a_run

LINES = [
    {
        "seconds": {"sample": 30.0, "train": 10.0, "save": 0.0},
        "speed": {"rollouts": 10.0, "tokens": 1000.0, "mfu": None},
        "memory": {"cuda_bytes": 40_000_000_000},
        "update/padding_share": 0.1,
    },
    {
        "seconds": {"sample": 5.0, "train": 5.0},
        "speed": {"rollouts": 50.0, "tokens": 3000.0, "mfu": 0.42},
        "memory": {"cuda_bytes": 60_000_000_000},
        "update/padding_share": None,
    },
    {"seconds": {"sample": 5.0, "train": 5.0}, "speed": {"rollouts": 48.0, "tokens": 5000.0}},
]


def test_rates_of_a_step() -> None:
    metrics = {
        "tokens/sampled": 6000,
        "update/tokens": 10_000,
        "update/padding_share": 0.2,
        "update/flops": 8e12,
    }
    found = speeds(metrics, {"sample": 6.0, "train": 4.0}, rollouts=512, peak=10e12)
    assert found == {
        "rollouts": 51.2,
        "tokens": 600.0,
        "sampled": 1000.0,
        "trained": 2000.0,
        "tflops": 2.0,
        "mfu": 0.2,
    }
    unknown = speeds({"tokens/sampled": 0}, {}, rollouts=0, peak=None)
    assert set(unknown.values()) == {None}


def test_a_summary_takes_medians_and_peaks() -> None:
    facts = summary(LINES)
    assert facts == {
        "seconds": {"sample": 40.0, "train": 20.0, "save": 0.0},
        "speed": {"rollouts": 48.0, "tokens": 3000.0, "mfu": 0.42},
        "padding_share": 0.1,
        "peak_bytes": {"cuda_bytes": 60_000_000_000},
    }
    assert summary_lines(facts) == [
        "time    sample 40.0 s (67%), train 20.0 s (33%)",
        "speed   48.0 rollouts/s, 3,000 tokens/s sampled in all, MFU 42.0%, padding 10.0%",
        "memory  60.0 GB allocated by torch",
    ]
    assert summary_lines(summary([])) == []


def test_a_run_writes_what_its_update_computed(
    tiny_model: Path, tmp_path: Path, one_thread
) -> None:
    a_run(tiny_model, tmp_path / "run", {"train.steps": 1})
    (line,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert line["update/passes"] >= 1
    assert line["update/tokens"] > line["tokens/trained"] > 0
    assert line["update/padding_share"] == 0  # prompts are shared on a CPU, nothing is padded
    assert line["update/flops"] > 2 * 20_000 * line["tokens/trained"]
    speed = line["speed"]
    assert speed["tflops"] == pytest.approx(line["update/flops"] / line["seconds"]["train"] / 1e12)
    assert speed["mfu"] is None
    assert speed["rollouts"] > 0


# --- the plan of memory


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_1P7B))
    return folder


def test_the_plan_compares_with_the_gpu_and_names_ways_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory_plan, "gpu_names", lambda: ["NVIDIA H200, 143771 MiB"])
    path = str(model_folder(tmp_path / "model"))
    assert first_gpu() == ("NVIDIA H200", 150_754_820_096)
    facts = memory_facts(a_recipe(model__path=path, engine__gpu_share=0.5))
    line = memory_line(facts)
    assert line.startswith("memory       103.2 GB on one GPU: weights 6.9, copies")
    assert line.endswith("; and 0.5 of the GPU for the sampler; NVIDIA H200 has 150.8 GB")
    warning = memory_warning(facts)
    assert "needs about 179 GB of GPU memory and NVIDIA H200 has 151 GB" in warning
    assert "compute.gradient_checkpointing=true (saves 55.1 GB)" in warning
    fits = {"compute__gradient_checkpointing": True, "engine__gpu_share": 0.35}
    assert memory_warning(memory_facts(a_recipe(model__path=path, **fits))) is None
    two = memory_facts(a_recipe(model__path=path, **fits), ranks=2)["memory"]["parts"]
    assert two["AdamW"] == 6_882_271_232


def test_without_a_gpu_only_the_need_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory_plan, "gpu_names", list)
    path = str(model_folder(tmp_path / "model"))
    facts = memory_facts(a_recipe(model__path=path))
    assert memory_line(facts).endswith("0.9 of the GPU for the sampler")
    assert memory_warning(facts) is None
    assert memory_facts(a_recipe(model__path=path, engine__device="cpu")) == {}
    unknown = memory_facts(a_recipe(model__path="nobody/nothing"))
    assert memory_line(unknown).startswith("memory       unknown")


def test_a_dry_run_shows_it(tiny_model: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(memory_plan, "gpu_names", lambda: ["Toy, 2000 MiB"])
    words = ["train", "--recipe", "tiny", "--dry-run", "--set", f"model.path={tiny_model}"]
    words += ["--set", "engine.device=cuda", "--runs-dir", str(tmp_path)]
    assert run(words, {}) == 0
    shown = capsys.readouterr()
    assert "memory       2.1 GB on one GPU: weights 0.0" in shown.out
    assert "Toy has 2.1 GB" in shown.out
    assert "the run needs about 2 GB of GPU memory and Toy has 2 GB" in " ".join(shown.err.split())
