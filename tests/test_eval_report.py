"""The report: what it says, that it stands alone, and that it works in a browser."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.errors import NotFoundError, RequestError
from rlfe.eval.leaks import ALIKE, Texts, likeness, overlap, source_wordings, words
from rlfe.eval.report.analysis import ONE_SEED
from rlfe.eval.report.gather import read_groups, read_runs
from rlfe.eval.report.page import page
from rlfe.eval.report.series import state_of
from rlfe.eval.report.write import build, read_clusters, write
from rlfe.types import Problem
from tests.report_data import MODEL, make_experiment

NOBUF, REPLAY = f"{MODEL}_mbpp_nobuf_lr6e6", f"{MODEL}_mbpp_hardcd_lam0p1_lr6e6"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experiment")
    runs = read_runs(make_experiment(root))
    analysis, payload = build(runs)
    write(root / "report", "Made up <b>", analysis, payload)
    (root / "payload.json").write_text(json.dumps(payload))
    return root


@pytest.fixture(scope="module")
def payload(experiment: Path) -> dict:  # type: ignore[type-arg]
    return json.loads((experiment / "payload.json").read_text())  # type: ignore[no-any-return]


def test_everything_is_there_with_the_trained_task_first(payload: dict) -> None:  # type: ignore[type-arg]
    assert [g["task"] for g in payload["groups"]] == ["mbpp_plus", "gsm8k", "mbpp_base"]
    assert [(p["cell"], p["step"]) for p in payload["groups"][0]["points"]] == [
        (MODEL, 0),
        *((REPLAY, s) for s in (30, 60, 90)),
        *((NOBUF, s) for s in (30, 60, 90)),
    ]
    assert ONE_SEED in payload["notes"]


def test_scores_are_the_means_of_the_counts(payload: dict) -> None:  # type: ignore[type-arg]
    for group in payload["groups"]:
        for point in group["points"]:
            mean = sum(point["correct"]) / len(point["correct"]) / group["n"]
            assert point["score"][0] == pytest.approx(mean, abs=5e-5)
            assert point["low"][0] <= point["score"][0] <= point["high"][0]


def test_replay_forgets_less_and_the_answer_says_it_with_an_interval(payload: dict) -> None:  # type: ignore[type-arg]
    paths = {path["cell"]: path for path in payload["paths"]}
    assert paths[REPLAY]["forgetting"][-1] < paths[NOBUF]["forgetting"][-1]
    assert paths[NOBUF]["steps"] == [0, 30, 60, 90]
    assert any("no difference shown (" in text or "different" in text for text in payload["answer"])
    assert all(re.search(r"\[-?[\d.]+, -?[\d.]+\]", text) for text in payload["answer"])


def test_arms_are_compared_once_at_the_last_common_step(payload: dict) -> None:  # type: ignore[type-arg]
    (entry,) = payload["groups"][0]["arms"]
    assert {entry["a"], entry["b"], entry["step"]} == {REPLAY, NOBUF, 90}
    assert entry["holm"]["1"] == pytest.approx(entry["p"][0], abs=1e-4)


def test_the_page_stands_alone_and_is_small(experiment: Path) -> None:
    text = (experiment / "report" / "index.html").read_text()
    assert len(text) < 3_000_000
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "<title>Made up &lt;b&gt;</title>" in text
    data = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["groups"]
    assert "\\u003c/script>" in data  # a sample holds a tag and cannot end the data


def test_the_same_runs_give_the_same_bytes(experiment: Path, tmp_path: Path) -> None:
    analysis, payload = build(read_runs([experiment / "runs" / n for n in (NOBUF, REPLAY)]))
    for file in write(tmp_path / "again", "Made up <b>", analysis, payload):
        assert file.read_bytes() == (experiment / "report" / file.name).read_bytes(), file.name


def test_tables_and_figures_are_written_beside(experiment: Path) -> None:
    names = {file.name.split("_")[0].split(".")[0] for file in (experiment / "report").iterdir()}
    assert names == {"index", "scores", "pass", "gain", "difference"}
    lines = (experiment / "report" / "scores.csv").read_text().splitlines()
    assert len(lines) == 1 + 7 * (16 + 16 + 8)
    assert "| cell | step | pass@1 |" in (experiment / "report" / "scores.md").read_text()


def test_an_incomplete_checkpoint_is_named_and_not_compared(tmp_path: Path) -> None:
    import pyarrow.parquet

    (run, _) = make_experiment(tmp_path, samples=False)
    path = run / "evals" / "scores_counts.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.slice(1), path)
    _, payload = build(read_runs([run]))
    assert any("1 problems missing" in note for note in payload["notes"])
    assert (run.name, 30) not in [(p["cell"], p["step"]) for p in payload["groups"][0]["points"]]


def test_a_run_whose_record_says_that_it_diverged_is_collapsed(tmp_path: Path) -> None:
    folders = make_experiment(tmp_path, samples=False)
    facts = {"ended": "5 steps in a row had a non-finite loss", "ended_by": "diverged"}
    (folders[0] / "provenance.json").write_text(json.dumps(facts))
    runs = read_runs(folders)
    groups = read_groups(runs)
    states = {run.name: state_of(run, groups) for run in runs}
    diverged, other = (states[folder.name] for folder in folders)
    assert diverged is not None
    assert other is not None
    assert (diverged.kind, diverged.step) == ("collapsed", 90)
    assert other.kind != "collapsed"


def test_seeds_are_averaged_and_the_note_about_one_seed_goes(tmp_path: Path) -> None:
    runs = read_runs(make_experiment(tmp_path, seeds=(0, 1), samples=False))
    _, payload = build(runs)
    assert ONE_SEED not in payload["notes"]
    means = payload["groups"][0]["seeds"]
    assert {entry["seeds"] for entry in means} == {2}
    assert all(entry["both_low"] < entry["mean"] < entry["both_high"] for entry in means)
    assert {entry["runs"] for entry in payload["limits"]} == {2}
    assert len(payload["groups"][0]["arms"]) == 2


def test_arms_are_compared_at_equal_gain_and_checkpoints_by_their_front(payload: dict) -> None:  # type: ignore[type-arg]
    matched = {entry["cell"]: entry["forgetting"] for entry in payload["matched"]}
    assert matched.keys() == {REPLAY, NOBUF}
    assert matched[REPLAY] < matched[NOBUF]
    assert any(name.startswith(REPLAY) for name in payload["front"])
    assert [(entry["arm"], entry["limit"]) for entry in payload["limits"]] == [
        ("hardcd_lam0p1", 6e-6), ("nobuf", 6e-6),
    ]  # fmt: skip


def test_retention_and_sampling_errors_stand_with_every_score(payload: dict) -> None:  # type: ignore[type-arg]
    plus = payload["groups"][0]
    for entry in plus["against_base"]:
        value, low, high = entry["retention"]
        assert low <= value <= high
    assert all(point["sampling_se"][0] > 0 for point in plus["points"])
    assert plus["points"][0]["sampling_method"][-1].endswith("parametric bootstrap")


def test_problems_that_belong_together_widen_the_error(experiment: Path, tmp_path: Path) -> None:
    file = tmp_path / "clusters.csv"
    lines = [f"mbpp/{i},{'easy' if i % 2 else 'hard'}" for i in range(20)]
    file.write_text("problem,cluster\n" + "\n".join(lines) + "\n")
    runs = read_runs([experiment / "runs" / NOBUF])
    _, found = build(runs, clusters=read_clusters(file))
    assert found["groups"][0]["points"][0]["cluster_se"][0] > 0
    assert "cluster_se" not in found["groups"][1]["points"][0]
    file.write_text("a,b\n")
    with pytest.raises(RequestError, match="problem and cluster"):
        read_clusters(file)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="absent"):
        read_runs([tmp_path / "absent"])
    (tmp_path / "x").mkdir()
    with pytest.raises(NotFoundError, match=r"config\.toml"):
        read_runs([tmp_path / "x"])


def test_runs_without_anything_to_report_are_refused(tmp_path: Path) -> None:
    (run, _) = make_experiment(tmp_path, samples=False)
    shutil.rmtree(run / "evals")
    shutil.rmtree(tmp_path / "runs" / "_base")
    (run / "metrics.jsonl").unlink()
    assert read_groups(read_runs([run])) == []
    with pytest.raises(RequestError, match="rlfe eval"):
        build(read_runs([run]))


def problem(name: str, text: str, entry: str = "") -> Problem:
    return Problem(id=name, task="t", split="s", prompt=text, entry_point=entry)


def test_near_duplicates_are_listed_and_shared_ids_found() -> None:
    training = [problem("mbpp/1", "Write a function to sort a list of tuples by last element.")]
    training += [problem("mbpp/2", "Count vowels.", "count")]
    scored = [
        problem("mbpp_plus/9", "Write a function to sort the list of tuples by last element.")
    ]
    scored += [problem("mbpp_plus/2", "Count words of a text.", "count")]
    found = overlap(training, scored, same_source=True)
    assert found.shared_ids == ("2",)
    assert [(t.training, t.evaluation, t.why) for t in found.twins] == [
        ("mbpp/1", "mbpp_plus/9", "text"),
        ("mbpp/2", "mbpp_plus/2", "function name"),
    ]
    assert likeness(frozenset(), frozenset()) == 0.0


def test_the_packaged_problems_are_disjoint_by_id() -> None:
    from rlfe.tasks import get

    found = overlap(get("mbpp").problems("train"), get("mbpp_plus").problems("test"), True)
    assert (found.training, found.evaluation, found.shared_ids) == (320, 378, ())
    assert ("mbpp/820", "mbpp_plus/455") in {(t.training, t.evaluation) for t in found.twins}


def test_what_mbpp_plus_rewords_is_compared_in_both_wordings() -> None:
    from rlfe.tasks import get

    sets = get("mbpp").problems("train"), get("mbpp_plus").problems("test")
    pairs = {("mbpp/831", "mbpp_plus/564"), ("mbpp/528", "mbpp_plus/290")}
    asked = overlap(*sets, True)
    assert not pairs & {(t.training, t.evaluation) for t in asked.twins if t.why == "text"}
    both = overlap(*sets, True, source_wordings("mbpp_plus"))
    assert pairs <= {(t.training, t.evaluation) for t in both.twins if t.why == "text"}
    assert [sum(t.why == "text" for t in found.twins) for found in (asked, both)] == [49, 65]


@given(st.lists(st.frozensets(st.sampled_from("abcdefghijkl"), max_size=8), min_size=1, max_size=9))
def test_the_nearest_text_is_found_without_comparing_with_all(sets: list[frozenset[str]]) -> None:
    mine, *others = sets
    problems = [problem(f"p/{i}", " ".join(sorted(found))) for i, found in enumerate(others)]
    exact = [(likeness(words(" ".join(mine)), words(p.prompt)), p.id) for p in problems]
    best = max((pair for pair in exact if pair[0] >= ALIKE), default=(0.0, ""))
    assert Texts(problems).nearest(words(" ".join(mine))) == best


PROBE = """
<script>
window.addEventListener("error", (e) => document.body.setAttribute("data-error", e.message));
console.error = (text) => document.body.setAttribute("data-error", text);
</script>
"""
MOVES = """
<script>
const slider = document.getElementById("step");
slider.value = "0"; slider.dispatchEvent(new Event("input"));
document.body.setAttribute("data-step", document.getElementById("step-text").textContent);
const task = document.getElementById("group");
task.value = "1"; task.dispatchEvent(new Event("change"));
document.getElementById("heat").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
document.getElementById("theme").click();
document.body.setAttribute("data-theme", document.documentElement.dataset.theme);
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_it_the_slider_moves_and_nothing_complains(
    experiment: Path, tmp_path: Path
) -> None:
    text = (experiment / "report" / "index.html").read_text()
    probe = tmp_path / "probe.html"
    probe.write_text(text.replace("<body>", f"<body>{PROBE}").replace("</body>", f"{MOVES}</body>"))
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom",
         probe.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None, done.stderr[-500:]
    assert "data-error" not in body[0], html.unescape(body[0])
    assert 'data-step="30"' in body[0]
    assert "data-theme=" in body[0]
    assert done.stdout.count("<svg") >= 8
    assert "gsm8k/" in done.stdout.split('id="detail"')[1][:400]


def test_the_command_needs_no_torch(experiment: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from rlfe.cli.main import run\n"
        f"sys.exit(run({['report', *map(str, sorted((experiment / 'runs').iterdir()))]} "
        f"+ ['-o', {str(tmp_path / 'out')!r}], {{}}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "points [" in done.stdout
    assert (tmp_path / "out" / "index.html").is_file()


def test_an_empty_payload_still_makes_a_page() -> None:
    names = ("runs", "groups", "paths", "matched", "front", "limits", "stability", "notes",
             "answer", "training", "settings", "leaks", "verdicts", "comparisons")  # fmt: skip
    kl: dict[str, list[object]] = {"points": [], "fits": []}
    text = page({**{name: [] for name in names}, "samples": {}, "kl": kl}, "Nothing")
    assert "<h1>Nothing</h1>" in text
