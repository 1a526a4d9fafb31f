"""Tables: what a row says, what a merge keeps, what a picture shows."""

from pathlib import Path

import numpy as np
import pytest

from rlfe.errors import RequestError
from rlfe.eval import merge
from rlfe.eval.passk import pass_at_all_k
from rlfe.eval.plots import panels, plotted_ks, point_of, write_plot
from rlfe.eval.statistics import draw_weights, over_problems
from rlfe.eval.store import Judged
from rlfe.eval.tables import COLUMNS, number, parquet_bytes, read_parquet
from rlfe.eval.tally import measures
from rlfe.randomness import generator


def row(cell: str, step: int, k: int, score: float | str, task: str = "gsm8k") -> merge.Row:
    values = (cell, step, task, k, score, "", "", "", 5, 8, "abc-n8", "")
    return {name: str(value) for name, value in zip(COLUMNS, values, strict=True)}


def text(*rows: merge.Row) -> str:
    return merge.csv_text(rows, COLUMNS)


def test_steps_sort_as_numbers() -> None:
    rows = [row("x", 100, 1, 0.1), row("x", 30, 10, 0.1), row("x", 30, 2, 0.1)]
    ordered = [(r["step"], r["k"]) for r in merge.sort_rows(rows)]
    assert ordered == [("30", "2"), ("30", "10"), ("100", "1")]


def test_new_rows_replace_old_ones_of_the_same_point_only() -> None:
    old = [row("x", 30, 1, 0.1), row("x", 30, 2, 0.2), row("x", 60, 1, 0.3)]
    kept = merge.usable_rows(old, {merge.point_of(row("x", 30, 1, 0.9))})
    assert kept == [old[2]]


def test_rows_without_a_score_are_not_done_and_not_kept() -> None:
    rows = [row("x", 30, 1, 0.1), row("x", 30, 2, ""), row("x", 60, 1, "nan")]
    assert merge.done_points(rows) == set()
    assert merge.usable_rows(rows, set()) == []


def test_a_cut_line_and_repeated_headers_are_left_out() -> None:
    whole = text(row("x", 30, 1, 0.1)) + text(row("x", 60, 1, 0.25))
    assert len(merge.read_rows(whole)) == 2
    assert len(merge.read_rows(whole[:-1])) == 1
    assert merge.read_rows("") == []
    with pytest.raises(RequestError, match="no column cell"):
        merge.read_rows("a,b\n1,2\n")


def test_the_same_row_twice_is_one_and_two_values_are_refused() -> None:
    once = row("x", 30, 1, 0.1)
    assert merge.read_rows(text(once, once)) == [once]
    with pytest.raises(RequestError, match=r"stands twice: 0\.1 and 0\.2"):
        merge.read_rows(text(once, row("x", 30, 1, 0.2)))


def test_parquet_holds_numbers_and_gives_the_rows_back(tmp_path: Path) -> None:
    rows = [row("x", 30, 1, 0.125), row("x", 60, 1, "")]
    data = parquet_bytes(rows, COLUMNS)
    assert data == parquet_bytes(rows, COLUMNS)
    (tmp_path / "t.parquet").write_bytes(data)
    assert read_parquet(tmp_path / "t.parquet") == rows


def test_numbers_are_written_without_noise() -> None:
    assert number(0.1 + 0.2) == "0.3"
    assert number(1 / 3) == "0.333333333"


def test_the_bootstrap_interval_is_reproducible_and_about_two_errors_wide() -> None:
    source = np.random.default_rng(3)
    p_PK = pass_at_all_k(16, source.binomial(16, source.beta(0.35, 0.3, 378)))
    weights_BP = draw_weights(378, 4000, generator(0, "bootstrap", "t", "x"))
    assert (weights_BP.sum(axis=1) == 378).all()
    low_K, high_K = over_problems(p_PK, weights_BP)
    se_K = p_PK.std(axis=0, ddof=1) / 378**0.5
    assert np.allclose((high_K - low_K) / (2 * 1.96 * se_K), 1, atol=0.04)
    again = draw_weights(378, 4000, generator(0, "bootstrap", "t", "x"))
    assert (again == weights_BP).all()


def test_base_tests_stand_beside_base_and_plus() -> None:
    plus, base = measures("mbpp_plus", None)
    cut = Judged("h", "truncated", "", 0.0, {"base": "passed", "plus": "failed"})
    assert (plus.name, base.name) == ("mbpp_plus", "mbpp_base")
    assert (plus.right(cut), base.right(cut)) == (False, True)
    (flexible,) = measures("gsm8k", None)
    verdict = Judged("h", "failed", "", 0.0, {"strict": False, "flexible": True})
    assert flexible.right(verdict)
    assert not measures("gsm8k", "strict")[0].right(verdict)


BASE, RUN = "tiny", "tiny_mbpp_{}_{}"


def curve_rows() -> list[merge.Row]:
    rows = [row(BASE, 0, 1, 0.5)]
    for arm in ("nobuf", "hardcd_lam0p1"):
        for lr in ("lr1e3", "lr1e4"):
            rows += [row(RUN.format(arm, lr), step, 1, 0.4) for step in (30, 60, 90)]
    return rows


def test_a_plot_has_a_panel_per_rate_and_the_base_in_each() -> None:
    (line,) = panels(curve_rows(), (1,))
    assert [panel.title.split()[-1] for panel in line] == ["lr1e3", "lr1e4"]
    assert [sum(p.lr is None for p in panel.points) for panel in line] == [1, 1]
    assert {p.arm for p in line[0].points} == {"base", "nobuf", "hardcd_lam0p1"}


def test_settings_never_share_a_panel() -> None:
    other = {**row(BASE, 0, 1, 0.9), "settings": "zzz-n8"}
    lines = panels([*curve_rows(), other], (1,))
    assert len(lines) == 2
    assert "zzz-n8" in lines[1][0].title


def test_the_same_rows_give_the_same_picture(tmp_path: Path) -> None:
    assert write_plot(tmp_path / "a.png", curve_rows(), (1,))
    assert write_plot(tmp_path / "b.png", curve_rows(), (1,))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert not write_plot(tmp_path / "c.png", [row(BASE, 0, 1, "")], (1,))
    assert not (tmp_path / "c.png").exists()


def test_the_drawn_ks_are_steady_ones() -> None:
    assert plotted_ks([row(BASE, 0, 1, 0.5)]) == (1,)
    assert plotted_ks([{**row(BASE, 0, 1, 0.5), "n": "160"}]) == (1, 50)
    assert plotted_ks([{**row(BASE, 0, 1, 0.5), "n": "160"}], (1, 8, 160)) == (1, 8)


def test_a_name_that_is_no_run_is_a_base_model() -> None:
    assert point_of(row("smollm2_135m", 0, 1, 0.5)).lr is None
    assert point_of(row(RUN.format("nobuf", "lr1e3"), 30, 1, 0.5)).lr == 1e-3


@pytest.mark.parametrize(
    ("task", "arm", "rows"),
    [
        ("gsm8k", "nobuf", []),  # as `rlfe train` names the arm
        ("vowels", "mine", []),  # the own task is scored itself
        ("gsm8k", "mine", [("tiny_2", 0)]),  # its base model is scored beside it
    ],
)
def test_runs_of_an_own_task_are_curves_and_no_base_models(
    task: str, arm: str, rows: list[tuple[str, int]]
) -> None:
    cells = [*rows, (f"tiny_2_vowels_{arm}_lr1e3", 30), (f"tiny_2_vowels_{arm}_lr1e3", 60)]
    table = [{**row(cell, step, 1, 0.5), "task": task} for cell, step in cells]
    ((panel,),) = panels(table, (1,))
    assert panel.title.splitlines()[1].startswith("tiny_2  ")
    drawn = [(p.arm, p.lr, p.step) for p in panel.points if p.lr is not None]
    assert drawn == [(arm, 1e-3, 30), (arm, 1e-3, 60)]
    assert sum(p.lr is None for p in panel.points) == len(rows)
