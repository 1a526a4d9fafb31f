"""GSM8K rule `gsm8k-exact v1`: the table of `docs/judging.md` 8, line by line."""

# ruff: noqa: E501 - tables of texts

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest

from rlfe.errors import RequestError
from rlfe.tasks import get
from rlfe.tasks import gsm8k_answer as rule
from rlfe.tasks.base import Reply
from rlfe.types import Finish, Problem, Status

READ = {
    58: ["58", "####58", "  58  ", "58.", "58,", "58.0", "58.00", "058", "+58", "$58", r"\$58.00",
         "58€", "£58", "¥58", "58%", "58 %", "58 clips", "58 dollars per day", "Answer: 58", "**58**",
         "__58__", "`58`", "$58$", r"\(58\)", r"58\text{ clips}", r"58\mathrm{}", r"58\!", r"\,58",
         "~58", "5.8e1", "５８"],
    -58: ["-58", "−58", "-$58", "$-58"],
    3410: ["3,410", "3{,}410", "3 410", "3\u00a0410", "3\u2009410"],
    1003410: ["1,003,410"],
}  # fmt: skip
NO_ANSWER = [
    "58 or 59", "5, 8", "5-8", "5–8", "60-2", "50 + 8 = 58", "5:08", "34,10", "3,4100", "5.8.1", ".",
    ",", "", "nan", "inf", "1e999", "fifty-eight", "1" * 61, "116/2", r"\frac{116}{2}", "٥٨",
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "text"), [(n, t) for n, texts in READ.items() for t in texts])
def test_a_marker_with_one_number_is_read(wanted: int, text: str) -> None:
    found = rule.answer(f"So it is.\n#### {text}", mode="strict")
    assert found is not None
    assert Fraction(found) == wanted


@pytest.mark.parametrize("text", NO_ANSWER)
def test_a_marker_without_a_single_number_is_no_answer(text: str) -> None:
    assert rule.answer(f"#### {text}", mode="strict") is None


@pytest.mark.parametrize("text", ["58.5", "0.58", "5800", "57.9999999", "-58", "5"])
def test_another_number_is_wrong(text: str) -> None:
    found = rule.answer(f"#### {text}", mode="strict")
    assert found is not None
    assert not rule.is_right(found, Decimal(58))


def test_fractions_in_lowest_terms_are_exact() -> None:
    assert rule.answer("#### 1/2", mode="strict") == Fraction(1, 2)
    assert rule.answer(r"\boxed{\frac{1}{2}}", mode="strict") == Fraction(1, 2)
    assert rule.is_right(rule.answer("#### 1/2", mode="strict"), Decimal("0.5"))


@pytest.mark.parametrize(
    ("reply", "strict", "flexible"),
    [
        ("She has 5 eggs.\n#### 5", 5, 5),
        ("#### 12\nWait.\n#### 14", 14, 14),
        ("#### Step 2: add\nso 7 in all", None, 7),
        ("####\n7", None, 7),
        (r"Thus \boxed{45}. Check: 9 * 5.", 45, 45),
        (r"\boxed{4} no, \boxed{\text{about } 6}", 6, 6),
        (r"so \boxed{4", None, None),
        ("#### 5 or 6, so 7", None, None),
        ("The answer is 18.", None, 18),
        ("the Answer: 3 * 6 = 18 eggs", None, 18),
        ("It costs 12-5", None, 5),
        ("<answer>58</answer>", None, 58),
        ("The total is $1,200.50 today", None, Decimal("1200.50")),
        ("<think>#### 3</think> #### 4", 4, 4),
        ("<think>#### 3", None, None),
        ("#### 42\n\nQuestion: next?\nAnswer: 7\n#### 7", 42, 42),
        ("Question: how many?\nAnswer: 6\n#### 6", 6, 6),
        ("no number at all", None, None),
        ("", None, None),
        ("temperature fell to -5", None, -5),
        ("a = 3, then b = 4, so a+b = 7", None, 7),
    ],
)
def test_where_the_number_is_found(reply: str, strict: object, flexible: object) -> None:
    assert rule.answer(reply, mode="strict") == strict
    assert rule.answer(reply, mode="flexible") == flexible


def test_all_golds_parse_and_all_reference_answers_are_right() -> None:
    task = get("gsm8k")
    for split, count in (("train", 7473), ("test", 1319)):
        problems = task.problems(split)
        assert len(problems) == count
        golds = [rule.gold(p.answer) for p in problems]
        assert all(gold is not None and gold == int(gold) for gold in golds)
        assert all(
            rule.is_right(rule.answer(p.answer, mode="strict"), gold)
            for p, gold in zip(problems, golds, strict=True)
        )


def test_a_gold_that_is_no_number_makes_the_reply_wrong() -> None:
    assert not rule.is_right(rule.answer("#### 5", mode="strict"), rule.gold("#### many"))


def _judged(text: str, style: str, mode: str | None, finish: Finish = Finish.STOP) -> tuple:
    task = get("gsm8k", mode=mode)
    problem = Problem(id="x", task="gsm8k", split="test", prompt="How many?", answer="#### 18")
    prompt = task.prompt(problem, style)
    reply = Reply(key="k", problem=problem, prompt=prompt, text=text, finish=finish)
    ((key, verdict),) = task.judge([reply], None)
    assert key == "k"
    return verdict.status, verdict.facts["strict"], verdict.facts["flexible"]


def test_both_modes_are_recorded_and_the_mode_decides() -> None:
    said = "The answer is 18."
    assert _judged(said, "chat", None) == (Status.NO_ANSWER, False, True)
    assert _judged(said, "base", None) == (Status.PASSED, False, True)
    assert _judged(said, "base", "strict") == (Status.NO_ANSWER, False, True)
    assert _judged("#### 18", "chat", None) == (Status.PASSED, True, True)
    assert _judged("#### 17", "chat", None, Finish.LENGTH)[0] is Status.TRUNCATED
    assert _judged("#### 18", "chat", None, Finish.LENGTH)[0] is Status.PASSED


def test_lm_evals_filters_stand_beside() -> None:
    assert rule.lm_eval_strict("so #### 1,200 and") == "1,200"
    assert rule.lm_eval_flexible("it is $18.50, or 7") == "7"
    assert rule.lm_eval_match("1,200", "...\n#### 1200")
    assert not rule.lm_eval_match("5", "...\n#### 58")


def test_prompts_have_the_known_forms() -> None:
    task = get("gsm8k")
    problem = task.problems("test")[0]
    assert task.prompt(problem, "base").text == f"Question: {problem.prompt}\nAnswer:"
    shown = task.prompt(problem, "base", ["gsm8k/train/0"])
    assert shown.text.startswith("Question: Natalia sold clips")
    assert shown.text.endswith(f"\n\nQuestion: {problem.prompt}\nAnswer:")
    chat = task.prompt(problem, "chat").messages[-1].text
    assert chat.endswith("end with a line `#### <number>`.")
    with pytest.raises(RequestError, match="prompt style"):
        task.prompt(problem, "other")
    with pytest.raises(RequestError, match="no training problems"):
        task.prompt(problem, "base", ["gsm8k/test/0"])


@pytest.mark.parametrize(
    "text",
    ["1" * 200_000, "#" * 200_000, "\\boxed{" * 30_000, "{" * 200_000, "$" * 200_000, "1,000," * 40_000,
     "-" * 200_000, "1 " * 100_000, "Q: 1\n" * 40_000, "\\text{" * 40_000, "answer is " * 30_000],
    ids=["digits", "marks", "boxes", "braces", "dollars", "groups", "hyphens", "blanks", "turns",
         "texts", "says"],
)  # fmt: skip
def test_no_reply_takes_long(text: str) -> None:
    started = time.process_time()
    for mode in ("strict", "flexible"):
        rule.answer(f"{text}\n#### {text}", mode=mode)
    rule.lm_eval_flexible(text)
    assert time.process_time() - started < 3.0
