"""Verdicts: the worked table, the boundaries, and one verdict for every input."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.criteria import Criterion, arm_keys, parse_criterion, read_declared
from rlfe.errors import NotFoundError, RequestError
from rlfe.eval.verdicts import Guard, Verdict, decide

TEXT = """
name = "maxrl loses more clipped advantage mass at lag 4"
readout = "clip/wclip_active"
window = { from_step = 21, to_step = 60, reduce = "mean" }
treatment = { advantage = "maxrl", lag.steps = 4 }
control = { advantage = "grpo", lag.steps = 4 }
seeds = [0, 1]
guards = ["all_runs_finished", "control_above_zero"]
validated = { ratio_min = 1.5, gap_over_seed_range = 2.0, excess_buckets = ["1", "2"], excess_share_min = 0.5 }
refuted = { ratio_below = 1.2, gap_within_seed_range = 1.0 }

[[support]]
readout = "eval/gsm8k/pass@8"
effect = "drop(treatment) - drop(control)"
at_least_points = 3.0
"""  # noqa: E501  (as printed in docs/statistics.md)


def entry(**changes: Any) -> dict[str, Any]:
    return {**tomllib.loads(TEXT), **changes}


STUDY = parse_criterion(entry())
NAN = float("nan")


def verdict(
    treatment: tuple[float | None, ...],
    control: tuple[float | None, ...],
    share: float | None = 0.7,
    criterion: Criterion = STUDY,
    guards: tuple[Guard, ...] = (),
) -> str:
    a, b = dict(enumerate(treatment)), dict(enumerate(control))
    return decide(criterion, a, b, excess_share=share, guards=guards).verdict


@pytest.mark.parametrize(
    ("treatment", "control", "share", "expected"),
    [
        ((0.30, 0.32), (0.19, 0.20), 0.7, "validated"),
        ((0.30, 0.32), (0.19, 0.20), 0.3, "inconclusive"),
        ((0.28, 0.34), (0.19, 0.20), 0.7, "inconclusive"),
        ((0.24, 0.36), (0.19, 0.20), 0.7, "refuted"),
        ((0.25, 0.26), (0.19, 0.20), 0.7, "inconclusive"),
        ((0.22, 0.23), (0.19, 0.20), 0.7, "refuted"),
        ((0.30, None), (0.19, 0.20), 0.7, "invalid"),
    ],
)
def test_the_worked_verdicts(
    treatment: tuple[float | None, ...],
    control: tuple[float | None, ...],
    share: float,
    expected: str,
) -> None:
    assert verdict(treatment, control, share) == expected


def test_the_numbers_of_the_worked_table() -> None:
    found = decide(STUDY, {0: 0.30, 1: 0.32}, {0: 0.19, 1: 0.20}, excess_share=0.7).quantities
    assert found.ratio == pytest.approx(1.590, abs=5e-4)
    assert found.gap == pytest.approx(0.115)
    assert found.range == pytest.approx(0.02)


def test_boundary_values_fall_on_the_stated_side() -> None:
    assert verdict((0.30, 0.30), (0.20, 0.20)) == "validated"  # R = 1.5 counts
    assert verdict((0.35, 0.40), (0.25, 0.30)) == "inconclusive"  # gap = 2 * range does not
    assert verdict((0.24, 0.24), (0.20, 0.20)) == "inconclusive"  # R = 1.2 is not below 1.2
    assert verdict((0.30, 0.40), (0.25, 0.25)) == "refuted"  # gap = 1 * range is within it


def test_no_range_with_a_gap_passes_and_without_a_gap_is_refuted() -> None:
    assert verdict((0.30, 0.30), (0.10, 0.10)) == "validated"
    assert verdict((0.20, 0.20), (0.20, 0.20)) == "refuted"


def test_one_failed_guard_makes_it_invalid_and_is_named() -> None:
    guard = Guard(name="fingerprints_ok", ok=False, text="x step 31 does not match")
    decision = decide(STUDY, {0: 0.3, 1: 0.3}, {0: 0.1, 1: 0.1}, excess_share=1, guards=[guard])
    assert decision.verdict is Verdict.INVALID
    assert decision.sentence == "fingerprints_ok: x step 31 does not match"


values = st.one_of(st.none(), st.just(NAN), st.floats(0, 1))


@given(st.tuples(values, values), st.tuples(values, values), values)
def test_every_input_has_exactly_one_verdict_and_order_does_not_matter(
    treatment: tuple[float | None, float | None],
    control: tuple[float | None, float | None],
    share: float | None,
) -> None:
    one = verdict(treatment, control, share)
    assert one in {"invalid", "validated", "refuted", "inconclusive"}
    assert one == verdict(treatment[::-1], control[::-1], share)
    numbers = [*treatment, *control]
    if any(value is None or math.isnan(value) for value in numbers):
        assert one == "invalid"


def test_support_measures_change_no_verdict() -> None:
    other = parse_criterion(entry(support=[]))
    for treatment in ((0.30, 0.32), (0.25, 0.26), (0.22, 0.23)):
        assert verdict(treatment, (0.19, 0.2)) == verdict(treatment, (0.19, 0.2), criterion=other)
    assert other.digest() != STUDY.digest()


def test_one_seed_has_no_range_and_is_invalid() -> None:
    assert verdict((0.3,), (0.1,), criterion=parse_criterion(entry(seeds=[0]))) == "invalid"


def test_a_difference_has_to_lie_outside_the_paired_interval() -> None:
    criterion = parse_criterion(
        entry(validated={"difference_min": 0.02}, refuted={"difference_below": 0.0})
    )

    def of(gap: float, low: float, high: float) -> str:
        return decide(
            criterion, {0: 0.5 + gap, 1: 0.5 + gap}, {0: 0.5, 1: 0.5}, interval=(low, high)
        ).verdict

    assert of(0.05, 0.03, 0.07) == "validated"
    assert of(0.05, 0.01, 0.09) == "inconclusive"
    assert of(-0.05, -0.07, -0.01) == "refuted"
    assert of(-0.05, -0.11, 0.01) == "inconclusive"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"refuted": {"ratio_below": 1.6}}, "can hold together"),
        ({"refuted": {"gap_within_seed_range": 2.1}}, "can hold together"),
        ({"refuted": {"difference_below": 0.1}}, "can hold together"),
        ({"validated": {}}, "states no condition"),
        ({"validated": {"excess_share_min": 0.5}}, "go together"),
        ({"guards": ["luck"]}, 'unknown guard "luck"'),
        ({"readuot": "x"}, "readuot"),
        ({"seeds": []}, "seeds"),
    ],
)
def test_a_criterion_that_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_criterion(entry(**changes))


def test_a_file_of_criteria_is_read_and_a_missing_one_named(tmp_path: Path) -> None:
    path = tmp_path / "report.toml"
    path.write_text("[[criterion]]\n" + TEXT.replace("[[support]]", "[[criterion.support]]"))
    assert read_declared(path) == [STUDY]
    path.write_text("[[criterion")
    with pytest.raises(RequestError, match="not TOML"):
        read_declared(path)
    with pytest.raises(NotFoundError):
        read_declared(tmp_path / "absent.toml")


def test_the_criterion_of_study_3_ships_as_the_document_prints_it() -> None:
    (shipped,) = read_declared(Path("lag-staleness"))
    text = (Path(__file__).parents[1] / "docs" / "statistics.md").read_text()
    printed = tomllib.loads(text.split("```toml\n")[1].split("```")[0])["criterion"]
    assert [shipped] == [parse_criterion(entry) for entry in printed]


def test_arms_are_recipe_keys() -> None:
    assert arm_keys(STUDY.treatment) == {"advantage.name": "maxrl", "lag.steps": 4}
    assert arm_keys({"optim.lr": 1e-6}) == {"optim.lr": 1e-6}
