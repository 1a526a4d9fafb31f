"""From replies to programs: fences, prose, stops, asserts, cut ends, and linear time."""

# ruff: noqa: E501 - tables of texts

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfe.tasks.extract import extract

ADD = "def add(a, b):\n    return a + b\n"


def program(text: str, **settings: object) -> str:
    return extract(text, entry_point="add", **settings).program.strip()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        (ADD, ADD),
        (f"```python\n{ADD}```", ADD),
        (f"Sure!\n~~~py\n{ADD}~~~\nDone.", ADD),
        (f"````\n{ADD}````", ADD),
        (f"  1. So:\n   ```python\n   {ADD.replace(chr(10), chr(10) + '   ')}\n   ```", ADD),
        (f"```python\n{ADD}", ADD),
        (f"<think>def add(a, b): return 0</think>\n{ADD}", ADD),
        (f"I think so.</think>```python\n{ADD}```", ADD),
        ("<think>```python\ndef add(a, b): return 0\n```", ""),
        (f"```python\ndef add(a, b): return 0\n```\nBetter:\n```python\n{ADD}```", ADD),
        (f"```bash\npip install x\n```\n```python\n{ADD}```\n```\nadd(1, 2)\n```", ADD),
        (f"\ufeff{ADD}", ADD),
        (ADD.replace("\n", "\r\n"), ADD),
        (f"Here is the code:\n{ADD}\nHope that helps!", ADD),
        (f"[BEGIN]\n{ADD}[DONE]\n[BEGIN]\ndef other(): pass\n[DONE]", ADD),
        (f"{ADD}\ndef next_problem(x):\n    return x +", ADD),
        (f"{ADD}assert add(1, 1) == 3\n", ADD),
        (f"{ADD}\nprint(add(1, 'cut", ADD),
        ("", ""),
        ("I cannot do that.", ""),
        ("def sum_two(a, b):\n    return a + b\n", ""),
        ("```python\nadd = lambda a, b: a + b\n```", "add = lambda a, b: a + b"),
        ("```add = lambda a, b: a + b\n```", "add = lambda a, b: a + b"),
        ("```python\nfrom operator import add\n```", "from operator import add"),
        ("for add in [max]:\n    pass\n", "for add in [max]:\n    pass"),
        ("globals()['add'] = max\n", "globals()['add'] = max"),
        (f"```python\n{ADD}x = 1\nassert x == 2; y = 3\n```", f"{ADD}x = 1\npass; y = 3"),
        (f"```python\ntable = {{}}\ntable.update(a=1)\n{ADD}```",
         f"table = {{}}\ntable.update(a=1)\n{ADD}"),
        ("```python\nfrom __future__ import annotations\n@staticmethod\ndef add(a, b): return a\n```",
         "from __future__ import annotations\n@staticmethod\ndef add(a, b): return a"),
        (f"```python\ndef half(x): return x\n```\nthen\n```python\nhalf(1)\n{ADD}```",
         f"def half(x): return x\n\nhalf(1)\n{ADD}"),
    ],
)  # fmt: skip
def test_the_program_in_a_reply(reply: str, wanted: str) -> None:
    assert program(reply) == wanted.strip()


def test_a_docstring_with_a_fence_does_not_end_the_block() -> None:
    code = 'def add(a, b):\n    """\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b'
    assert program(f"```python\n{code}\n```\nbye") == code


def test_a_completion_goes_behind_its_prompt_and_ends_at_a_stop_string() -> None:
    prompt = 'def add(a, b):\n    """Add."""\n'
    found = extract(
        "    return a + b\n\nprint(add(1, 2))", entry_point="add", continues_code=True,
        prefix=prompt, stop=("\nprint(",),
    )  # fmt: skip
    assert found.program.strip() == f"{prompt}    return a + b"


def test_a_continued_fence_ends_at_its_closing_line() -> None:
    assert program(f"{ADD}```\nThis adds.", continues_code=True) == ADD.strip()
    assert program(f"```python\n{ADD}```\nThis adds.", continues_code=True) == ADD.strip()


def test_a_block_never_closed_before_the_next_one_does_not_swallow_it() -> None:
    reply = f"```python\ndef add(a, b):\n    return 0\nWait.\n```python\n{ADD}```"
    assert program(reply) == ADD.strip()


def test_a_nul_or_a_surrogate_breaks_nothing() -> None:
    assert program("def add(a, b):\n    return '\0'\n").startswith("def add")
    assert program(f"x = '\ud800'\n{ADD}") != "crash"
    assert program(f"x = '\\ud800'\n{ADD}") == f"x = '\\ud800'\n{ADD}".strip()


def test_a_broken_program_is_kept_so_that_it_counts_as_a_syntax_error() -> None:
    assert program("```python\ndef add(a, b):\n    total = a +") != ""


def test_what_was_found_is_told() -> None:
    found = extract(f"```python\n{ADD}```", entry_point="add")
    assert (found.had_fence, found.was_cut) == (True, False)
    found = extract(f"{ADD}and that is all", entry_point="add")
    assert (found.had_fence, found.was_cut) == (False, True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(
    ["```", "```python", "def add(a, b):", "    return a + b", "assert add(1, 2) == 3", "'''",
     '"""', "text that is prose", "(", "x = [", "    ", "<think>", "</think>", "[BEGIN]", "\0", "~~~"]
), max_size=14))  # fmt: skip
def test_any_text_gives_a_program_or_none_and_never_an_exception(lines: list[str]) -> None:
    text = "\n".join(lines)
    for continues in (False, True):
        found = extract(text, entry_point="add", continues_code=continues)
        assert found.program == "" or "add" in found.program


RAMBLING = (
    "Wait, let me think about this again. The function should take two numbers (a, b).\n" * 160
)
CODE = "".join(f"def f{i}(x):\n    y = x + {i}\n    return [y, (x, {i})]\n" for i in range(120))


@pytest.mark.parametrize(
    "text",
    [RAMBLING, f"{RAMBLING}```python\n{ADD}```\n{RAMBLING}", f"{CODE}def g(", f"{CODE}{RAMBLING}",
     "```python\n" * 900, f"```python\n{CODE}{'x = (' * 30}", "x = 1\nsome prose here\n" * 500],
    ids=["prose", "prose and code", "cut code", "code and prose", "fences", "open brackets", "mixed"],
)  # fmt: skip
def test_three_thousand_tokens_take_milliseconds(text: str) -> None:
    best = min(_seconds(text) for _ in range(5))
    assert best < 0.1  # 10 ms is the goal; quadratic time would be seconds, a busy machine is not


def _seconds(text: str) -> float:
    started = time.process_time()
    extract(text, entry_point="add")
    return time.process_time() - started
