"""Which settings an evaluation runs with, and what keeps rows apart."""

import dataclasses
from pathlib import Path

import pytest

from rlfe.errors import RequestError
from rlfe.eval import conditions, plan
from rlfe.eval.merge import Row
from rlfe.eval.settings import (
    Settings,
    budget,
    effective_sampling,
    resolve,
    sample_facts,
    sample_key,
    settings_text,
)
from rlfe.schema import EvalTask
from rlfe.types import Prompt

PROMPTS = [Prompt(format="toy-v1", text="a", stop=("x",)), Prompt(format="toy-v1", text="b")]


def resolved(
    section: EvalTask | None = None, style: str | None = "base", **flags: object
) -> Settings:
    return resolve("gsm8k", section=section, flags=flags, style=style, max_len=4096)


def test_defaults_are_those_of_the_document() -> None:
    settings = resolved()
    assert (settings.n, settings.temperature, settings.top_p) == (8, 0.6, 0.95)
    assert (settings.max_tokens, settings.mode, settings.limit) == (3072, "flexible", None)
    plus = resolve("mbpp_plus", section=None, flags={}, style="chat", max_len=4096)
    assert (plus.n, plus.mode, plus.style) == (160, None, "chat")


def test_a_flag_wins_over_a_section_and_a_section_over_the_default() -> None:
    section = EvalTask(n=4, temperature=0.9, prompt="chat", mode="strict")
    assert resolved(section).n == 4
    assert resolved(section).mode == "strict"
    assert resolved(section).style == "chat"
    assert resolved(section, n=2, temperature=0.5).temperature == 0.5
    assert resolved(section, prompt="base").style == "base"


def test_an_unknown_prompt_style_is_never_guessed() -> None:
    with pytest.raises(RequestError, match="--prompt base"):
        resolved(style=None)


def test_greedy_copies_and_impossible_values_are_refused() -> None:
    assert effective_sampling(n=1, temperature=0.0, max_tokens=5)["top_p"] == 1.0
    for wrong in ({"n": 2, "temperature": 0.0}, {"n": 1, "temperature": -0.1}):
        with pytest.raises(RequestError):
            effective_sampling(**wrong, max_tokens=5)
    with pytest.raises(RequestError):
        effective_sampling(n=1, temperature=1.0, max_tokens=5, top_p=0.0)


def test_the_budget_never_drops_a_problem() -> None:
    assert budget(500, 3072, 4096) == ("fits", 3072)
    assert budget(1025, 3072, 4096) == ("shorten", 3071)
    assert budget(4095, 3072, 4096) == ("shorten", 1)
    assert budget(4096, 3072, 4096) == ("fail_problem", 0)


def test_every_setting_but_n_k_and_limit_changes_the_sample_key() -> None:
    def key(settings: Settings, data: str = "d", engine: str = "transformers") -> str:
        facts = sample_facts(settings, PROMPTS, data_sha256=data, engine={"sampler": engine})
        return sample_key(facts)

    one = resolved()
    same = ({"n": 16}, {"ks": (1,)}, {"limit": 3}, {"mode": "strict"})
    for change in same:
        assert key(dataclasses.replace(one, **change)) == key(one)
    other = (
        {"temperature": 0.7}, {"top_p": 0.9}, {"max_tokens": 5}, {"max_len": 99}, {"seed": 1},
        {"style": "chat"}, {"examples": ("gsm8k/train/1",)}, {"thinking": False},
    )  # fmt: skip
    keys = {key(dataclasses.replace(one, **change)) for change in other}
    keys |= {key(one), key(one, data="e"), key(one, engine="vllm")}
    assert len(keys) == len(other) + 3


def test_the_settings_text_names_n_limit_and_mode_and_changes_with_the_rule() -> None:
    settings = dataclasses.replace(resolved(), limit=20)
    text = settings_text({"a": 1}, settings, "rule v1")
    assert text.endswith("-n8-first20-flexible")
    assert settings_text({"a": 1}, settings, "rule v2") != text


def test_steps_are_ranges_numbers_and_the_last() -> None:
    assert plan.parse_steps("30:100:30,last") == (frozenset({30, 60, 90}), True)
    assert plan.parse_steps("7, 9") == (frozenset({7, 9}), False)
    for wrong in ("", "x", "3:1", "1:9:0", "last,-1"):
        with pytest.raises(RequestError, match="is no step"):
            plan.parse_steps(wrong)


def test_the_context_of_a_model_bounds_the_length(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 2048}}')
    assert plan.context_of(tmp_path) == 2048
    (tmp_path / "config.json").write_text("{}")
    assert plan.context_of(tmp_path) > 10**9


def row(step: int, score: str, task: str = "gsm8k", k: int = 1) -> Row:
    return {"cell": "x", "step": str(step), "task": task, "k": str(k), "score": score}


def test_conditions_hold_for_every_trained_checkpoint() -> None:
    wanted = [conditions.parse("gsm8k/pass@1>=0.3")]
    assert conditions.unmet(wanted, [row(0, "0.1"), row(30, "0.3")]) == []
    assert len(conditions.unmet(wanted, [row(30, "0.29"), row(60, "0.4"), row(90, "")])) == 2
    assert conditions.unmet(wanted, [row(0, "0.1")]) == ["gsm8k/pass@1>=0.3: x step 0 has 0.1000"]
    for wrong in ("gsm8k/pass@1", "gsm8k/pass@1>=35", "a b/pass@1>0", "gsm8k/pass@1>=e"):
        with pytest.raises(RequestError, match="is no condition"):
            conditions.parse(wrong)
