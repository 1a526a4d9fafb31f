"""All case families that ship with the tests pass, and the runner itself tells right from wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlfe.errors import RequestError
from tests.cases import Adapters, differences, load_adapters, run_folder, tolerance

CASES = Path(__file__).parent / "fixtures" / "cases"
FAMILIES = sorted(path.stem for path in CASES.glob("*.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_of_the_family_passes(family, tmp_path):
    (tmp_path / f"{family}.json").write_bytes((CASES / f"{family}.json").read_bytes())
    total = run_folder(tmp_path, load_adapters())
    assert total.failures == []
    assert total.passed + total.not_built > 0


def folder_with(tmp_path, **case):
    family = {"family": "sum", "rule": "Tolerance 1e-3.", "cases": [{"id": "sum-1", **case}]}
    (tmp_path / "sum.json").write_text(json.dumps(family))
    return tmp_path


def test_a_wrong_answer_is_a_failure_that_names_both_values(tmp_path):
    folder = folder_with(tmp_path, input={"a": 1}, expected={"value": 3})
    total = run_folder(folder, Adapters(run={"sum": lambda given: {"value": given["a"] + 1}}))
    assert total.failures == ["sum-1: value is 2, expected 3"]
    assert str(total) == "1 cases: 0 passed, 1 failed, 0 not built yet"


def test_a_refusal_answers_an_expected_error_and_nothing_else(tmp_path):
    def refuse(given):
        raise RequestError("no")

    folder = folder_with(tmp_path, input={}, expected={"error": True})
    assert run_folder(folder, Adapters(run={"sum": refuse})).passed == 1
    folder = folder_with(tmp_path, input={}, expected={"value": 3})
    assert run_folder(folder, Adapters(run={"sum": refuse})).failures == [
        "sum-1: value is missing (no); refused: no"
    ]


def test_a_crash_of_an_adapter_fails_its_case_only(tmp_path):
    folder = folder_with(tmp_path, input={}, expected={"value": 3})
    total = run_folder(folder, Adapters(run={"sum": lambda given: given["missing"]}))
    assert total.failures == ["sum-1: KeyError: 'missing'"]


def test_a_family_without_adapter_is_not_built_yet(tmp_path):
    total = run_folder(folder_with(tmp_path, input={}, expected={}), Adapters())
    assert (total.passed, total.failures, total.not_built) == (0, [], 1)


def test_an_own_answer_is_taken_only_where_the_case_leaves_a_choice(tmp_path):
    adapters = Adapters(
        run={"sum": lambda given: {"value": 4}}, own_answers={"sum-1": {"value": 4}}
    )
    folder = folder_with(tmp_path, input={}, expected={"value": 3}, policy="3 or 4")
    assert run_folder(folder, adapters).passed == 1
    folder = folder_with(tmp_path, input={}, expected={"value": 3})
    assert len(run_folder(folder, adapters).failures) == 1


def test_numbers_compare_with_the_tolerance_of_the_rule():
    assert tolerance("Tolerance 1e-5. More.") == 1e-5
    assert tolerance("Compare with tolerance 1e-15.") == 1e-15
    assert tolerance("nothing said") == 1e-9
    assert list(differences({"a": [1.0, 2.0]}, {"a": [1.0, 2.0005]}, 1e-3)) == []
    assert list(differences({"a": True}, {"a": 1}, 1e-3)) == ["a is True, expected 1"]
    assert list(differences({"a": None}, {"a": 0}, 1e-3)) == ["a is None, expected 0"]


def test_the_command_prints_a_total_and_exits_with_1_on_a_failure(tmp_path):
    tag = {"id": "x", "input": {"op": "format", "value": "6e-6"}, "expected": {"tag": "lr6e7"}}
    family = {"family": "lr_tag", "rule": "", "cases": [tag]}
    (tmp_path / "lr_tag.json").write_text(json.dumps(family))
    command = [sys.executable, "-m", "tests.cases", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[2])
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "x: tag is 'lr6e6', expected 'lr6e7'",
        "1 cases: 0 passed, 1 failed, 0 not built yet",
    ]
