"""`rlfe eval` on the fake engine: every option, every refusal, every exit code."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlfe.cli import main
from rlfe.config import dump, load
from rlfe.engines.fake import FakeLearner
from rlfe.eval.store import Store

CELL = "fakemodel_mbpp_nobuf_lr1e6"
FAKE = ["prompt.style=base", "engine.sampler=fake", "engine.learner=fake"]
SMALL = ["eval.gsm8k.n=4", "eval.gsm8k.limit=3", "eval.gsm8k.max_tokens=32"]


def make_run(
    root: Path, steps: Sequence[int] = (2, 10), sets: Sequence[str] = (), cell: str = CELL
) -> None:
    run = root / "runs" / cell
    for step in steps:
        (run / f"global_step_{step}").mkdir(parents=True)
        FakeLearner().export(run / f"global_step_{step}")
    model = root / "fakemodel"
    if not model.exists():
        model.mkdir()
        FakeLearner().export(model)
    recipe = load([], [f"model.path={model}", *FAKE, *SMALL, *sets]).recipe
    (run / "config.toml").write_text(dump(recipe))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    return tmp_path


def rlfe(*arguments: str) -> Result:
    """One command line through the real entry, with its exit code."""
    import click

    @click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def shell(ctx: click.Context, words: tuple[str, ...]) -> None:
        ctx.exit(main.run(["eval", *words], {}))

    return CliRunner().invoke(shell, list(arguments))


GLOB = ("--ckpt-glob", "runs/*/global_step_*")


def test_scores_checkpoints_in_numeric_order_and_writes_tables_and_plot(place: Path) -> None:
    result = rlfe(*GLOB, "--base")
    assert result.exit_code == 0, result.stderr
    lines = [line.split()[:5] for line in result.stdout.splitlines()[1:]]
    assert lines == [
        ["fakemodel", "0", "gsm8k", "3", "4"],
        [CELL, "2", "gsm8k", "3", "4"],
        [CELL, "10", "gsm8k", "3", "4"],
    ]
    assert "Next: rlfe push" in result.stderr
    tables = place / "runs" / "_tables"
    assert sorted(file.name for file in tables.iterdir()) == [
        "scores.csv", "scores.parquet", "scores_counts.parquet", "scores_pass_at_k.png",
        "scores_rates.csv", "scores_settings.json",
    ]  # fmt: skip
    rows = (tables / "scores.csv").read_text().splitlines()
    assert rows[0] == "cell,step,task,k,score,low,high,interval,problems,n,settings,missing"
    assert len(rows) == 1 + 3 * 4
    assert (tables / "scores_pass_at_k.png").read_bytes().startswith(b"\x89PNG")
    assert (place / "runs" / CELL / "evals" / "scores.csv").is_file()
    assert (place / "runs/_base/fakemodel/evals/scores.csv").is_file()


def test_a_second_call_draws_nothing_and_gives_the_same_bytes(place: Path) -> None:
    rlfe(*GLOB)
    tables = place / "runs" / "_tables"
    first = {file.name: file.read_bytes() for file in tables.iterdir()}
    result = rlfe(*GLOB)
    assert "0 samples drawn, 0 judged, models loaded: 0" in result.stderr
    assert {file.name: file.read_bytes() for file in tables.iterdir()} == first


def test_json_is_one_document_on_stdout(place: Path) -> None:
    result = rlfe(*GLOB, "--steps", "last", "--json", "--k", "1,2")
    document = json.loads(result.stdout)
    assert document["schema"] == "rlfe.eval/1"
    assert [(row["step"], row["k"]) for row in document["rows"]] == [(10, 1), (10, 2)]
    settings = document["run"]["settings"][document["rows"][0]["settings"]]
    assert settings["sampling"]["top_k"] == -1
    assert settings["prompt"]["style"] == "base"
    assert document["run"]["sampled"] == 12


def test_a_dry_run_says_what_is_to_do_and_touches_nothing(place: Path) -> None:
    rlfe(*GLOB, "--steps", "2")
    before = sorted(place.rglob("*"))
    result = rlfe(*GLOB, "-n", "12", "--dry-run", "--k", "1,12")
    assert result.exit_code == 0, result.stderr
    done = [line.split()[4:6] for line in result.stdout.splitlines()[1:]]
    assert done == [["0", "36"], ["0", "36"]]
    assert "To do it: rlfe eval --ckpt-glob 'runs/*/global_step_*' -n 12 --k 1,12" in result.stderr
    assert sorted(place.rglob("*")) == before
    plan = json.loads(rlfe(*GLOB, "--dry-run", "--json").stdout)
    assert [(row["done"], row["to do"]) for row in plan["rows"]] == [(12, 0), (0, 12)]


def test_k_above_n_is_refused_before_anything_is_loaded(place: Path) -> None:
    result = rlfe(*GLOB, "--k", "1,8")
    assert result.exit_code == 2
    assert "k=8 needs at least 8 samples, gsm8k has n=4" in result.stderr
    assert not (place / "runs" / "_tables").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "nothing to score"),
        (("--ckpt-glob", "runs/nothing/global_*"), "no checkpoint matches"),
        ((*GLOB, "--task", "gsm9k"), "unknown task 'gsm9k'"),
        ((*GLOB, "--steps", "2:x"), '"2:x" in --steps is no step'),
        ((*GLOB, "--steps", "77"), "--steps 77 leaves no checkpoint; steps found: 2, 10"),
        ((*GLOB, "--k", "one"), "is no list of numbers"),
        ((*GLOB, "--temperature", "0"), "n=4 at temperature 0"),
        ((*GLOB, "--top-p", "1.5"), "top_p lies in (0, 1], got 1.5"),
        ((*GLOB, "-n", "0"), "n is at least 1, got 0"),
        ((*GLOB, "--max-tokens", "0"), "max_tokens is at least 1"),
        ((*GLOB, "--limit", "9999"), "limit 9999 is more than the 1319 problems"),
        ((*GLOB, "--limit", "0"), "limit is at least 1"),
        ((*GLOB, "--require", "gsm8k>1"), "is no condition"),
        ((*GLOB, "--set", "eval.gsm8k.m=4"), "unknown key"),
        ((*GLOB, "--recipe", "nope"), "nope"),
        ((*GLOB, "--gpus", "99"), "--gpus 99: this machine has"),
        (("--base",), "takes the runs' own, and no run is given"),
        (("--base", "fakemodel", "--engine", "fake"), "prompt style of mbpp_plus is not known"),
    ],
)
def test_a_wrong_request_names_the_value_and_exits_2(
    place: Path, options: tuple[str, ...], says: str
) -> None:
    result = rlfe(*options)
    assert says in result.stderr
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_model_folder_that_is_not_there_exits_5(place: Path) -> None:
    result = rlfe("--base", "absent/folder/model", "--prompt", "base", "--engine", "fake")
    assert result.exit_code == 5
    assert "does not exist" in result.stderr


def test_an_incomplete_checkpoint_is_named_the_rest_is_scored_and_the_code_is_3(
    place: Path,
) -> None:
    (place / "runs" / CELL / "global_step_2" / "tokenizer.json").unlink()
    (place / "runs" / CELL / "global_step_2" / "tokenizer_config.json").unlink()
    result = rlfe(*GLOB)
    assert result.exit_code == 3
    assert f"runs/{CELL}/global_step_2 is left out: incomplete (no tokenizer" in result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["10"]
    assert "1 incomplete checkpoints were left out" in result.stderr


def test_only_incomplete_checkpoints_exit_3_without_a_table(place: Path) -> None:
    for folder in (place / "runs" / CELL).glob("global_step_*"):
        (folder / "model.safetensors").write_bytes(b"")
    result = rlfe(*GLOB)
    assert result.exit_code == 3
    assert "no complete checkpoint among the 2 folders" in result.stderr


def test_a_stated_condition_that_does_not_hold_exits_3(place: Path) -> None:
    assert rlfe(*GLOB, "--require", "gsm8k/pass@1>=0").exit_code == 0
    result = rlfe(*GLOB, "--require", "gsm8k/pass@4>=0.35")
    assert result.exit_code == 3
    assert f"gsm8k/pass@4>=0.35: {CELL} step 2 has 0.0000" in result.stderr


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("gsm8k/pass@8>=0.1", "pass@8 does not exist with n=4"),
        ("mbpp_plus/pass@1>=0.1", "mbpp_plus is not scored in this call"),
    ],
)
def test_a_condition_that_no_score_can_meet_is_refused_before_work(
    place: Path, condition: str, says: str
) -> None:
    result = rlfe(*GLOB, "--require", condition)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (place / "runs" / CELL / "evals").exists()


@pytest.mark.parametrize("options", [("--workers", "0"), ("--seed", "-1")])
def test_counts_below_their_range_are_refused(place: Path, options: tuple[str, str]) -> None:
    result = rlfe(*GLOB, *options)
    assert result.exit_code == 2
    assert f"{options[1]} is not in the range" in result.stderr


def test_a_damaged_base_model_is_named_before_anything_is_loaded(place: Path) -> None:
    weights = place / "fakemodel" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    result = rlfe(*GLOB, "--base")
    assert result.exit_code == 2
    assert "fakemodel is no complete model: model.safetensors has" in result.stderr
    assert not (place / "runs" / "_tables").exists()


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("rlfe.cli.evaluation_checks.tempfile.mkstemp", refused)
    result = rlfe(*GLOB)
    assert result.exit_code == 1
    assert "runs cannot be written: Read-only file system" in result.stderr


def test_flags_win_over_the_run_and_settings_never_mix(place: Path) -> None:
    rlfe(*GLOB)
    result = rlfe(*GLOB, "-n", "8", "--temperature", "0.7", "--steps", "10")
    assert result.exit_code == 0, result.stderr
    rows = (place / "runs/_tables/scores.csv").read_text().splitlines()[1:]
    assert len({row.split(",")[10] for row in rows}) == 2
    assert len(rows) == 2 * 4 + 8


def test_fresh_drops_what_was_there(place: Path) -> None:
    rlfe(*GLOB)
    assert "24 samples drawn" in rlfe(*GLOB, "--fresh").stderr


def test_retrained_weights_are_refused_and_fresh_is_named(place: Path) -> None:
    rlfe(*GLOB)
    weights = place / "runs" / CELL / "global_step_2" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    result = rlfe(*GLOB)
    assert result.exit_code == 2
    assert "--fresh" in result.stderr
    assert rlfe(*GLOB, "--fresh").exit_code == 0


def test_runs_that_ask_differently_cannot_share_a_base_row(place: Path) -> None:
    make_run(place, (2,), ["prompt.style=chat"], "fakemodel_mbpp_nobuf_lr1e5")
    result = rlfe(*GLOB, "--base")
    assert result.exit_code == 2
    assert "the runs ask gsm8k in 2 ways" in result.stderr
    assert rlfe(*GLOB, "--base", "--prompt", "base").exit_code == 0


def test_a_table_that_contradicts_itself_is_left_as_it_is(place: Path) -> None:
    rlfe(*GLOB)
    table = place / "runs/_tables/scores.csv"
    lines = table.read_text().splitlines()
    wrong = lines[1].split(",")
    wrong[4] = "0.77"
    table.write_text("\n".join([*lines, ",".join(wrong)]) + "\n")
    before = table.read_bytes()
    result = rlfe(*GLOB)
    assert result.exit_code == 2
    assert "stands twice: 0.0 and 0.77" in result.stderr
    assert table.read_bytes() == before


def test_a_run_moved_elsewhere_keeps_its_samples(place: Path) -> None:
    rlfe(*GLOB)
    shutil.move(place / "runs", place / "moved")
    result = rlfe("--ckpt-glob", "moved/*/global_step_*", "--runs-dir", "moved")
    assert "0 samples drawn" in result.stderr


def test_shards_write_apart_and_a_call_without_shard_makes_the_tables_of_one_process(
    place: Path,
) -> None:
    rlfe(*GLOB, "-n", "9")
    tables = place / "runs/_tables"
    whole = {file.name: file.read_bytes() for file in tables.iterdir()}
    shutil.rmtree(tables)
    shutil.rmtree(place / "runs" / CELL / "evals")
    for part in ("1/2", "2/2"):
        result = rlfe(*GLOB, "-n", "9", "--shard", part)
        assert result.exit_code == 0, result.stderr
        assert not tables.exists()
    result = rlfe(*GLOB, "-n", "9")
    assert "0 samples drawn, 0 judged, models loaded: 0" in result.stderr
    assert {file.name: file.read_bytes() for file in tables.iterdir()} == whole
    more = rlfe(*GLOB, "-n", "16", "--shard", "1/2")
    assert f"{2 * 2 * 8} samples drawn" in more.stderr
    wrong = rlfe(*GLOB, "--shard", "3/2")
    assert (wrong.exit_code, '--shard "3/2"' in wrong.stderr) == (2, True)


def test_samples_are_whole_and_readable(place: Path) -> None:
    rlfe(*GLOB)
    files = sorted((place / "runs" / CELL / "evals" / "gsm8k").rglob("*.zst"))
    assert [file.name for file in files] == ["step_000002.jsonl.zst", "step_000010.jsonl.zst"]
    store = Store.read(files[0], "gsm8k gsm8k-exact v1", texts=True)
    assert len(store.blocks) == 3
    assert store.header is not None
    assert store.header["checkpoint"] == f"{CELL}/global_step_2"
    assert all(len(row) == 4 for row in store.verdicts.values())


def test_help_lists_sections_and_examples() -> None:
    result = rlfe("--help")
    assert result.exit_code == 0
    for heading in ("What to score:", "Sampling:", "How:", "Output:", "Examples:"):
        assert heading in result.stdout


def test_an_own_task_of_a_run_is_scored_for_its_base_model_too(place: Path) -> None:
    module = place / "parity.py"
    module.write_text(
        "def problems(split):\n    return [{'prompt': f'{i} ?'} for i in range(5)]\n\n\n"
        "def prompt(problem, style):\n    return problem.prompt\n\n\n"
        "def judge(problem, text):\n    return len(text) % 2 == 0\n"
    )
    shutil.rmtree(place / "runs")
    make_run(place, (2,), [f"task.module={module}", "task.name=parity", "eval.parity.n=4"])
    result = rlfe(*GLOB, "--base", "--task", "parity")
    assert result.exit_code == 0, result.stderr
    tasks = [line.split()[2:5] for line in result.stdout.splitlines()[1:]]
    assert tasks == [["parity", "5", "4"]] * 2


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_deepcoder_runs_are_scored_on_the_source_of_their_own_config(
    place: Path,
) -> None:
    shutil.rmtree(place / "runs")
    test = [{"input": "", "output": "1"}]
    for arm, count, thinking in (("a", 1, "true"), ("b", 3, "false")):
        rows = [{"problem": f"Say {i}.", "tests": test} for i in range(count)]
        source = write_rows(place / f"{arm}.jsonl", rows)
        sets = ["task.name=deepcoder", f"data.source={source}", f"prompt.thinking={thinking}"]
        sets += ["eval.deepcoder.n=4", "eval.deepcoder.max_tokens=32"]
        make_run(place, (2,), sets, cell=f"fakemodel_deepcoder_{arm}_lr1e6")
    result = rlfe(*GLOB, "--task", "deepcoder")
    assert result.exit_code == 0, result.stderr
    sizes = [line.split()[2:5] for line in result.stdout.splitlines()[1:]]
    assert sizes == [["deepcoder", "1", "4"], ["deepcoder", "3", "4"]]


def test_a_benchmark_is_the_packaged_one_and_the_other_source_is_named(place: Path) -> None:
    shutil.rmtree(place / "runs")
    source = write_rows(place / "mine.jsonl", [{"question": "1+1?", "answer": "2"}])
    make_run(place, (2,), ["task.name=gsm8k", f"data.source={source}"])
    result = rlfe(*GLOB, "--task", "gsm8k")
    assert result.exit_code == 0, result.stderr
    assert f"packaged problems, not on data.source {source}" in " ".join(result.stderr.split())
    assert result.stdout.splitlines()[1].split()[2:5] == ["gsm8k", "3", "4"]
