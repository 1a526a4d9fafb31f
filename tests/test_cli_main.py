"""The command line: help, exit codes, and one clear line for every way it can end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rlfe.cli import main as cli_main
from rlfe.cli import output
from rlfe.errors import RequestError, RlfeError

RLFE = [sys.executable, "-m", "rlfe"]


def run(monkeypatch, body, *arguments):
    """Run a stand-in command through the real start-up; returns its exit code."""
    command = click.Command("runs", callback=body)
    monkeypatch.setattr(cli_main.Group, "get_command", lambda self, ctx, name: command)
    return cli_main.run(["runs", *arguments], {})


def failing(error):
    def body():
        raise error

    return body


def test_help_lists_commands_in_sections_and_h_is_help():
    for flag in ("--help", "-h"):
        result = CliRunner().invoke(cli_main.cli, [flag])
        assert result.exit_code == 0
    lines = result.output.splitlines()
    for section in ("Experiments:", "Looking:", "Shell:"):
        assert section in lines
    words = [line.split()[0] for line in lines if line.startswith("  ")]
    names = ("sweep", "recipes", "config", "runs", "doctor", "completion")
    assert [word for word in words if word in names] == list(names)


def test_only_commands_that_exist_are_listed():
    names = cli_main.cli.list_commands(click.Context(cli_main.cli))
    folder = Path(cli_main.__file__).parent
    assert names == [name for name in cli_main.COMMANDS if (folder / f"{name}.py").exists()]


def test_the_one_line_helps_cover_every_listed_command():
    assert all(entry.about.endswith(".") for entry in cli_main.COMMANDS.values())
    assert {entry.section for entry in cli_main.COMMANDS.values()} == set(cli_main.SECTIONS)


@pytest.mark.parametrize("name", cli_main.cli.list_commands(click.Context(cli_main.cli)))
def test_every_command_has_help_and_its_module_defines_it(name):
    result = CliRunner().invoke(cli_main.cli, [name, "--help"])
    assert (result.exit_code, result.exception) == (0, None)
    assert result.output.startswith("Usage:")


def test_the_version_is_the_packages(capsys):
    assert cli_main.run(["--version"], {}) == 0
    assert capsys.readouterr().out == "rlfe 0.1.0\n"


def test_an_unknown_command_is_told_the_nearest_one(capsys):
    assert cli_main.run(["recipies", "list"], {}) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[0] == 'error: no command "recipies"; did you mean "recipes"?'


def test_an_unknown_option_is_a_wrong_request_with_the_way_to_the_help(capsys):
    assert cli_main.run(["runs", "--jsn"], {}) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: no such option")
    assert "See rlfe runs --help." in err


@pytest.mark.parametrize("kind", [RlfeError, *RlfeError.__subclasses__()])
def test_an_error_of_ours_gives_its_message_its_hint_and_its_code(monkeypatch, capsys, kind):
    code = run(monkeypatch, failing(kind("what happened", hint="what next")))
    assert code == kind.exit_code
    assert capsys.readouterr().err == "error: what happened\nwhat next\n"


def test_the_exit_codes_are_all_different():
    family = [kind for kind in RlfeError.__subclasses__() if kind.__module__ == "rlfe.errors"]
    codes = [kind.exit_code for kind in (RlfeError, *family)]
    assert sorted(codes) == [1, 2, 3, 4, 5, 6, 7]


def test_ctrl_c_ends_with_130(monkeypatch, capsys):
    assert run(monkeypatch, failing(KeyboardInterrupt())) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_declined_prompt_ends_with_130(monkeypatch):
    assert run(monkeypatch, failing(click.exceptions.Abort())) == 130


def test_a_mistake_of_ours_is_one_line_without_a_traceback(monkeypatch, capsys):
    assert run(monkeypatch, failing(KeyError("x"))) == 1
    err = capsys.readouterr().err
    assert err == "error: KeyError: 'x'\nRun again with -v for the traceback.\n"


def test_v_shows_the_traceback_of_a_mistake_of_ours(monkeypatch, capsys):
    verbose = click.Option(["-v", "v"], is_flag=True)
    command = click.Command("runs", callback=lambda v: failing(KeyError("x"))(), params=[verbose])
    monkeypatch.setattr(cli_main.Group, "get_command", lambda self, ctx, name: command)
    assert cli_main.run(["runs", "-v"], {}) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_named_with_the_file(monkeypatch, capsys):
    error = OSError(28, "No space left on device", "runs/x/metrics.jsonl")
    assert run(monkeypatch, failing(error)) == 1
    line = capsys.readouterr().err.splitlines()[0]
    assert line == "error: disk full while writing runs/x/metrics.jsonl"


def test_a_command_may_return_its_exit_code(monkeypatch):
    assert run(monkeypatch, lambda: 3) == 3
    assert run(monkeypatch, lambda: None) == 0


def test_the_environment_reaches_the_configuration(capsys):
    assert cli_main.run(["config", "show", "--json"], {"RLFE_OPTIM__LR": "3e-6"}) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["optim.lr"]["value"] == 3e-6
    assert rows["optim.lr"]["origin"] == "RLFE_OPTIM__LR"


def test_a_reader_that_has_enough_is_no_error():
    line = f"{sys.executable} -m rlfe config show --about --json | (exec 0<&-; sleep 2)"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ""


def test_the_installed_command_answers():
    script = Path(sys.executable).with_name("rlfe")
    start = [str(script)] if script.exists() else RLFE
    done = subprocess.run([*start, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "rlfe 0.1.0\n")


def test_config_show_prints_every_value_with_its_origin(capsys):
    assert cli_main.run(["config", "show", "--recipe", "tiny", "--set", "optim.lr=3e-6"], {}) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["optim.lr"] == ["optim.lr", "3e-6", "--set"]
    assert lines["run.seed"] == ["run.seed", "0", "default"]
    assert lines["train.steps"][2].startswith("tiny.toml:")


def test_config_show_refuses_settings_that_contradict_each_other(capsys):
    assert cli_main.run(["config", "show", "--set", "advantage.name=dr_grpo"], {}) == 2
    assert "seq-mean-token-sum-norm" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_prints_a_script_for_every_shell(capsys, shell):
    assert cli_main.run(["completion", shell], {}) == 0
    assert "_RLFE_COMPLETE" in capsys.readouterr().out


def complete(shell, line, word, number):
    environment = {**os.environ, "_RLFE_COMPLETE": f"{shell}_complete", "COMP_WORDS": line,
                   "COMP_CWORD": str(number), "COMP_INCOMPLETE": word}  # fmt: skip
    done = subprocess.run(RLFE, env=environment, capture_output=True, text=True, timeout=60)
    return [item.rpartition(",")[2] for item in done.stdout.split()]


def test_the_shell_completes_commands_recipes_and_keys():
    assert complete("bash", "rlfe rec", "rec", 1) == ["recipes"]
    assert complete("powershell", "rlfe rec", "rec", 1) == ["recipes"]
    recipes = complete("bash", "rlfe config show --recipe lr", "lr", 4)
    assert recipes == ["lr-ladder"]
    assert "optim.lr=" in complete("bash", "rlfe config show --set optim.l", "optim.l", 4)


def test_data_goes_to_stdout_and_words_to_stderr(capsys):
    output.table(("name", "n", "mean"), [("a", 10, 0.25), {"name": "bb", "n": None, "mean": 1.0}])
    output.note("a note")
    output.warn("a warning")
    output.hint("Next: rlfe runs")
    output.error(RequestError("wrong", hint="do this"))
    out, err = capsys.readouterr()
    assert out == "name   n  mean\na     10  0.25\nbb     -     1\n"
    lines = ["a note", "warning: a warning", "Next: rlfe runs", "error: wrong", "do this"]
    assert err.splitlines() == lines


def test_quiet_silences_notes_hints_and_progress_only(capsys):
    output.configure(quiet=True)
    try:
        output.note("a note")
        output.hint("a hint")
        with output.progress("judging", 3) as bar:
            bar.advance()
        output.warn("a warning")
        output.result("data")
    finally:
        output.configure(quiet=False)
    out, err = capsys.readouterr()
    assert (out, err) == ("data\n", "warning: a warning\n")


def test_without_a_terminal_progress_is_a_label_and_a_line_every_30_seconds(capsys, monkeypatch):
    seconds = iter([0.0, 10.0, 31.0, 40.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(seconds))
    with output.progress("judging", 90) as bar:
        bar.advance(10)
        bar.advance(10, "mbpp/11")
        bar.advance(10)
    assert capsys.readouterr().err.splitlines() == [
        "judging: 0/90",
        "judging: 20/90 after 31 s mbpp/11",
    ]


def test_a_json_document_has_null_for_nan(capsys):
    output.document({"value": float("nan"), "path": Path("runs/x")})
    assert json.loads(capsys.readouterr().out) == {"value": None, "path": "runs/x"}


def test_runs_lists_progress_checkpoints_and_evaluations(tmp_path, capsys):
    from rlfe import config, records
    from rlfe.rundir import RunDir
    from tests.test_checkpoints import checkpoint

    run = RunDir(tmp_path / "tiny_mbpp_nobuf_lr1e5")
    resolved = config.load(["tiny"])
    run.create(resolved.recipe, resolved.origins)
    for step in (1, 2, 3):
        records.append_jsonl(run.metrics, {"step": step})
    checkpoint(run.checkpoint(2))
    run.checkpoint(3).mkdir()
    run.evals("gsm8k").mkdir(parents=True)
    (run.evals("gsm8k") / "samples.jsonl").write_text("")
    (tmp_path / "_base" / "tiny" / "evals" / "mbpp_plus").mkdir(parents=True)
    assert cli_main.run(["runs", "--runs-dir", str(tmp_path), "--json"], {}) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0] == {
        "cell": "tiny_mbpp_nobuf_lr1e5", "step": 3, "total": 4, "checkpoints": 1, "last": 2,
        "evaluated": ["gsm8k"], "note": "step 3 is incomplete",
    }  # fmt: skip
    assert rows[1]["cell"] == "_base/tiny"


def test_runs_without_a_folder_is_not_found(tmp_path, capsys):
    assert cli_main.run(["runs", "--runs-dir", str(tmp_path / "none")], {}) == 5
    assert "does not exist" in capsys.readouterr().err
