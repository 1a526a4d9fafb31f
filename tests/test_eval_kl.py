"""KL to the base: direct computation on a tiny model, one base sample set, kills, the fit."""

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlfe.errors import RequestError
from rlfe.eval import kl_table
from rlfe.eval.kl import read_lines
from tests.test_cli_eval import make_run, rlfe
from tests.test_eval_exact import CELL, SETS, start
from tests.tiny_model import write_tiny_model

CONFIG = [*SETS, "task.name=gsm8k", "eval.gsm8k.n=2", "eval.gsm8k.limit=3"]
GSM8K = CELL.replace("mbpp", "gsm8k")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=7)


def place_run(root: Path, base: Path, steps: dict[int, Path]) -> Path:
    from rlfe.config import dump, load

    run = root / "runs" / GSM8K
    run.mkdir(parents=True)
    for step, model in steps.items():
        shutil.copytree(model, run / f"global_step_{step}")
    (run / "config.toml").write_text(dump(load([], [f"model.path={base}", *CONFIG]).recipe))
    return run


def direct(folder: Path, prompt: Sequence[int], reply: Sequence[int]) -> float:
    """Sum of log softmax over the whole sequence, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *reply]])).logits[0]
    logp = torch.log_softmax(logits.double(), dim=-1)
    return sum(float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(reply))


def test_the_number_is_that_of_a_direct_computation(
    tiny_model: Path, other_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = place_run(tmp_path, tiny_model, {2: tiny_model, 4: other_model})
    result = rlfe("--ckpt-glob", "runs/*/global_step_*", "--kl", "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["step"]: row for row in json.loads(result.stdout)["run"]["kl"]}
    assert (rows["2"]["measure"], float(rows["2"]["per_sequence"])) == ("KL to base", 0.0)

    (texts,) = (tmp_path / "runs" / "_base").rglob("texts.jsonl.zst")
    lines = read_lines(texts)[1].values()
    assert [len(line["y"]) for line in lines] == [8, 8, 8]
    ratios = [
        direct(tiny_model, line["x"], y) - direct(other_model, line["x"], y)
        for line in lines
        for y in line["y"]
    ]
    tokens = sum(len(y) for line in lines for y in line["y"])
    assert float(rows["4"]["per_sequence"]) == pytest.approx(np.mean(ratios), abs=2e-4)
    assert float(rows["4"]["per_token"]) == pytest.approx(sum(ratios) / tokens, abs=1e-5)
    assert float(rows["4"]["low"]) <= float(rows["4"]["per_sequence"]) <= float(rows["4"]["high"])
    assert float(rows["4"]["per_sequence"]) > 0
    assert (run / "evals" / "kl.csv").read_text().count("KL to base") == 2

    first = (run / "evals" / "kl.csv").read_bytes()
    again = rlfe("--ckpt-glob", "runs/*/global_step_*", "--kl")
    assert "scored for KL" not in again.stderr
    assert (run / "evals" / "kl.csv").read_bytes() == first


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10])
def test_killed_at_random_moments_gives_the_same_bytes(
    tiny_model: Path, other_model: Path, tmp_path: Path, kills: int
) -> None:
    chance = random.Random(kills)
    for name in ("whole", "broken"):
        place_run(tmp_path / name, tiny_model, {2: tiny_model, 4: other_model})
    for _ in range(kills):
        child = start(tmp_path / "broken", "--kl")
        assert child.stderr is not None
        child.stderr.readline()
        time.sleep(chance.uniform(0.0, 4.0))
        child.kill()
        child.wait()
        child.stderr.close()
    for name in ("whole", "broken"):
        child = start(tmp_path / name, "--kl")
        _, errors = child.communicate()
        assert child.returncode == 0, errors
    tables = [
        {file.name: file.read_bytes() for file in (tmp_path / name / "runs/_tables").iterdir()}
        for name in ("whole", "broken")
    ]
    assert "scores_kl.csv" in tables[0]
    assert tables[0] == tables[1]


def test_other_samples_give_a_mean_log_ratio_and_no_kl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, sets=["task.name=gsm8k"], cell="fakemodel_gsm8k_nobuf_lr1e6")
    glob = ("--ckpt-glob", "runs/*/global_step_*")
    result = rlfe(*glob, "--kl", "--temperature", "0.6", "--json")
    assert result.exit_code == 0, result.stderr
    assert "is a mean log ratio, no KL" in result.stderr
    assert {r["measure"] for r in json.loads(result.stdout)["run"]["kl"]} == {"mean log ratio"}
    dry = rlfe(*glob, "--kl", "--dry-run")
    assert "--kl: 2 checkpoints scored on 8 samples of the base" in dry.stderr
    assert rlfe(*glob, "--kl", "--shard", "1/2").exit_code == 2


def test_what_cannot_be_measured_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)  # trains mbpp, scores gsm8k
    result = rlfe("--ckpt-glob", "runs/*/global_step_*", "--kl")
    assert result.exit_code == 2
    assert "no checkpoint of a run is scored on the task it trains" in result.stderr
    assert not (tmp_path / "runs" / "_tables").exists()


def test_retrained_weights_are_refused_and_fresh_drops_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlfe.engines.fake import FakeLearner

    monkeypatch.chdir(tmp_path)
    cell = "fakemodel_gsm8k_nobuf_lr1e6"
    make_run(tmp_path, sets=["task.name=gsm8k"], cell=cell)
    call = ("--ckpt-glob", "runs/*/global_step_*", "--kl")
    assert rlfe(*call).exit_code == 0
    learner = FakeLearner()
    learner.updates = 9
    learner.export(tmp_path / "runs" / cell / "global_step_2")
    assert "another weights" in rlfe(*call).stderr
    assert rlfe(*call, "--fresh").exit_code == 0


def test_the_fit_finds_the_curve_and_says_how_well() -> None:
    kl = {str(i): float(i) for i in range(1, 6)}
    exact = {name: 0.03 * x - 0.002 * x * x for name, x in kl.items()}
    found = kl_table.fit(exact, kl)
    assert found is not None
    assert (found.a, found.b, found.points) == (
        pytest.approx(0.03), pytest.approx(-0.002), 5
    )  # fmt: skip
    assert found.r2 == pytest.approx(1.0)
    assert kl_table.fit({"1": 0.1, "2": 0.2}, kl) is None
    flat = kl_table.fit(dict.fromkeys(kl, 0.1), kl)
    assert flat is not None
    assert flat.r2 is None


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kl.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match="has no column"):
        kl_table.read(tmp_path / "kl.csv")
