"""Tasks of a user: an own Python file (`task.module`), or another source for a known kind.

What: `OwnTask` wraps a file with `problems`, `prompt`, `judge`; `SourcedMbpp` and `SourcedGsm8k`
judge rows of `data.source` as MBPP or GSM8K problems. What not: running the file in a jail: it is
the user's own code, and its sha256 stands in every record.
Try: `get("sums", "my_task.py").problems("train")`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlfe.errors import NotFoundError, RequestError, RlfeError
from rlfe.sandbox.encoding import encode
from rlfe.sandbox.parts import Part
from rlfe.schema import Data
from rlfe.tasks import mbpp, sources
from rlfe.tasks.base import Reply
from rlfe.tasks.coding import check_style, cut_short
from rlfe.tasks.gsm8k import Gsm8k
from rlfe.tasks.mbpp import Mbpp
from rlfe.types import Message, Problem, Prompt, Status, Verdict

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge

NEEDED = ("problems", "prompt", "judge")
GIVES = {
    "problems": "a list of dicts (id, prompt, ...) or of Problems",
    "prompt": "a text or a Prompt",
    "judge": "a bool, a number of 0 to 1, or a Verdict",
}


def load_module(path: str) -> ModuleType:
    """The user's file as a module; raises NotFoundError or RequestError."""
    file = Path(path)
    if not file.is_file():
        raise NotFoundError(f"task.module {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"rlfe_own_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RequestError(f"task.module {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RequestError(f"task.module {path} does not load: {error}") from error
    missing = [name for name in NEEDED if not callable(vars(module).get(name))]
    if missing:
        raise RequestError(
            f"task.module {path} lacks {', '.join(missing)}",
            hint="It needs problems(split), prompt(problem, style) and judge(problem, reply).",
        )
    return module


class OwnTask:
    """A task in one file. `judge(problem, text)` gives a bool, a number of 0 to 1, or a Verdict.

    `problems(split)` gives Problems, or dicts with id, prompt and what else the file wants (it
    arrives in `extra`); `prompt(problem, style)` gives a Prompt or a text.
    """

    runs_programs = False
    SETTINGS: tuple[str, ...] = ()

    def __init__(self, name: str, path: str) -> None:
        self.name, self._path = name, path
        self._module = load_module(path)
        self.sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        self.version = f"{Path(path).name} {self.sha256[:12]}"
        self._loaded: dict[str, tuple[Problem, ...]] = {}

    def __reduce__(self) -> tuple[type[OwnTask], tuple[str, str]]:
        """Another process reads the file itself."""
        return OwnTask, (self.name, str(Path(self._path).absolute()))

    def problems(self, split: str) -> tuple[Problem, ...]:
        if split not in self._loaded:
            rows = self._call("problems", f"split {split!r}", lambda: self._rows(split))
            found = tuple(self._problem(row, split, n) for n, row in enumerate(rows))
            if not found:
                raise RequestError(f"task {self.name} has no problems in split {split!r}")
            self._loaded[split] = found
        return self._loaded[split]

    def _rows(self, split: str) -> list[Any] | None:
        rows = self._module.problems(split)
        return rows if rows is None else list(rows)  # a generator runs here, where it is wrapped

    def _call(self, function: str, about: str, call: Callable[[], Any]) -> Any:
        """What the user's function gives; what it raises, or None, names the file and the problem.

        Raises:
            RequestError: the function says so itself. RlfeError: it raised something else.
        """
        try:
            found = call()
        except RlfeError:
            raise
        except Exception as error:
            line = _line_of(error, self._path)
            raise RlfeError(
                f"{self._path}{line}: {function} failed for {about}: "
                f"{type(error).__name__}: {error}",
                hint=f"Correct {function} in the file.",
            ) from error
        if found is None:
            raise RlfeError(
                f"{self._path}: {function} returned None for {about}",
                hint=f"{function} returns {GIVES[function]}.",
            )
        return found

    def _problem(self, row: Any, split: str, number: int) -> Problem:
        if isinstance(row, Problem):
            return row
        if not isinstance(row, Mapping):
            raise RlfeError(
                f"{self._path}: problems gave {row!r:.80} as problem {number} of split {split!r}",
                hint=f"problems returns {GIVES['problems']}.",
            )
        known = {"id": f"{self.name}/{split}/{number}", "prompt": "", "answer": "", **row}
        return Problem(
            id=str(known["id"]),
            task=self.name,
            split=split,
            prompt=str(known["prompt"]),
            answer=str(known["answer"]),
            extra=row,
        )

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        check_style(style, self.name)
        about = f"problem {problem.id}"
        made = self._call("prompt", about, lambda: self._module.prompt(problem, style))
        if isinstance(made, Prompt):
            return made
        form = f"{self.name}-{style}-{self.sha256[:8]}"
        if style == "base":
            return Prompt(format=form, text=str(made))
        return Prompt(format=form, messages=(Message(role="user", text=str(made)),))

    def data_sha256(self) -> str:
        return self.sha256

    def answer(self, reply: Reply) -> str:
        return reply.text

    def judge(
        self, replies: Sequence[Reply], judge: Judge | None = None
    ) -> Iterator[tuple[str, Verdict]]:
        for reply in replies:
            yield reply.key, cut_short(self._judged(reply), reply)

    def _judged(self, reply: Reply) -> Verdict:
        about = f"problem {reply.problem.id}"
        found = self._call("judge", about, lambda: self._module.judge(reply.problem, reply.text))
        if isinstance(found, Verdict):
            return found
        try:
            score = float(found)
        except (TypeError, ValueError):
            score = math.nan
        if isinstance(found, str) or not 0 <= score <= 1:
            raise RequestError(
                f"{self._path}: judge gave {found!r:.80} for {about}, "
                "not a bool or a number of 0 to 1",
                hint=f"judge returns {GIVES['judge']}.",
            )
        return _verdict(score)


def _line_of(error: Exception, path: str) -> str:
    """`:12`, the innermost line of the user's file that the error passed through."""
    file, frames = Path(path).resolve(), traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    return f":{lines[-1]}" if lines else ""


def _verdict(score: float) -> Verdict:
    status = Status.PASSED if score == 1 else Status.FAILED
    return Verdict(status=status, facts={"right": score, "total": 1})


class _Sourced:
    """Problems from the rows of `data.source`, each split read once."""

    def __init__(self, *, data: Data, **settings: Any) -> None:
        super().__init__(**settings)
        self.data = data
        self.notes: list[str] = []
        self._loaded: dict[str, tuple[Problem, ...]] = {}

    @staticmethod
    def made(row: Mapping[str, Any], number: int, split: str, name: str) -> Problem:
        """The problem of one row; `name` is its id if it has none. Raises RequestError."""
        raise NotImplementedError

    @staticmethod
    def about(problem: Problem) -> Mapping[str, Any]:
        """What of a problem decides on verdicts and prompts."""
        raise NotImplementedError

    def problems(self, split: str) -> tuple[Problem, ...]:
        if split not in self._loaded:
            rows = sources.rows(self.data, split, self.notes)
            self._loaded[split] = tuple(
                self.made(row, n, split, sources.problem_id(self.data, split, f"rows/{n}"))
                for n, row in enumerate(rows)
            )
        return self._loaded[split]

    def data_sha256(self) -> str:
        return sources.digest(
            self.about(problem) for found in self._loaded.values() for problem in found
        )


class SourcedMbpp(_Sourced, Mbpp):
    """Rows with `prompt` and `tests` (asserts), judged like MBPP.

    An assert that is not `expression == literal` runs in the jail, where an always-equal object can
    pass it: the facts then say `judged: in_jail_assert`.
    """

    SETTINGS = ("cpu_seconds", "fraction", "data")

    @staticmethod
    def made(row: Mapping[str, Any], number: int, split: str, name: str) -> Problem:
        return _asserted(row, number, split, name)

    @staticmethod
    def about(problem: Problem) -> Mapping[str, Any]:
        return {
            "prompt": problem.prompt, "tests": problem.tests, "setup": problem.extra["setup"],
        }  # fmt: skip

    def prompt(self, problem: Problem, style: str, examples: Sequence[str] = ()) -> Prompt:
        check_style(style, self.name)
        if examples:
            raise RequestError("problems of data.source show no examples")
        return mbpp.prompt(problem, style, ())

    def parts(self, problem: Problem, judge: Judge) -> tuple[Part, ...]:
        if not problem.extra["in_jail"]:
            return super().parts(problem, judge)
        mark = secrets.token_hex(16)
        wanted = encode(mark)
        return (
            Part(
                name="asserts",
                mode="statements",
                inputs=problem.tests,
                setup=problem.extra["setup"],
                end_mark=mark,
                check=lambda index, data: data == wanted,
                cpu_seconds=self.cpu_seconds,
                call_seconds=self.cpu_seconds,
                keep_going=self.fraction,
            ),
        )

    def facts(self, outcome: Any) -> Mapping[str, Any]:
        in_jail = outcome.parts and outcome.parts[0].mode == "statements"
        return {**super().facts(outcome), **({"judged": "in_jail_assert"} if in_jail else {})}


def _asserted(row: Mapping[str, Any], number: int, split: str, name: str) -> Problem:
    lacking = [name for name in ("prompt", "tests") if name not in row]
    if lacking:
        raise RequestError(
            f"row {number} has no column {', '.join(lacking)}",
            hint=f"It has {', '.join(row)}; set data.columns.",
        )
    tests = row["tests"]
    tests = tuple(tests.strip().split("\n") if isinstance(tests, str) else tests)
    return Problem(
        id=str(row.get("id", name)),
        task="mbpp",
        split=split,
        prompt=str(row["prompt"]),
        answer=str(row.get("answer", "")),
        tests=tests,
        entry_point=str(row.get("entry_point", "")) or mbpp.called_by_all(tests),
        extra={"setup": str(row.get("setup", "")), "in_jail": not all(map(_is_plain, tests))},
    )


def _is_plain(test: str) -> bool:
    try:
        mbpp.split_assert(test)
    except RequestError:
        return False
    return True


class SourcedGsm8k(_Sourced, Gsm8k):
    """Rows with `question` and `answer` (its number after `####`), judged like GSM8K."""

    SETTINGS = ("mode", "data")

    @staticmethod
    def made(row: Mapping[str, Any], number: int, split: str, name: str) -> Problem:
        return _questioned(row, number, split, name)

    @staticmethod
    def about(problem: Problem) -> Mapping[str, Any]:
        return {"prompt": problem.prompt, "answer": problem.answer}


def _questioned(row: Mapping[str, Any], number: int, split: str, name: str) -> Problem:
    lacking = [name for name in ("question", "answer") if name not in row]
    if lacking:
        raise RequestError(
            f"row {number} has no column {', '.join(lacking)}",
            hint=f"It has {', '.join(row)}; set data.columns.",
        )
    answer = str(row["answer"])
    return Problem(
        id=str(row.get("id", name)),
        task="gsm8k",
        split=split,
        prompt=str(row["question"]),
        answer=answer if "####" in answer else f"#### {answer}",
    )


SOURCED: Mapping[str, Callable[..., Any]] = {"mbpp": SourcedMbpp, "gsm8k": SourcedGsm8k}
