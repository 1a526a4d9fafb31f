"""What the program-writing tasks share: replies to programs, programs to verdicts.

What: extraction, judging each distinct program of a problem once, and statuses. What not: which
tests a problem has (`parts` of the task). Judging starts when `judge` is called, not when its
result is read, so that it overlaps the sampling of the next replies.
"""

from __future__ import annotations

import itertools
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlfe.errors import RequestError, RlfeError
from rlfe.sandbox import verdicts
from rlfe.sandbox.parts import Case, Outcome, Part
from rlfe.sandbox.pool import Judge
from rlfe.tasks.base import Reply
from rlfe.tasks.extract import Extraction, extract
from rlfe.types import Finish, Problem, Prompt, Status, Verdict

FENCE_STOPS = ("\n```\n",)


class CodingTask(ABC):
    """Base of the tasks whose replies are programs."""

    name: str
    version: str
    runs_programs = True
    SETTINGS: tuple[str, ...] = ()  # arguments that `rlfe.tasks.get` may pass on
    LIMITS = ("cpu_seconds", "fraction")  # settings that a verdict depends on
    confirm = False  # a timeout is run again once, alone, before it counts

    @abstractmethod
    def problems(self, split: str) -> tuple[Problem, ...]: ...

    @abstractmethod
    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt: ...

    @abstractmethod
    def data_sha256(self) -> str: ...

    @abstractmethod
    def parts(self, problem: Problem, judge: Judge) -> tuple[Part, ...]:
        """The processes that decide on a program of this problem, in order."""

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        """What a verdict records beside its status."""
        return {
            "right": sum(part.right for part in outcome.parts),
            "total": sum(part.total for part in outcome.parts),
        }

    def case(self, problem: Problem, program: str, judge: Judge) -> Case:
        """The work that decides on one program; its key is (problem id, program)."""
        return Case(
            key=(problem.id, program),
            program=program,
            parts=self.parts(problem, judge),
            confirm=self.confirm,
        )

    def prefix(self, reply: Reply) -> str:
        """Code of the prompt that belongs in front of the reply."""
        return ""

    def answer(self, reply: Reply) -> str:
        """The program in the reply; "" if there is none."""
        return self.extraction(reply).program

    def extraction(self, reply: Reply) -> Extraction:
        """The program in the reply, and how it was found."""
        return extract(
            reply.text,
            entry_point=reply.problem.entry_point,
            continues_code=reply.prompt.continues_code,
            prefix=self.prefix(reply),
            stop=reply.prompt.stop,
        )

    def judge(self, replies: Sequence[Reply], judge: Judge | None) -> Iterator[tuple[str, Verdict]]:
        """Start judging at once; yield (key, verdict) as the programs end, in any order.

        Each program starts when its reply is read, so replies may still be arriving.
        """
        if judge is None:
            raise RlfeError(f"task {self.name} runs programs and needs a judge")
        ready: list[tuple[str, Verdict]] = []
        found: dict[str, tuple[Reply, Extraction]] = {}
        judged = self.judge_programs(self._programs(replies, ready, found), judge)
        told = ((key, _told(verdict, *found[key])) for key, verdict in judged)
        return itertools.chain(ready, told)

    def _programs(
        self,
        replies: Iterable[Reply],
        ready: list[tuple[str, Verdict]],
        found: dict[str, tuple[Reply, Extraction]],
    ) -> Iterator[tuple[str, Problem, str]]:
        """(key, problem, program) of the replies that hold one; notes both kinds on the way."""
        for reply in replies:
            taken = self.extraction(reply)
            if taken.program:
                found[reply.key] = reply, taken
                yield reply.key, reply.problem, taken.program
            else:
                ready.append((reply.key, _missing(reply)))

    def judge_programs(
        self, programs: Iterable[tuple[str, Problem, str]], judge: Judge
    ) -> Iterator[tuple[str, Verdict]]:
        """The same for (key, problem, program): each distinct program of a problem runs once.

        So it is over replies, steps and checkpoints, as long as the pool lives, and over runs if
        it has a file of verdicts.
        """
        ready: list[tuple[str, Verdict]] = []
        waiting: dict[tuple[str, str], list[str]] = {}
        done: queue.SimpleQueue[tuple[Case, Outcome]] = queue.SimpleQueue()
        for key, problem, program in programs:
            same = waiting.get((problem.id, program))
            if same is not None:
                same.append(key)
                continue
            known = judge.verdicts.get(self.verdict_key(problem.id, program))
            if known is not None:
                ready.append((key, known))
                continue
            waiting[problem.id, program] = [key]
            case = self.case(problem, program, judge)
            judge.submit(case, lambda ended, outcome: done.put((ended, outcome)))
        return itertools.chain(ready, self._verdicts(waiting, done, judge.verdicts))

    def verdict_key(self, problem_id: str, program: str) -> bytes:
        """What the verdict on a program depends on."""
        settings = ",".join(f"{name}={getattr(self, name, '')}" for name in self.LIMITS)
        about = (self.name, self.version, self.data_sha256(), settings)
        return verdicts.key(*about, problem_id, program)

    def _verdicts(
        self,
        waiting: Mapping[tuple[str, str], Sequence[str]],
        done: queue.SimpleQueue[tuple[Case, Outcome]],
        known: verdicts.Verdicts,
    ) -> Iterator[tuple[str, Verdict]]:
        for _ in range(len(waiting)):
            case, outcome = done.get()
            verdict = Verdict(
                status=outcome.status,
                detail=outcome.detail,
                seconds=outcome.seconds,
                facts=self.facts(outcome),
            )
            if self.confirm or verdict.status is not Status.TIMEOUT:
                known.put(self.verdict_key(*case.key), verdict)
            for key in waiting[case.key]:
                yield key, verdict


def _missing(reply: Reply) -> Verdict:
    return cut_short(Verdict(status=Status.NO_ANSWER, detail="no program in the reply"), reply)


def _told(verdict: Verdict, reply: Reply, taken: Extraction) -> Verdict:
    """The verdict with how its program was found, and whether the reply was cut."""
    facts = {**verdict.facts, "fence": taken.had_fence, "cut": taken.was_cut}
    return cut_short(replace(verdict, facts=facts), reply)


def cut_short(verdict: Verdict, reply: Reply) -> Verdict:
    """`truncated` where a reply that did not pass was cut by the token limit."""
    unscored = verdict.correct or verdict.status is Status.INFRASTRUCTURE
    if unscored or reply.finish is not Finish.LENGTH:
        return verdict
    beneath = (
        f"{verdict.status.value}: {verdict.detail}" if verdict.detail else verdict.status.value
    )
    return replace(verdict, status=Status.TRUNCATED, detail=beneath)


def check_style(style: str, task: str) -> None:
    """Refuse a prompt style that is neither base nor chat."""
    if style not in ("base", "chat"):
        raise RequestError(
            f"prompt style {style!r} of task {task}", hint="Use prompt.style = base or chat."
        )


def pick_examples(
    ids: Sequence[str], solved: Mapping[str, Problem], task: str
) -> tuple[Problem, ...]:
    """The solved training problems to show; others (such as MBPP+ problems) are refused."""
    strange = [wanted for wanted in ids if wanted not in solved]
    if strange:
        raise RequestError(
            f"prompt.examples {', '.join(strange)} are no training problems of {task}",
            hint=f"Training problems are {next(iter(solved))} and so on.",
        )
    return tuple(solved[wanted] for wanted in ids)
