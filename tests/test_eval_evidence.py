"""Evidence for study 3's criterion, from made-up run folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlfe.config import dump, load
from rlfe.criteria import parse_criterion
from rlfe.eval.evidence import Evidence, verdict_entry
from rlfe.eval.report.gather import read_groups, read_runs
from rlfe.eval.tables import parquet_bytes
from rlfe.naming import cell_of, format_cell
from rlfe.records import append_jsonl
from tests.test_eval_verdicts import STUDY, entry

STEPS = 60
MODEL = "qwen3p5_0p8b"


def make_run(root: Path, objective: str, lag: int, seed: int, **changes: Any) -> Path:
    """A run whose clipped share is higher for maxrl and rises with the lag."""
    sets = [f"advantage.name={objective}", f"lag.steps={lag}", f"run.seed={seed}"]
    recipe = load(["lag-staleness"], sets + changes.pop("sets", [])).recipe
    run = root / "runs" / format_cell(cell_of(recipe))
    run.mkdir(parents=True)
    (run / "config.toml").write_text(dump(recipe))
    (run / "provenance.json").write_text(json.dumps({}))
    share = {"maxrl": 0.31, "grpo": 0.195}[objective] + 0.005 * seed if lag else 0.0
    for step in range(1, changes.pop("steps", STEPS) + 1):
        append_jsonl(run / "metrics.jsonl", {**line(step, share, lag), **changes})
    counts(run / "evals", run.name, STEPS, objective, lag)
    return run


def line(step: int, share: float, lag: int) -> Mapping[str, Any]:
    inside = 0.8 * share
    return {
        "step": step,
        "clip/wclip_active": share,
        "clip/adv_mass": 10.0,
        "clip/clip_mass": 10.0 * share,
        "clip/clip_mass/1": 5.0 * inside,
        "clip/clip_mass/2": 5.0 * inside,
        "clip/clip_raw": 0.1 * (lag > 0),
        "clip/wclip_common": 0.2,
        "kl/k3": 0.01 * (lag > 0),
        "lag/fingerprint_ok": 1,
        "lag/fresh_ok": 1,
        "lag/fresh_mean_abs": 1e-4,
    }


def counts(folder: Path, cell: str, step: int, objective: str, lag: int) -> None:
    folder.mkdir(parents=True)
    rows = []
    for problem in range(40):
        right = max(0, problem % 9 - (2 if lag and objective == "maxrl" else 0))
        rows.append({
            "cell": cell, "step": str(step), "task": "gsm8k", "settings": "s-n8",
            "problem": f"gsm8k/{problem}", "n": "8", "correct": str(min(8, right)),
        })  # fmt: skip
    columns = ("cell", "step", "task", "settings", "problem", "n", "correct")
    (folder / "scores_counts.parquet").write_bytes(parquet_bytes(rows, columns))


def make_study(root: Path, **changes: Any) -> list[Path]:
    """All 8 runs and the base; `changes` go to maxrl at lag 4, seed 1."""
    counts(root / "runs" / "_base" / MODEL / "evals", MODEL, 0, "grpo", 0)
    made = []
    for objective in ("maxrl", "grpo"):
        for lag in (0, 4):
            for seed in (0, 1):
                special = changes if (objective, lag, seed) == ("maxrl", 4, 1) else {}
                made.append(make_run(root, objective, lag, seed, **special))
    return made


ALL = parse_criterion(
    entry(
        guards=[
            "all_runs_finished", "base_evaluated", "fingerprints_ok", "fresh_ratio_one",
            "lag_raises_kl_and_clipping", "control_above_zero",
        ]
    )
)  # fmt: skip


def verdict(folders: list[Path]) -> dict[str, Any]:
    return verdict_entry(ALL, read_runs(folders))


def test_a_whole_study_is_validated_with_every_number_shown(tmp_path: Path) -> None:
    found = verdict(make_study(tmp_path))
    assert found["verdict"] == "validated", found["sentence"]
    numbers = dict(found["quantities"])
    assert numbers["treatment seed 0"] == "0.31"
    assert numbers["ratio"] == "1.582"
    assert numbers["excess_share"] == "0.8"
    assert {name: ok for name, ok, _ in found["guards"]} == dict.fromkeys(
        ("same_settings", *ALL.guards), "yes"
    )
    assert any("ratio 1: the finding is about weights" in text for text in found["extra"])
    (support,) = [text for text in found["extra"] if text.startswith("support")]
    assert "at least 3 expected" in support
    assert "supporting only" in support


def test_the_order_of_the_runs_changes_nothing(tmp_path: Path) -> None:
    folders = make_study(tmp_path)
    assert verdict(folders) == verdict(folders[::-1])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 59}, "is unfinished"),
        ({"lag/fingerprint_ok": 0}, "fingerprints_ok: does not match"),
        ({"kl/k3": 0.0}, "not raised: treatment seed 1 kl/k3"),
        ({"clip/wclip_active": float("nan")}, "treatment seed 1 has no value"),
        ({"sets": ["optim.lr=1e-5"]}, "arms also differ in optim.lr"),
    ],
)
def test_missing_or_doubtful_data_makes_it_invalid(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    found = verdict(make_study(tmp_path, **changes))
    assert found["verdict"] == "invalid"
    assert says in found["sentence"]


def test_a_missing_run_makes_it_invalid(tmp_path: Path) -> None:
    found = verdict(make_study(tmp_path)[:-1])
    assert found["verdict"] == "invalid"
    assert "control seed 1" in found["sentence"]


def test_an_evaluation_readout_is_compared_pairwise_over_problems(tmp_path: Path) -> None:
    criterion = parse_criterion(
        entry(
            readout="eval/gsm8k/pass@1",
            validated={"difference_min": 0.01},
            refuted={"difference_below": -0.05},
            support=[],
        )
    )
    runs = read_runs(make_study(tmp_path))
    evidence = Evidence(criterion, runs, read_groups(runs))
    decision = evidence.decision()
    assert decision.verdict == "refuted"
    assert decision.quantities.high is not None
    assert decision.quantities.high < -0.05


def test_steps_without_mass_are_left_out_of_a_mean(tmp_path: Path) -> None:
    runs = read_runs(make_study(tmp_path))
    evidence = Evidence(STUDY, runs, read_groups(runs))
    run = evidence.treatment.runs[0]
    lines = [dict(line) for line in run.metrics]
    lines[30]["clip/wclip_active"] = None
    import dataclasses

    shorter = dataclasses.replace(run, metrics=lines)
    assert evidence.reading(shorter, "clip/wclip_active") == pytest.approx(0.31)
