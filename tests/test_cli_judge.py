"""`rlfe judge` and `rlfe export`: real files, counts, pass@k, refusals, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlfe.cli import main, output
from rlfe.cli.judges import make_judge
from rlfe.errors import RlfeError
from rlfe.eval.store import Sample, Store
from rlfe.sandbox.pool import WEAK, Judge
from rlfe.sandbox.verdicts import Verdicts, default_file, key
from rlfe.tasks import get
from rlfe.tasks.base import Reply
from rlfe.types import Finish, Status, Verdict

RIGHT = "def similar_elements(a, b):\n    return tuple(set(a) & set(b))\n"
WRONG = "def similar_elements(a, b):\n    return tuple(a)\n"


@pytest.fixture(autouse=True)
def plain_output() -> None:
    output.configure(quiet=False, verbose=False)


def samples(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rlfe(*words: str, environment: dict[str, str] | None = None) -> int:
    code: int = main.run(list(words), environment or {})
    return code


def test_samples_of_all_kinds_are_judged_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = samples(
        tmp_path / "s.jsonl",
        [
            {"task_id": "Mbpp/2", "solution": RIGHT},
            {"task_id": "Mbpp/2", "completion": WRONG},
            {"problem_id": "mbpp_plus/2", "response": f"Sure:\n```python\n{RIGHT}```"},
            {"task_id": "Mbpp/2", "response": "I cannot."},
        ],
    )
    assert rlfe("judge", "--task", "mbpp_plus", "--samples", file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "rlfe.judge/1"
    assert [row["status"] for row in found["rows"]] == ["passed", "failed", "passed", "no_answer"]
    assert [row.get("base") for row in found["rows"][:3]] == ["passed", "failed", "passed"]
    scores = {(row["task"], row["k"]): row["score"] for row in found["pass_at_k"]}
    assert scores == {("mbpp_base", 1): 0.5, ("mbpp_plus", 1): 0.5}
    assert found["pass_at_k"][0]["of"] == 378
    assert found["run"]["statuses"] == {"passed": 2, "failed": 1, "no_answer": 1}
    assert found["run"]["isolation"]["tier"] in ("namespaces", "filters", "limits")


def test_gsm8k_takes_problem_ids_and_own_golds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"problem_id": "gsm8k/test/0", "response": "so 16-3-4=9, 9*2=18\n#### 18"},
        {"problem_id": "mine", "gold": "1,200", "response": "The answer is $1200."},
    ]
    file = samples(tmp_path / "g.jsonl", rows)
    assert rlfe("judge", "--task", "gsm8k", "--samples", file) == 0
    told = capsys.readouterr()
    assert "passed" in told.out
    assert "2 of the 1319 problems" in told.err
    assert rlfe("judge", "--task", "gsm8k", "--samples", file, "--mode", "strict", "--json") == 0
    statuses = [row["status"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert statuses == ["passed", "no_answer"]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ('{"task_id": "Mbpp/1", "solution": "x"}', 2, "is no problem of mbpp_plus"),
        ('{"task_id": "Mbpp/2"}', 2, "exactly one of the text fields"),
        ('{"task_id": "Mbpp/2", "solution": "x", "completion": "y"}', 2, "exactly one"),
        ("[1]", 2, ":1: not a JSON object"),
        ("{", 2, ":1: not a JSON object"),
        ("", 2, "has no samples"),
    ],
)
def test_a_line_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, words: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    assert rlfe("judge", "--task", "mbpp_plus", "--samples", str(file)) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"\x1f\x8b\x08\0\0", b'{"task_id": "Mbpp/2"}\n\xff\xfe'])
def test_a_binary_file_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    file = tmp_path / "s.jsonl.gz"
    file.write_bytes(data)
    assert rlfe("judge", "--task", "mbpp_plus", "--samples", str(file)) == 2
    told = capsys.readouterr().err
    assert "is no text in UTF-8: byte " in told
    assert "Traceback" not in told


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    row = json.dumps({"gold": 5, "response": "#### 5"})
    file.write_bytes(b"\xef\xbb\xbf" + row.encode() + b"\n")
    assert rlfe("judge", "--task", "gsm8k", "--samples", str(file)) == 0


def test_other_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = samples(tmp_path / "s.jsonl", [{"task_id": "Mbpp/2", "solution": RIGHT}])
    for words, code, said in (
        (["--task", "mbpp_plus", "--samples", str(tmp_path / "none")], 5, "does not exist"),
        (["--task", "mbpp_plsu", "--samples", file], 2, "Did you mean mbpp_plus"),
        (["--task", "mbpp_plus", "--samples", file, "--k", "5"], 2, "k=5 needs at least 5 samples"),
        (["--task", "mbpp_plus", "--samples", file, "--k", "x"], 2, "not a list of numbers"),
        (["--task", "gsm8k", "--samples", file, "--scorer", "evalplus"], 2, "is no problem"),
    ):
        assert rlfe("judge", *words) == code, words
        assert said in capsys.readouterr().err


def test_different_numbers_of_samples_give_counts_and_no_pass_at_k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"task_id": f"Mbpp/{n}", "solution": "x = 1"} for n in (2, 2, 3)]
    file = samples(tmp_path / "s.jsonl", rows)
    assert rlfe("judge", "--task", "mbpp_plus", "--samples", file) == 0
    told = capsys.readouterr()
    assert "no pass@k" in told.err
    assert "pass@" not in told.out


def test_verdicts_are_kept_across_runs_where_there_is_a_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = samples(tmp_path / "s.jsonl", [{"task_id": "Mbpp/2", "solution": RIGHT}])
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ("judge", "--task", "mbpp_plus", "--samples", file, "--json")
    assert rlfe(*words, environment=home) == 0
    first = json.loads(capsys.readouterr().out)["rows"]
    assert default_file(home) is not None
    assert rlfe(*words, environment=home) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == first  # the same seconds: not run again
    assert rlfe(*words, "--fresh", environment=home) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["status"] == "passed"


def test_a_second_run_judges_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rewards too: the judge of a second training run is asked for no program."""
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    task = get("mbpp")
    replies = [
        Reply(key=p.id, problem=p, prompt=task.prompt(p, "chat"), text=p.answer,
              finish=Finish.STOP)
        for p in task.problems("train")[:3]
    ]  # fmt: skip
    with make_judge(home, workers=1) as judge:
        first = dict(task.judge(replies, judge))
    asked: list[Any] = []
    with make_judge(home, workers=1) as judge:
        monkeypatch.setattr(judge, "submit", lambda case, deliver: asked.append(case))
        assert dict(get("mbpp").judge(replies, judge)) == first
    assert asked == []
    with make_judge(home, workers=1, fresh=True) as judge:
        assert judge.verdicts.get(task.verdict_key(replies[0].problem.id, "")) is None
        assert {v.status for _, v in get("mbpp").judge(replies, judge)} == {Status.PASSED}


@pytest.mark.parametrize("kind", ["no database", "no folder"])
def test_a_file_that_is_no_use_is_told_once_and_judging_goes_on(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "rlfe"
    if kind == "no folder":
        place.write_text("a file")
    else:
        place.mkdir()
        (place / "verdicts.sqlite").write_bytes(b"no database at all" * 100)
    file = samples(tmp_path / "s.jsonl", [{"task_id": "Mbpp/2", "solution": RIGHT}] * 2)
    words = ("judge", "--task", "mbpp_plus", "--samples", file)
    assert rlfe(*words, environment={"XDG_CACHE_HOME": str(tmp_path)}) == 0
    assert capsys.readouterr().err.count("verdicts are not kept for other runs") == 1


@pytest.mark.parametrize("tier", ["filters", "limits"])
def test_a_weaker_tier_warns_once_and_says_why(tier: str) -> None:
    told: list[str] = []
    try:
        with Judge(1, jail=tier, warn=told.append) as judge:
            judge.tier["refused"] = {"namespaces": "Operation not permitted"}
            judge._warn_once()
    except RlfeError:
        pytest.skip(f"the tier {tier} is not possible on this system")
    assert len(told) == 2  # at the start, and asked for here
    assert told[0] == WEAK[tier]
    assert told[1].endswith("[namespaces: Operation not permitted]")


def test_timeouts_and_faults_of_ours_do_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "v.sqlite"
    table = Verdicts(path)
    names = {status: key("task", str(status)) for status in Status}
    for status, name in names.items():
        table.put(name, Verdict(status=status, detail="d", seconds=0.5, facts={"right": 1}))
    assert table.get(names[Status.TIMEOUT]) is not None
    assert table.get(names[Status.INFRASTRUCTURE]) is None
    table.close()
    again = Verdicts(path)
    kept = {status for status, name in names.items() if again.get(name) is not None}
    assert kept == set(Status) - {Status.TIMEOUT, Status.INFRASTRUCTURE}
    found = again.get(names[Status.FAILED])
    assert found == Verdict(status=Status.FAILED, detail="d", seconds=0.5, facts={"right": 1})
    assert again.get(key("task", "other")) is None
    again.close()


def evaluated(folder: Path, problems: list[str], settings: str = "3fa9c1d2e0") -> None:
    """A sample file as `rlfe eval` leaves it."""
    path = folder / "evals" / "mbpp_plus" / settings / "step_000030.jsonl.zst"
    facts = {"prompt": {"style": "chat"}}
    with Store(path, "mbpp_plus x").open({"checkpoint": "c", "facts": facts}) as store:
        for name in problems:
            texts = [f"{RIGHT}```\nDone.", "no code here"]
            store.add_block(name, 0, [Sample(text, "stop", 9) for text in texts])


def test_export_writes_what_evalplus_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlfe.tasks import get

    names = [p.id for p in get("mbpp_plus").problems("test")]
    evaluated(tmp_path / "run", names)
    out = tmp_path / "out.jsonl"
    words = ("export", str(tmp_path / "run"), "--step", "30", "--out", str(out))
    assert rlfe(*words) == 0
    assert capsys.readouterr().out.strip() == str(out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 378
    assert rows[0] == {"task_id": "Mbpp/2", "solution": RIGHT.strip()}
    assert rows[1]["solution"] == "pass"  # no program: evalplus wants a row all the same


def test_export_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", str(tmp_path / "out.jsonl")
    assert rlfe("export", str(run), "--out", out) == 5
    assert "no samples of mbpp_plus" in capsys.readouterr().err
    evaluated(run, ["mbpp_plus/2"])
    assert rlfe("export", str(run), "--out", out) == 3
    assert "covers 1 of 378 problems" in capsys.readouterr().err
    evaluated(run, ["mbpp_plus/2"], "0000000000")
    assert rlfe("export", str(run), "--out", out) == 2
    assert "Choose one with --settings" in capsys.readouterr().err
    assert rlfe("export", str(run), "--out", out, "--settings", "0000000000") == 3


def test_the_scorer_evalplus_needs_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlfe.tasks import evalplus_scorer

    file = samples(tmp_path / "s.jsonl", [{"task_id": "Mbpp/2", "solution": RIGHT}])
    words = ("judge", "--task", "mbpp_plus", "--samples", file, "--scorer", "evalplus")
    monkeypatch.setattr(evalplus_scorer, "is_installed", lambda: False)
    assert rlfe(*words) == 2
    assert "pip install 'rlfe[evalplus]'" in capsys.readouterr().err
    monkeypatch.setattr(evalplus_scorer, "is_installed", lambda: True)
    monkeypatch.setattr(
        evalplus_scorer, "run", lambda *given, **more: ([("pass", "fail")], {"judge": 1.0})
    )
    assert rlfe(*words, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["status"], row["base"], row["plus"]) == ("failed", "passed", "failed")
