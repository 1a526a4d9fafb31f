"""GSM8K: 7,473 training and 1,319 test problems; the reply's number decides.

What: problems, prompts and verdicts. What not: the rule itself (`gsm8k_answer`). Nothing is run, so
no judge is needed. Try: `get("gsm8k").problems("test")[0].prompt`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlfe.errors import RequestError
from rlfe.tasks import gsm8k_answer as rule
from rlfe.tasks import packaged
from rlfe.tasks.base import Reply
from rlfe.tasks.coding import check_style, cut_short, pick_examples
from rlfe.types import Message, Problem, Prompt, Status, Verdict

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge

FILES = {"train": "gsm8k_train.jsonl.gz", "test": "gsm8k_test.jsonl.gz"}
STOPS = ("\nQuestion:", "\nQ:", "</s>", "<|im_end|>")
WISH = "Reason step by step, and end with a line `#### <number>`."


@functools.cache
def _problems(split: str) -> tuple[Problem, ...]:
    return tuple(
        Problem(
            id=f"gsm8k/{split}/{number}",
            task="gsm8k",
            split=split,
            prompt=row["question"],
            answer=row["answer"],
        )
        for number, row in enumerate(packaged.rows(FILES[split]))
    )


class Gsm8k:
    """Task `gsm8k`. `mode`: strict or flexible decides; None is strict for chat, else flexible."""

    name = "gsm8k"
    version = rule.RULE
    runs_programs = False
    SETTINGS: tuple[str, ...] = ("mode",)

    def __init__(self, *, mode: str | None = None) -> None:
        if mode not in (None, "strict", "flexible"):
            raise RequestError(f"gsm8k mode {mode!r}", hint="Use strict or flexible.")
        self.mode = mode

    def problems(self, split: str) -> tuple[Problem, ...]:
        if split not in FILES:
            raise RequestError(f"task gsm8k has no split {split!r}", hint="It has train, test.")
        return _problems(split)

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        check_style(style, self.name)
        solved = {example.id: example for example in _problems("train")} if examples else {}
        shown = pick_examples(examples, solved, self.name)
        if style == "base":
            before = "".join(f"{_base(e)} {e.answer}\n\n" for e in shown)
            return Prompt(format="gsm8k-base-v1", text=before + _base(problem), stop=STOPS)
        turns: list[Message] = []
        for example in shown:
            turns.append(Message(role="user", text=_chat(example)))
            turns.append(Message(role="assistant", text=example.answer))
        turns.append(Message(role="user", text=_chat(problem)))
        return Prompt(format="gsm8k-chat-v1", messages=tuple(turns))

    def data_sha256(self) -> str:
        return packaged.sha256(FILES["test"])

    def answer(self, reply: Reply) -> str:
        found = rule.answer(reply.text, mode=self._mode(reply))
        return "" if found is None else str(found)

    def judge(
        self, replies: Sequence[Reply], judge: Judge | None = None
    ) -> Iterator[tuple[str, Verdict]]:
        for reply in replies:
            yield reply.key, self._verdict(reply)

    def _mode(self, reply: Reply) -> str:
        return self.mode or ("strict" if reply.prompt.messages else "flexible")

    def _verdict(self, reply: Reply) -> Verdict:
        facts = judged(reply.text, reply.problem.answer)
        mode = self._mode(reply)
        found = facts[f"{mode}_answer"]
        if facts[mode]:
            status, detail = Status.PASSED, ""
        elif found is None:
            status, detail = Status.NO_ANSWER, "no number in the reply"
        else:
            status, detail = Status.FAILED, f"answered {found[:80]}"
        return cut_short(
            Verdict(status=status, detail=detail, facts={**facts, "mode": mode}), reply
        )


def judged(text: str, reference: str) -> dict[str, Any]:
    """Both modes of the rule and lm-eval's two filters: the answers, and whether each is right."""
    wanted = rule.gold(reference)
    facts: dict[str, Any] = {}
    for mode in ("strict", "flexible"):
        found = rule.answer(text, mode=mode)
        facts[mode] = rule.is_right(found, wanted)
        facts[f"{mode}_answer"] = None if found is None else str(found)
    facts["lm_eval_strict"] = rule.lm_eval_match(rule.lm_eval_strict(text), reference)
    facts["lm_eval_flexible"] = rule.lm_eval_match(rule.lm_eval_flexible(text), reference)
    return facts


def _base(problem: Problem) -> str:
    return f"Question: {problem.prompt}\nAnswer:"


def _chat(problem: Problem) -> str:
    return f"{problem.prompt}\n\n{WISH}"
