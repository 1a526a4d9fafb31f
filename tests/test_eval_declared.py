"""What was declared before the runs: recorded, recognised, compared; and distances to the base."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlfe import config
from rlfe.criteria import declared_by, parse_comparison, read_declared, record
from rlfe.errors import RequestError
from rlfe.eval import kl_table, merge
from rlfe.eval.report.declared import BEFORE, UNRECORDED, of_runs, recorded
from rlfe.eval.report.gather import read_runs
from rlfe.eval.report.write import build
from rlfe.rundir import RunDir
from tests.report_data import make_experiment

REPLAY = {
    "name": "replay against none",
    "readouts": ["eval/mbpp_plus/pass@1", "eval/mbpp_plus/pass@10"],
    "treatment": {"replay": {"strategy": "hard_cooldown"}},
    "control": {"replay": {"strategy": "none"}},
    "each": "optim.lr",
}
CURVES = {
    "name": "reward over updates",
    "readouts": ["reward/mean"],
    "treatment": {"replay": {"strategy": "hard_cooldown"}},
    "control": {"replay": {"strategy": "none"}},
    "axes": ["step", "updates", "tokens"],
}


@pytest.mark.parametrize("name", ["lag-staleness", "lr-ladder", "deepcoder-top-p-0.9"])
def test_the_studies_declare_and_a_new_run_records_it_with_its_hash(
    name: str, tmp_path: Path
) -> None:
    recipe = config.load([name]).recipe
    run = RunDir(tmp_path / "run")
    run.create(recipe, {})
    facts = json.loads(run.provenance.read_text())["declared"]
    assert facts == record(recipe)
    assert facts
    assert all(len(digest) == 16 for digest in facts.values())
    assert declared_by(config.read_run_config(run.config)) == read_declared(Path(name))


def declare(folder: Path, entry: dict[str, object], kept: bool = True) -> None:
    """Write a comparison into a run's config and, as training does, its hash into the record."""
    recipe = config.read_run_config(folder / "config.toml")
    study = recipe.study.model_copy(update={"comparisons": (entry,)})
    recipe = recipe.model_copy(update={"study": study})
    (folder / "config.toml").write_text(config.dump(recipe))
    if kept:
        (folder / "provenance.json").write_text(json.dumps({"declared": record(recipe)}))


def test_what_the_record_says_decides_how_it_is_labelled(tmp_path: Path) -> None:
    folders = make_experiment(tmp_path, samples=False)
    comparison = parse_comparison(REPLAY)
    assert recorded(comparison, read_runs(folders)) == UNRECORDED
    for folder in folders:
        declare(folder, REPLAY)
    runs = read_runs(folders)
    assert of_runs(runs) == [comparison]
    assert recorded(comparison, runs) == BEFORE
    easier = {**REPLAY, "readouts": ["eval/mbpp_plus/pass@1"]}
    for folder in folders:
        declare(folder, easier, kept=False)
    runs = read_runs(folders)
    (changed,) = of_runs(runs)
    assert recorded(changed, runs).startswith("changed after the fact: madeup_mbpp_")
    _, payload = build(runs, declared=[changed])
    assert payload["comparisons"][0]["recorded"].startswith("changed after the fact")


def test_rates_times_readouts_are_one_family(tmp_path: Path) -> None:
    runs = read_runs(make_experiment(tmp_path, lrs=(6e-6, 1e-6), samples=False))
    analysis, payload = build(runs, declared=[parse_comparison(REPLAY)])
    (entry,) = payload["comparisons"]
    rows = entry["scores"]
    assert [(row["each"], row["readout"], row["step"]) for row in rows] == [
        ("1e-6", "mbpp_plus pass@1", 90), ("1e-6", "mbpp_plus pass@10", 90),
        ("6e-6", "mbpp_plus pass@1", 90), ("6e-6", "mbpp_plus pass@10", 90),
    ]  # fmt: skip
    assert {row["family"] for row in rows} == {4}
    assert all(row["holm"] >= row["p"] - 1e-4 for row in rows)
    group = next(g for g in analysis.groups if g.task == "mbpp_plus")
    a, b = (group.at(rows[2][side], 90) for side in ("a", "b"))
    assert a is not None
    assert b is not None
    assert "hardcd" in rows[2]["a"]
    assert rows[2]["effect"] == pytest.approx(float((a.correct_P - b.correct_P).mean()) / group.n)
    assert entry["notes"] == ["1 seed: descriptive"]


def test_curves_stand_over_steps_updates_and_tokens(tmp_path: Path) -> None:
    folders = make_experiment(tmp_path, samples=False)
    for folder, updates in zip(folders, (4, 1), strict=True):
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line |= {"optim/steps": updates, "tokens/sampled": 1000}
        text = "\n".join(json.dumps(line) for line in lines) + "\n"
        (folder / "metrics.jsonl").write_text(text)
    runs = read_runs(folders)
    _, payload = build(runs, declared=[parse_comparison(CURVES)])
    (entry,) = payload["comparisons"]
    ends = {c["axis"]: {x["points"][-1][0] for x in c["lines"]} for c in entry["curves"]}
    assert ends == {"step": {90}, "updates": {90.0, 360.0}, "tokens": {90000.0}}
    (row,) = entry["steps"]
    values = {run.name: np.array([line["reward/mean"] for line in run.metrics]) for run in runs}
    assert row["mean"] == pytest.approx(float((values[row["a"]] - values[row["b"]]).mean()))
    assert {row["updates_a"], row["updates_b"]} == {90, 360}
    assert (row["tokens_a"], row["steps"]) == (90000, 90)


def test_arms_that_differ_in_more_are_told_and_missing_ones_named(tmp_path: Path) -> None:
    (one, two) = make_experiment(tmp_path, samples=False)
    text = (two / "config.toml").read_text()
    (two / "config.toml").write_text(text.replace("clip_low = 0.2", "clip_low = 0.3"))
    _, payload = build(read_runs([one, two]), declared=[parse_comparison(REPLAY)])
    assert "arms also differ in loss.clip_low" in payload["comparisons"][0]["notes"]
    _, payload = build(read_runs([one]), declared=[parse_comparison(REPLAY)])
    assert payload["comparisons"][0]["notes"] == ["no pair of runs has both arms"]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="axes"):
        parse_comparison({**REPLAY, "axes": ["time"]})
    file = tmp_path / "empty.toml"
    file.write_text("")
    with pytest.raises(RequestError, match="declares nothing"):
        read_declared(file)
    recipe = tmp_path / "bad.toml"
    recipe.write_text('[[study.criteria]]\nname = "x"\n')
    with pytest.raises(RequestError, match="readout"):
        config.check(config.load([str(recipe)]).recipe)


def write_kl(folder: Path, cell: str, values: dict[int, float], measure: str) -> None:
    rows: list[merge.Row] = []
    for step, value in values.items():
        row = dict.fromkeys(kl_table.COLUMNS, "0")
        rows.append(
            row | {"cell": cell, "step": str(step), "task": "mbpp_plus", "measure": measure}
            | {"per_sequence": str(value), "n": "8", "settings": f"kl-{measure[:2]}-n8"}
        )  # fmt: skip
    kl_table.write(folder / "evals" / "kl.csv", rows)


def test_forgetting_is_fitted_on_kl_over_all_checkpoints_and_on_nothing_else(
    tmp_path: Path,
) -> None:
    folders = make_experiment(tmp_path, samples=False)
    for i, folder in enumerate(folders):
        values = {30: 1.0 + i, 60: 2.0 + i, 90: 3.0 + i}
        write_kl(folder, folder.name, values, "KL to base")
        write_kl(folder, folder.name, values, "mean log ratio")
    _, payload = build(read_runs(folders))
    assert len(payload["kl"]["points"]) == 12
    (fit,) = payload["kl"]["fits"]
    assert (fit["model"], fit["points"], fit["settings"]) == ("madeup", 6, "kl-KL-n8")
    losses = {
        f"{path['cell']} {step}": loss
        for path in payload["paths"]
        for step, loss in zip(path["steps"], path["forgetting"], strict=True)
    }
    x = {f"{f.name} {30 * j}": float(j + i) for i, f in enumerate(folders) for j in (1, 2, 3)}
    found = kl_table.fit(losses, x)
    assert found is not None
    assert (fit["a"], fit["r2"]) == (pytest.approx(found.a), pytest.approx(found.r2))
