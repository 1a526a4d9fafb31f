"""`rlfe report`: what it prints, what it writes, what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlfe.cli import main
from tests.report_data import make_experiment
from tests.test_eval_evidence import make_study


def rlfe(*arguments: str) -> Result:
    import click

    @click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def shell(ctx: click.Context, words: tuple[str, ...]) -> None:
        ctx.exit(main.run(["report", *words], {}))

    return CliRunner().invoke(shell, list(arguments))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("runs")
    return [str(run) for run in make_experiment(root, samples=False)]


def test_sentences_go_to_stdout_and_words_to_stderr(runs: list[str], tmp_path: Path) -> None:
    base = str(Path(runs[0]).parent / "_base")
    result = rlfe(*runs, base, "-o", str(tmp_path / "r"))
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 4
    assert "1 seed: intervals cover problems, not training randomness" in result.stderr
    assert f"Next: open {tmp_path / 'r' / 'index.html'}" in result.stderr


def test_json_is_one_document(runs: list[str], tmp_path: Path) -> None:
    document = json.loads(rlfe(*runs, "-o", str(tmp_path / "r"), "--json").stdout)
    assert document["schema"] == "rlfe.report/1"
    assert {entry["kind"] for entry in document["run"]["stability"]} <= {
        "stable", "dip", "unstable", "collapsed",
    }  # fmt: skip
    assert all(Path(file).is_file() for file in document["run"]["files"])


def test_verdicts_are_printed_and_stand_on_the_page(tmp_path: Path) -> None:
    study = [str(run) for run in make_study(tmp_path)]
    result = rlfe(*study, "-o", str(tmp_path / "r"), "--criteria", "lag-staleness")
    assert result.exit_code == 0, result.stderr
    assert "at lag 4: VALIDATED (all conditions hold: ratio 1.582 >= 1.5" in result.stdout
    assert '"verdict":"validated"' in (tmp_path / "r" / "index.html").read_text()


def test_wrong_requests_exit_with_their_codes(runs: list[str], tmp_path: Path) -> None:
    absent = rlfe(str(tmp_path / "absent"))
    assert (absent.exit_code, "does not exist" in absent.stderr) == (5, True)
    none = rlfe()
    assert none.exit_code == 2
    criteria = rlfe(*runs, "-o", str(tmp_path / "r"), "--criteria", "nope")
    assert (criteria.exit_code, "Recipes that declare: " in criteria.stderr) == (5, True)
    assert not (tmp_path / "r").exists()


def test_runs_of_an_own_task_are_reported(tmp_path: Path) -> None:
    own = ["task.name=vowels", "task.module=vowels.py"]
    runs = [str(run) for run in make_experiment(tmp_path, samples=False, settings=own)]
    assert Path(runs[0]).name.startswith("madeup_vowels_")
    result = rlfe(*runs, "-o", str(tmp_path / "r"))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "r" / "pass_at_k.png").is_file()
    assert "madeup_vowels_nobuf" in (tmp_path / "r" / "index.html").read_text()


def test_help_has_examples() -> None:
    assert "Examples:" in rlfe("--help").stdout
