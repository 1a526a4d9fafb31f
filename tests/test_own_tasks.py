"""DeepCoder's row shapes, other sources for known kinds, and a task in one file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlfe.errors import NotFoundError, RequestError, RlfeError
from rlfe.sandbox.pool import Judge
from rlfe.schema import Data
from rlfe.tasks import deepcoder, get, packaged
from rlfe.tasks.base import Reply
from rlfe.types import Finish, Prompt, Status

SAMPLE = str(packaged.FOLDER / deepcoder.SAMPLE)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(workers=2) as pool:
        yield pool


def coder(**settings: Any) -> Any:
    return get("deepcoder", data=Data(source=SAMPLE), **settings)


def verdict(judge: Judge, task: Any, problem: Any, program: str) -> Any:
    ((_, found),) = task.judge_programs([("k", problem, program)], judge)
    return found


def test_the_solutions_of_all_four_shapes_pass(judge: Judge) -> None:
    problems = coder().problems("train")
    assert [p.id.split("/")[1] for p in problems] == [
        "primeintellect", "taco", "taco", "lcbv5", "lcbv5", "codeforces",
    ]  # fmt: skip
    solved = [p for p in problems if p.answer]
    assert len(solved) == 4
    assert all(verdict(judge, coder(), p, p.answer).correct for p in solved)


def test_a_cut_output_or_a_wrong_one_fails_and_the_share_is_counted(judge: Judge) -> None:
    problem = coder().problems("train")[5]
    assert verdict(judge, coder(), problem, "print(5)").status is Status.FAILED
    found = verdict(judge, coder(fraction=True), problem, "print(5)")
    assert (found.facts["right"], found.facts["total"]) == (1, 3)


def test_scripts_may_end_with_exit_and_read_stdin_in_any_way(judge: Judge) -> None:
    problem = coder().problems("train")[5]
    for reading in (
        "sys.stdin.read()",
        "open(0).read()",
        "sys.stdin.buffer.read().decode()",
        "''.join(iter(sys.stdin.readline, ''))",
        "os.read(0, 10000).decode()",
    ):
        program = (
            f"import os, sys\nwords = list(map(int, {reading}.split()))\n"
            "n, d = words[:2]\na = sum(words[2:])\nif __name__ == '__main__':\n"
            "    print((d - a) // 5 if a + (n - 1) * 10 <= d else -1)\n    exit(0)\n"
        )
        assert verdict(judge, coder(), problem, program).correct, reading
    assert not verdict(judge, coder(), problem, f"{problem.answer}\nexit(1)\n").correct


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \n2", "1\n2\n\n", True),
        ("1\n", "1\n2\n", False),
        ("1\n2\n3", "1\n2", False),
        ("1  2", "1 2", False),
        ("", "", True),
    ],
)
def test_outputs_compare_line_by_line(found: str, wanted: str, same: bool) -> None:
    assert deepcoder.same_output(found, wanted) is same


def test_results_compare_as_values_of_json() -> None:
    assert deepcoder.same_result((1, (2,)), [1, [2]])
    assert deepcoder.same_result(True, [True])
    assert not deepcoder.same_result([1], [2])
    assert not deepcoder.same_result(None, [1, 2])


def test_arguments_are_literals_and_never_evaluated() -> None:
    assert deepcoder.literal("[1, true]") == [1, True]
    assert deepcoder.literal("(1, None)") == (1, None)
    assert deepcoder.literal("__import__('os').getcwd()") == "__import__('os').getcwd()"


def test_an_unknown_shape_is_refused_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for row, words in (({"tests": "[1]"}, "unknown shape"), ({"x": 1}, "no column tests"),
                       ({"tests": "{"}, "row 0")):  # fmt: skip
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(RequestError, match=words):
            get("deepcoder", data=Data(source=str(path))).problems("train")
    with pytest.raises(RequestError, match=r"needs data\.source"):
        get("deepcoder")


def test_the_answer_stands_in_tags_behind_the_thoughts() -> None:
    task = coder(thinking=True)
    problem = task.problems("train")[2]
    prompt = task.prompt(problem, "chat")
    assert prompt.text == "<think>"
    assert "def is_anagram(test, original):" in prompt.messages[0].text
    code = "def is_anagram(a, b):\n    return True"
    found = {
        text: task.answer(
            Reply(key="k", problem=problem, prompt=prompt, text=text, finish=Finish.STOP)
        ).strip()
        for text in (
            f"hm</think><answer>```python\n{code}\n```</answer>",
            f"hm</think><answer>{code}",
            f"hm</think>```python\n{code}\n```",
            f"hm, so <answer>{code}</answer>",
        )
    }
    assert list(found.values()) == [code, code, code, ""]
    assert coder().prompt(problem, "base").text.endswith("</answer>\n")


def test_a_script_without_fence_and_a_class_solution_are_found() -> None:
    task = coder()
    script, method = task.problems("train")[1], task.problems("train")[3]
    for problem, program in ((script, "print(input())"), (method, method.answer.strip())):
        reply = Reply(
            key="k", problem=problem, prompt=task.prompt(problem, "chat"),
            text=f"<answer>{program}</answer>", finish=Finish.STOP,
        )  # fmt: skip
        assert task.answer(reply).strip() == program


def test_rows_of_a_file_are_judged_like_mbpp_by_named_columns(judge: Judge, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"question": "Add.", "checks": ["assert add(1, 2) == 3"]},
        {"question": "Near.", "checks": "assert abs(near() - 1) < 0.1\nassert near() > 0"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(source=str(path), columns={"prompt": "question", "tests": "checks"})
    task: Any = get("mbpp", data=data)
    plain, loose = task.problems("train")
    assert (plain.entry_point, loose.entry_point) == ("add", "near")
    assert verdict(judge, task, plain, "add = lambda a, b: a + b").correct
    found = verdict(judge, task, loose, "def near():\n    return 1.05")
    assert (found.correct, found.facts["judged"]) == (True, "in_jail_assert")
    for wrong in ("def near():\n    return 2", "import os\nos._exit(0)", "x = 1"):
        assert not verdict(judge, task, loose, wrong).correct
    wrong_columns = Data(source=str(path), columns={"prompt": "text"})
    with pytest.raises(RequestError, match="no column text"):
        get("mbpp", data=wrong_columns).problems("train")


def test_rows_of_parquet_are_judged_like_gsm8k(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"q": ["How many?"], "a": ["7"]})
    pyarrow.parquet.write_table(table, path)
    task = get("gsm8k", data=Data(source=str(path), columns={"question": "q", "answer": "a"}))
    problem = task.problems("train")[0]
    prompt = Prompt(format="x", text="y")
    reply = Reply(key="k", problem=problem, prompt=prompt, text="#### 7", finish=Finish.STOP)
    assert [v.correct for _, v in task.judge([reply], None)] == [True]
    assert len(task.data_sha256()) == 64


def test_a_source_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        get("mbpp", data=Data(source=str(tmp_path / "no.jsonl"))).problems("train")
    with pytest.raises(RequestError, match="cannot replace the problems of mbpp_plus"):
        get("mbpp_plus", data=Data(source="x.jsonl"))


OWN = """
def problems(split):
    return [{"id": f"sum/{n}", "prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]

def prompt(problem, style):
    return f"Q {problem.prompt} A"

def judge(problem, reply):
    return problem.answer in reply
"""


def test_a_task_in_one_file_is_recorded_with_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "sums.py"
    path.write_text(OWN)
    task = get("sums", str(path))
    assert task.name == "sums"
    assert task.runs_programs is False
    problem = task.problems("train")[1]
    assert (problem.id, task.prompt(problem, "base").text) == ("sum/1", "Q 1+1? A")
    assert task.prompt(problem, "chat").messages[0].text == "Q 1+1? A"
    ends = []
    for text in ("it is 2", "no"):
        reply = Reply(key="k", problem=problem, prompt=task.prompt(problem, "base"), text=text,
                      finish=Finish.STOP)  # fmt: skip
        ends += [(v.correct, v.facts["right"]) for _, v in task.judge([reply], None)]
    assert ends == [(True, 1.0), (False, 0.0)]
    digest = task.data_sha256()
    path.write_text(OWN + "\n")
    assert get("sums", str(path)).data_sha256() != digest


def test_an_own_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    for text, words in (("x = 1", "lacks problems, prompt, judge"), ("1 / 0", "does not load")):
        path.write_text(text)
        with pytest.raises(RequestError, match=words):
            get("bad", str(path))
    with pytest.raises(NotFoundError):
        get("bad", str(tmp_path / "none.py"))
    path.write_text(OWN.replace("return problem.answer in reply", "return 7"))
    task = get("bad", str(path))
    problem = task.problems("train")[0]
    reply = Reply(key="k", problem=problem, prompt=task.prompt(problem, "base"), text="x",
                  finish=Finish.STOP)  # fmt: skip
    with pytest.raises(RequestError, match="not a bool"):
        list(task.judge([reply], None))


SPLITS = {"primeintellect": ["train"], "taco": ["train"], "lcbv5": ["train", "test"],
          "codeforces": ["test"]}  # fmt: skip


@pytest.fixture
def coder_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> Data:
    """The public data set's subsets and splits, with one problem each."""
    import datasets

    def names(source: str, subset: str, revision: Any = None) -> list[str]:
        return SPLITS[subset]

    def load(source: str, subset: str, *, split: str, revision: Any = None) -> Any:
        assert split in SPLITS[subset]
        return [{"problem": f"{subset} {split}", "tests": [{"input": "1", "output": "1"}]}]

    monkeypatch.setattr(datasets, "get_dataset_split_names", names)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return Data(source="agentica-org/DeepCoder-Preview-Dataset", subsets=tuple(SPLITS))


def test_subsets_without_the_split_are_left_out_and_named(coder_on_the_hub: Data) -> None:
    task: Any = get("deepcoder", data=coder_on_the_hub)
    assert [p.prompt for p in task.problems("train")] == [
        "primeintellect train", "taco train", "lcbv5 train",
    ]  # fmt: skip
    assert [p.prompt for p in task.problems("test")] == ["lcbv5 test", "codeforces test"]
    assert task.notes == [
        "data set agentica-org/DeepCoder-Preview-Dataset has no train split in codeforces",
        "data set agentica-org/DeepCoder-Preview-Dataset has no test split in primeintellect, taco",
    ]
    assert not {p.id for p in task.problems("train")} & {p.id for p in task.problems("test")}


def test_a_split_that_no_subset_has_is_refused(coder_on_the_hub: Data) -> None:
    data = coder_on_the_hub.model_copy(update={"subsets": ("taco", "codeforces")})
    task = get("deepcoder", data=data)
    with pytest.raises(RequestError, match="no split val: taco has train; codeforces has test"):
        task.problems("val")


ROWS = {
    "mbpp": {"prompt": "Add.", "tests": ["assert add(1, 2) == 3"]},
    "gsm8k": {"question": "How many?", "answer": "#### 7"},
    "deepcoder": {"problem": "Say 1.", "tests": [{"input": "", "output": "1"}]},
}


@pytest.mark.parametrize("name", ROWS)
def test_problems_of_a_file_are_the_same_under_every_split(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(ROWS[name]) + "\n") * 3)
    task = get(name, data=Data(source=str(path)))
    kind = "deepcoder/rows" if name == "deepcoder" else "rows"
    assert [p.id for p in task.problems("train")] == [f"{kind}/0", f"{kind}/1", f"{kind}/2"]
    assert [p.id for p in task.problems("test")] == [p.id for p in task.problems("train")]


# Without a time in it: every collection of the tests has to give the same names.
CUT_GZIP = gzip.compress(b'{"prompt": "x"}' * 9, mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("one.json", b'{"prompt": "x"}', "not a list of objects"),
        ("words.json", b'["x"]', "not a list of objects"),
        ("lines.json", b'{"prompt": "x"}\n{"prompt": "y"}\n', "not JSON"),
        ("list.jsonl", b'[{"prompt": "x"}]\n', ":1: not an object"),
        ("cut.jsonl", b'{"prompt": "x"}\n{"pro', ":2: not JSON"),
        ("bytes.jsonl", b'{"prompt": "\xff"}\n', "not UTF-8"),
        ("plain.jsonl.gz", b'{"prompt": "x"}\n', "not a whole gzip file"),
        ("cut.jsonl.gz", CUT_GZIP, "not a whole gzip file"),
        ("text.parquet", b"prompt,tests\n", "not a whole Parquet file"),
        ("cut.parquet", b"PAR1" + b"x" * 40 + b"PAR1", "not a whole Parquet file"),
        ("empty.parquet", b"", "not a whole Parquet file"),
    ],
)
def test_a_broken_source_file_is_named_with_what_to_do(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RequestError, match=words) as caught:
        get("mbpp", data=Data(source=str(path))).problems("train")
    assert f"data.source {path}" in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize(
    ("function", "body", "words"),
    [
        ("problems", "1 / 0", "problems failed for split 'train': ZeroDivisionError"),
        ("problems", "yield 1 / 0", "problems failed for split 'train': ZeroDivisionError"),
        ("problems", "pass", "problems returned None for split 'train'"),
        ("problems", "return ['a']", "problems gave 'a' as problem 0 of split 'train'"),
        ("prompt", "return problem.text", "prompt failed for problem sum/0: AttributeError"),
        ("prompt", "pass", "prompt returned None for problem sum/0"),
        ("judge", "return {}[reply]", "judge failed for problem sum/0: KeyError"),
        ("judge", "pass", "judge returned None for problem sum/0"),
        ("judge", "return 'yes'", "judge gave 'yes' for problem sum/0"),
        ("judge", "return [1]", "judge gave [1] for problem sum/0"),
    ],
)
def test_a_failing_own_function_is_named_with_file_and_problem(
    function: str, body: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "sums.py"
    names = {"problems": "split", "prompt": "problem, style", "judge": "problem, reply"}
    path.write_text(f"{OWN}\ndef {function}({names[function]}):\n    {body}\n")
    task = get("sums", str(path))

    def judged() -> None:
        problem = task.problems("train")[0]
        prompt = task.prompt(problem, "base")
        reply = Reply(key="k", problem=problem, prompt=prompt, text="x", finish=Finish.STOP)
        list(task.judge([reply], None))

    with pytest.raises(RlfeError) as caught:
        judged()
    assert words in caught.value.what
    line = ":12" if "failed" in words else ""
    assert caught.value.what.startswith(f"{path}{line}: {function}")
    assert caught.value.hint
