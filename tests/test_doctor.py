"""Doctor: one line a check, exit 3 when something that everything needs is wrong."""

import json

import pytest

from rlfe import config
from rlfe.cli import checks
from rlfe.cli.main import run
from tests.test_checkpoints import checkpoint

STOPPED = dict.fromkeys(("endless loop", "memory bomb", "file write", "socket"), "stopped")
tried = checks._tried


@pytest.fixture(autouse=True)
def no_token_and_no_sandbox(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    good = {"tier": "namespaces", "by": "python", "refused": {}, "tried": STOPPED}
    monkeypatch.setattr(checks, "_tried", lambda: good)
    monkeypatch.setattr(checks, "gpu_names", list)


def findings(capsys, *arguments):
    code = run(["doctor", "--json", *arguments], {})
    rows = json.loads(capsys.readouterr().out)["rows"]
    return code, {row["name"]: row for row in rows}


def test_every_part_has_a_line_with_mark_and_value(capsys):
    code, rows = findings(capsys)
    assert code == 0
    assert {name: rows[name]["mark"] for name in ("python", "packaged data", "isolation")} == {
        "python": "ok", "packaged data": "ok", "isolation": "ok"
    }  # fmt: skip
    assert rows["packaged data"]["value"].endswith(" files as published")
    assert rows["GPU"]["mark"] == "-"
    assert rows["Hub token"]["fix"] == "hf auth login, or set HF_TOKEN"


def test_the_text_form_is_one_line_a_check(capsys):
    assert run(["doctor"], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "-", "warn") for line in lines)


def test_a_token_is_named_and_never_printed(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret")
    assert run(["doctor"], {}) == 0
    out = capsys.readouterr().out
    assert "hf_secret" not in out
    assert "present" in out


def test_changed_data_ends_with_3_and_names_the_file(capsys, monkeypatch, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "README.md").write_text(f"| a.jsonl | 3 | 10 | MIT | x | {'0' * 64} |\n")
    (data / "a.jsonl").write_text("changed")
    monkeypatch.setattr(checks.resources, "files", lambda package: tmp_path)
    code, rows = findings(capsys)
    assert code == 3
    assert rows["packaged data"]["value"] == "a.jsonl differs"


@pytest.mark.parametrize(
    ("tier", "ends", "mark"),
    [
        ("namespaces", {}, "ok"),
        ("limits", {}, "warn"),
        ("filters", {"file write": "open"}, "warn"),
        ("namespaces", {"endless loop": "open"}, "FAIL"),
    ],
)
def test_isolation_is_judged_by_what_really_happened(monkeypatch, tier, ends, mark):
    facts = {"tier": tier, "by": "python", "refused": {}, "tried": STOPPED | ends}
    monkeypatch.setattr(checks, "_tried", lambda: facts)
    (found,) = checks.isolation()
    assert found.mark == mark
    assert found.value.startswith(f"tier {tier} by python; tried and stopped: ")
    assert [f"not stopped: {name}" in found.value for name in ends] == [True] * len(ends)


def test_every_stronger_tier_has_a_line_that_says_why_it_is_not_in_force(monkeypatch):
    refused = {"namespaces": "Operation not permitted", "filters": "the kernel has no Landlock"}
    facts = {"tier": "limits", "by": "python", "refused": refused, "tried": STOPPED}
    monkeypatch.setattr(checks, "_tried", lambda: facts)
    _, *rows = checks.isolation()
    assert [(row.mark, row.name, row.value) for row in rows] == [
        ("-", "isolation tier namespaces", "not possible: Operation not permitted"),
        ("-", "isolation tier filters", "not possible: the kernel has no Landlock"),
    ]
    assert all(row.fix for row in rows)


def test_a_recipe_is_compared_with_the_free_disk(tmp_path):
    checkpoint(tmp_path / "model")
    sets = [f"model.path={tmp_path / 'model'}", "model.dtype=float32", "train.steps=60"]
    recipe = config.load([], sets).recipe
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert checks.bytes_needed(recipe) == 2 * size + size // 4 * 16
    assert checks.disk(tmp_path / "runs", recipe).mark == "ok"
    assert checks.bytes_needed(config.load(["lr-ladder"]).recipe) is None


def test_missing_training_packages_are_no_failure(monkeypatch):
    real = checks._version
    monkeypatch.setattr(checks, "_version", lambda name: None if name == "torch" else real(name))
    rows = {finding.name: finding for finding in checks.versions()}
    assert rows["training packages"].mark == "-"
    assert rows["training packages"].fix == "pip install 'rlfe[train]'"


def test_the_real_sandbox_stops_a_loop_and_a_memory_bomb(monkeypatch):
    monkeypatch.setattr(checks, "_tried", tried)
    first, *_ = checks.isolation()
    assert "endless loop, memory bomb" in first.value
    assert first.mark in ("ok", "warn")
