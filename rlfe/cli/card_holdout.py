"""The hold-out proof of a card: training problems against evaluation problems, by id and by text.

Words come from `rlfe.eval.leaks`, problems from `rlfe.tasks`. Remembered beside the run's hashes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlfe import __version__, records, rundir
from rlfe.eval.leaks import ALIKE
from rlfe.hub.series import Cell
from rlfe.tasks import packaged

FILES = (
    "mbpp.jsonl.gz", "MbppPlus-v0.2.0.jsonl.gz", "mbpp_train320_ids.json", "gsm8k_train.jsonl.gz",
    "gsm8k_test.jsonl.gz",
)  # fmt: skip


def holdout(cells: Sequence[Cell], memory: Path) -> list[str]:
    """Lines that prove (or qualify) that training and evaluation problems are disjoint.

    `memory` is a file that remembers them: they follow from the packaged data alone, and comparing
    all texts takes seconds.
    """
    key = _key(cells)
    known = _remembered(memory)
    if known.get("key") == key:
        return list(known["lines"])
    lines = _lines(cells)
    text = json.dumps({"key": key, "lines": lines}, indent=1)
    rundir.write_text(memory, text + "\n")
    return lines


def _key(cells: Sequence[Cell]) -> str:
    """Everything that the lines depend on."""
    data = [packaged.sha256(name) for name in FILES]
    return records.canonical_json([__version__, ALIKE, data, sorted(map(repr, _kinds(cells)))])


def _remembered(memory: Path) -> dict[str, Any]:
    try:
        found = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for cell in _kinds(cells).values():
        if cell.recipe is None or cell.recipe.data.source or cell.recipe.task.module:
            lines.append(f"`{cell.name}`: trained on own data; not compared with any test set.")
        elif cell.parts.task == "mbpp":
            lines += _mbpp_lines(cell.recipe.data.size)
        elif cell.parts.task == "gsm8k":
            lines += _gsm8k_lines()
    return lines


def _kinds(cells: Sequence[Cell]) -> dict[tuple[Any, ...], Cell]:
    """One cell for each kind of training data."""
    found: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        recipe = cell.recipe
        if recipe is None or recipe.data.source or recipe.task.module:
            found[cell.name, "own"] = cell
        else:
            found.setdefault((cell.parts.task, recipe.data.size), cell)
    return found


def _mbpp_lines(size: int | None) -> list[str]:
    from rlfe.eval.leaks import overlap
    from rlfe.tasks import mbpp

    training = mbpp.training_problems()[:size]
    lines = []
    for name, split in (("mbpp_plus", "MBPP+"), ("mbpp_test", "MBPP test outside MBPP+")):
        problems = _problems(name)
        found = overlap(training, problems, same_source=True)
        near = [twin for twin in found.twins if twin.why == "text"]
        texts = {" ".join(problem.prompt.split()) for problem in problems}
        exact = sum(" ".join(problem.prompt.split()) in texts for problem in training)
        examples = ", ".join(f"{twin.training} ~ {twin.evaluation}" for twin in near[:3])
        told = f" ({examples}{', ...' if len(near) > 3 else ''})" if near else ""
        lines.append(
            f"{found.training} training problems against the {found.evaluation} of {split}: "
            f"{len(found.shared_ids)} ids in common, {exact} with the same text, "
            f"{len({twin.training for twin in near})} near-duplicates by wording "
            f"(at least {ALIKE:g} of the telling words shared){told}."
        )
    hashes = ", ".join(f"`{name}` {packaged.sha256(name)[:12]}" for name in FILES[:3])
    return [*lines, f"Data files (sha256): {hashes}."]


def _gsm8k_lines() -> list[str]:
    """Exact texts only: near-duplicates of 7,473 x 1,319 texts take longer than a push should."""
    from rlfe.tasks import get

    texts = {" ".join(p.prompt.split()) for p in get("gsm8k").problems("train")}
    test = get("gsm8k").problems("test")
    exact = sum(" ".join(problem.prompt.split()) in texts for problem in test)
    return [
        f"{len(texts)} GSM8K training texts against the {len(test)} test problems: {exact} with "
        "the same text; near-duplicates were not looked for."
    ]


def _problems(name: str) -> Sequence[Any]:
    from rlfe.tasks import get

    return get(name).problems("test")
