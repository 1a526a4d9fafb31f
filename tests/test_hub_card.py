"""The card: computed from runs and tables, the same bytes every time, and honest about gaps."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from rlfe.cli.publication import Stated, publication
from rlfe.errors import RequestError
from rlfe.hub import card, metadata
from rlfe.hub.cache import Cache
from rlfe.hub.card_metadata import check_license
from rlfe.hub.card_text import without_folders
from rlfe.hub.cardfacts import License, common_license, rate_text, steps_text
from rlfe.hub.discover import discover
from rlfe.hub.evaluations import COLUMNS
from tests.hub_runs import make_checkpoint, make_run

SETTINGS = "3fa9c1d2e0-n4"
SECTIONS = [
    "Results at a glance", "Layout", "Load", "Training", "Evaluation", "Forgetting",
    "Arm comparison", "Hold-out", "Limitations and use", "Provenance", "Citation",
]  # fmt: skip


def nobody(name: str) -> None:
    """No base model's card is at hand."""


def made(*runs: Path, **stated: object) -> object:
    found = [discover(run, Cache(run)) for run in runs]
    return publication(found, "my-org/series", Stated(**stated), base_card=nobody)  # type: ignore[arg-type]


def write_tables(folder: Path, points: dict[tuple[str, int, str], list[int]]) -> None:
    """Score table, counts and rates as `rlfe eval` writes them: right of 4 per problem."""
    from rlfe.eval.tables import parquet_bytes

    folder.mkdir(parents=True)
    rows, counts, rates = [], [], []
    for (cell, step, task), right in sorted(points.items()):
        key = {"cell": cell, "step": str(step), "task": task, "settings": SETTINGS}
        share = sum(right) / len(right) / 4
        ends = {
            "low": f"{share - 0.05}",
            "high": f"{share + 0.05}",
            "interval": "95 % over problems",
        }
        for k in (1, 4):
            score = share if k == 1 else sum(map(bool, right)) / len(right)
            rows.append({**key, **ends, "k": str(k), "score": str(score), "n": "4", "missing": "",
                         "problems": str(len(right))})  # fmt: skip
        rates.append({**key, "samples": "40", "cut": "0.1", "syntax_error": "0.05",
                      "no_answer": "0", "timeout": "0", "crashed": "0", "distinct": "0.5",
                      "mean_tokens": "80"})  # fmt: skip
        counts += [
            {**key, "problem": f"{task}/{i}", "n": "4", "correct": str(c)}
            for i, c in enumerate(right)
        ]
    for name, lines in (("scores.csv", rows), ("scores_rates.csv", rates)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
    columns = ("cell", "step", "task", "settings", "problem", "n", "correct")
    (folder / "scores_counts.parquet").write_bytes(parquet_bytes(counts, columns))
    facts = {"sampling": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 512}, "judge": "r1"}
    (folder / "scores_settings.json").write_text(json.dumps({SETTINGS: facts}))


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Two arms at one rate, evaluated: nobuf forgets GSM8K, replay does not."""
    runs = tmp_path_factory.mktemp("series") / "runs"
    one = make_run(runs, steps=(30, 60), lr=6e-6)
    two = make_run(runs, steps=(30, 60), lr=6e-6, replay=True)
    points = {}
    for task in ("mbpp_plus", "gsm8k"):
        points["tiny", 0, task] = [2] * 20 + [0, 4] * 5
        for run, steps in ((one, (30, 60)), (two, (30, 60))):
            for step in steps:
                gain = 1 if task == "mbpp_plus" else (-1 if run is one else 0)
                points[run.name, step, task] = [2 + gain] * 20 + [0, 4] * 5
    for cell in ("tiny", one.name, two.name):
        place = runs / "_base" / "tiny" if cell == "tiny" else runs / cell
        write_tables(place / "evals", {key: c for key, c in points.items() if key[0] == cell})
    return one, two


@pytest.fixture(scope="module")
def text(series):
    """The card of both arms."""
    return made(*series).card_text()


def test_the_card_has_its_sections_in_order_and_valid_metadata(text):
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert metadata.problem(text) is None
    meta = metadata.read(text)
    assert meta["license"] == "apache-2.0"
    assert meta["base_model"] == ["tiny-org/tiny"]
    assert meta["base_model_relation"] == "finetune"
    assert meta["datasets"] == ["google-research-datasets/mbpp"]
    assert {"grpo", "mbpp", "experience-replay", "ablation"} <= set(meta["tags"])


def test_the_same_inputs_give_the_same_bytes(series):
    first, second = made(*series), made(*series)
    assert first.card_text() == second.card_text()
    assert first.files == second.files
    assert set(first.files) == {
        "evals/scores.csv", "evals/scores.parquet", "evals/scores_settings.json",
        "plots/pass_at_k.png", "plots/gain_forgetting.png",
    }  # fmt: skip


def test_numbers_come_from_the_tables_with_their_intervals(series, text):
    assert "| `tiny` (base) | 0 | 50.0 [45.0, 55.0] | 83.3 [45.0, 55.0] |" in text
    assert f"| `{series[0].name}` | 60 | 66.7 [61.7, 71.7] |" in text
    assert "| 10.0 % | 5.0 % | 50.0 % |" in text
    assert "30 problems; n=4; temperature 0.6; top_p 0.95; max_tokens 512; judge r1" in text


def test_claims_are_paired_and_only_where_the_interval_excludes_zero(series, text):
    assert re.search(rf"> Gain: {series[0].name} step 60 minus base on mbpp_plus: \+16.7 \[", text)
    assert re.search(r"> Forgetting: .*nobuf\S* step 60 minus base on gsm8k: -16.7 \[", text)
    assert "hardcd_lam0p1_lr6e6 step 60 minus base on gsm8k: +0.0 [+0.0, +0.0]" in text
    assert "nobuf minus hardcd_lam0p1, tiny step 60" in text
    assert "corrected for 6 comparisons (Holm)" in text
    assert "1 seed" in text


def test_forgetting_shows_drop_retention_and_worst_step(series, text):
    row = next(
        line for line in text.splitlines() if line.startswith(f"| `{series[0].name}` | 60 | gsm")
    )
    assert row.endswith("| 50.0 [45.0, 55.0] | 33.3 [28.3, 38.3] | +16.7 | 66.7 % | +16.7 (30) |")


def test_without_evaluations_nothing_is_claimed(tmp_path):
    text = made(make_run(tmp_path / "runs")).card_text()
    assert "> No claim: these checkpoints have not been evaluated." in text
    assert "not evaluated." in text.partition("Known gaps")[2]
    assert "pass@1 |" not in text


def test_what_differs_between_cells_is_computed_from_their_configs(series, text):
    table = text.partition("Identical except")[2].partition("<details>")[0]
    assert re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE) == ["replay.strategy"]


def test_rates_are_called_above_or_below_as_numbers(tmp_path):
    runs = [make_run(tmp_path, lr=lr) for lr in (6e-6, 6e-7, 1e-6)]
    text = made(*runs).card_text()
    assert "6e-6 is above; 1e-6 is equal to; 6e-7 is below the default of 1e-6." in text


def test_a_run_that_stopped_early_says_where_and_is_a_known_gap(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    text = made(run).card_text()
    assert f"`{run.name}`: stopped at 30 of 60, reason not recorded." in text


def test_a_card_of_runs_without_checkpoints_promises_none(tmp_path):
    run = make_run(tmp_path, steps=())
    text = made(run).card_text()
    assert "No run has a complete checkpoint here: there is nothing to load." in text
    assert "from_pretrained" not in text
    assert f"`{run.name}`: no checkpoint is here." in text


def test_no_folder_of_this_machine_stands_in_the_card(tmp_path):
    base = make_checkpoint(tmp_path / "models" / "tiny")
    run = make_run(tmp_path / "runs", path=str(base))
    (run / "provenance.json").write_text(json.dumps({"command": ["rlfe", "train", str(base)]}))
    text = made(run).card_text()
    assert str(tmp_path) not in text
    assert "base_model" not in metadata.read(text)
    assert "has no known Hub id" in text
    stated = made(run, base_model="tiny-org/tiny").card_text()
    assert metadata.read(stated)["base_model"] == ["tiny-org/tiny"]


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ('path = "/home/me/models/tiny"', 'path = "tiny"'),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        ("Qwen/Qwen3-1.7B-Base and 3/4", "Qwen/Qwen3-1.7B-Base and 3/4"),
        ("C:\\Users\\me\\tiny", "tiny"),
    ],
)
def test_absolute_paths_are_cut_to_their_last_part(text, short):
    assert without_folders(text) == short


def test_a_local_copy_of_a_base_names_its_id_and_license(tmp_path):
    base = make_checkpoint(tmp_path / "models" / "tiny")
    (base / "README.md").write_text("---\nlicense: mit\nbase_model: tiny-org/real\n---\n")
    meta = metadata.read(
        made(make_run(tmp_path / "runs", path=str(base), license=None)).card_text()
    )
    assert (meta["license"], meta["base_model"]) == ("mit", ["tiny-org/real"])


def test_unknown_and_mixed_licenses_stop_until_stated(tmp_path):
    one = make_run(tmp_path, license="mit")
    two = make_run(tmp_path, lr=6e-6, license="apache-2.0")
    with pytest.raises(RequestError, match="license is not clear"):
        check_license(made(one, two).material)
    check_license(made(one, two, license="mit").material)
    other = made(one, license="other", license_name="own", license_link="https://x.org/l")
    assert "license: other\nlicense_name: own\nlicense_link: https://x.org/l\n" in other.card_text()


def test_a_common_license_needs_every_base():
    mit = License("mit")
    assert common_license([mit, mit]) == mit
    assert common_license([mit, None]) is None
    assert common_license([mit, License("apache-2.0")]) is None
    assert common_license([License("unknown")]) is None
    assert common_license([]) is None


def test_hand_written_parts_survive_and_unknown_ones_go_to_the_end():
    new = "a\n<!-- rlfe:keep:intro -->\n<!-- /rlfe:keep -->\nb\n"
    old = (
        "x <!-- rlfe:keep:intro -->\nmine\n<!-- /rlfe:keep -->"
        "<!-- rlfe:keep:extra -->\nmore\n<!-- /rlfe:keep -->"
    )
    merged = metadata.with_kept_parts(new, old)
    assert merged.startswith("a\n<!-- rlfe:keep:intro -->\nmine\n<!-- /rlfe:keep -->\nb\n")
    assert merged.endswith("<!-- rlfe:keep:extra -->\nmore\n<!-- /rlfe:keep -->\n")
    assert metadata.with_kept_parts(merged, merged) == merged


def test_a_repeated_key_and_a_local_base_are_refused_with_their_line():
    repeated = metadata.problem("---\nlicense: mit\ntags: [a]\nlicense: apache-2.0\n---\n")
    assert repeated is not None
    assert (repeated.word, repeated.line) == ("repeated_key", 4)
    local = metadata.problem("---\nlicense: mit\nbase_model: /home/me/tiny\n---\n")
    assert local is not None
    assert (local.word, local.line) == ("bad_base_model", 3)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "none"),
        ([30], "30"),
        ([30, 60], "30, 60"),
        ([30, 60, 90, 100], "30-100 step 30"),
        ([60, 90, 120], "60, 90, 120"),
        ([0, 1, 2], "0, 1, 2"),
    ],
)
def test_steps_are_told_so_that_no_step_is_promised_that_is_not_there(steps, text):
    assert steps_text(steps) == text


@pytest.mark.parametrize(("rate", "text"), [(6e-6, "6e-6"), (1.5e-5, "1.5e-5"), (0.1, "0.1")])
def test_rates_are_written_as_people_do(rate, text):
    assert rate_text(rate) == text


def test_text_of_a_run_cannot_break_a_table(tmp_path):
    run = make_run(tmp_path)
    provenance = {"ended": "a | b\n# no heading", "platform": "x|y"}
    (run / "provenance.json").write_text(json.dumps(provenance))
    (run / "metrics.jsonl").write_text('{"step": 3, "metrics": {}}\n')
    text = made(run).card_text()
    assert "stopped at 3 of 60: a \\| b # no heading" in text
    assert "\n# no heading" not in text


def test_every_column_of_an_evaluation_table_is_known():
    from rlfe.eval.tables import COLUMNS as WRITTEN

    assert set(WRITTEN) == COLUMNS


def test_the_template_has_no_undefined_name(tmp_path):
    found = made(make_run(tmp_path))
    assert "\n\n\n" not in card.render(found.material)


def test_a_run_without_a_config_still_has_a_card_that_says_so(tmp_path):
    run = make_run(tmp_path / "runs")
    for name in ("config.toml", "provenance.json", "metrics.jsonl"):
        (run / name).unlink()
    text = made(run, license="mit").card_text()
    assert "config.toml is missing, settings are not known" in text
    assert "last step 60, planned steps unknown" in text
    assert "Versions: not recorded" in text
    assert metadata.problem(text) is None


def test_what_the_study_leaves_open_stands_in_the_card_with_its_value(tmp_path):
    run = make_run(tmp_path / "runs", steps=(30,))
    assert "Assumptions:" not in made(run).card_text()
    given = 'assumptions = ["kl.beta: not said", "optim.beta2"]'
    config = run / "config.toml"
    config.write_text(config.read_text().replace("assumptions = []", given))
    told = "Assumptions: left open by the study and chosen here: `kl.beta` = 0 (not said); "
    assert told + "`optim.beta2` = 0.999" in made(run).card_text()


def test_the_card_names_the_machine(tmp_path):
    run = make_run(tmp_path / "runs", steps=(30,))
    facts = json.loads((run / "provenance.json").read_text())
    machine = {"gpus": ["NVIDIA H200"] * 2, "gpu_count": 2, "cuda": "12.8"}
    facts["hardware"] = {**machine, "cpu": "AMD EPYC 9654", "cpu_cores": 32}
    (run / "provenance.json").write_text(json.dumps(facts))
    told = "Hardware: 2 x NVIDIA H200, CUDA 12.8; AMD EPYC 9654 (32 cores)"
    assert told in made(run).card_text()


def test_no_claim_stands_beside_what_could_have_been_seen(series):
    text = made(series[1]).card_text()
    assert re.search(r"> Forgetting: no claim, .* \(differences below 0.0 points", text)


def test_the_packaged_holdout_proof_is_what_the_data_gives():
    from rlfe.cli.card_holdout import computed_proof, mbpp_lines, mbpp_proof

    proof = mbpp_proof()
    assert proof == computed_proof()
    plus, test, digests = mbpp_lines(proof, None)
    assert plus.startswith(
        "320 training problems against the 378 of MBPP+: 0 ids in common, 0 with"
    )
    assert test.startswith(
        "320 training problems against the 276 of MBPP test outside MBPP+: 0 ids"
    )
    assert "mbpp_train320_ids.json" in digests
    assert mbpp_lines(proof, 2)[0].startswith("2 training problems against the 378 of MBPP+: 0 ids")
