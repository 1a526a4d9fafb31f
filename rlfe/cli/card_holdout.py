"""The hold-out proof of a card: training problems against evaluation problems, by id and by text.

For MBPP the comparison of all texts takes seconds and follows from the packaged data alone, so its
result is packaged too (`rlfe/data/mbpp_holdout.json`), under the digests of what it was made from;
a test makes it again. When the data or the rule change, it is computed anew here, and
`python -c "from rlfe.cli.card_holdout import write; write()"` packages it again. Likeness of texts
is `rlfe.eval.leaks`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlfe import rundir
from rlfe.errors import RlfeError
from rlfe.hub.series import Cell
from rlfe.tasks import packaged

PROOF = "mbpp_holdout.json"
MBPP_FILES = ("mbpp.jsonl.gz", "MbppPlus-v0.2.0.jsonl.gz", "mbpp_train320_ids.json")
AGAINST = {"mbpp_plus": "MBPP+", "mbpp_test": "MBPP test outside MBPP+"}


def holdout(cells: Sequence[Cell]) -> list[str]:
    """Lines that prove (or qualify) that training and evaluation problems are disjoint."""
    lines: list[str] = []
    for cell in _kinds(cells).values():
        if cell.recipe is None or cell.recipe.data.source or cell.recipe.task.module:
            lines.append(f"`{cell.name}`: trained on own data; not compared with any test set.")
        elif cell.parts.task == "mbpp":
            lines += mbpp_lines(mbpp_proof(), cell.recipe.data.size)
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


def mbpp_proof() -> Mapping[str, Any]:
    """The comparison of the 320 with both evaluation sets, packaged or else computed now."""
    try:
        found: dict[str, Any] = packaged.document(PROOF)
    except (RlfeError, ValueError):
        return computed_proof()
    return found if found.get("data") == _digests() else computed_proof()


def _digests() -> dict[str, str]:
    return {name: packaged.sha256(name) for name in MBPP_FILES}


def computed_proof() -> dict[str, Any]:
    """The same from the problems themselves; takes seconds."""
    from rlfe.eval.leaks import ALIKE, overlap, source_wordings
    from rlfe.tasks import get, mbpp

    training = mbpp.training_problems()
    against = {}
    for name in AGAINST:
        problems = get(name).problems("test")
        found = overlap(training, problems, True, source_wordings(name))
        texts = {_plain(problem.prompt) for problem in problems}
        against[name] = {
            "problems": found.evaluation,
            "shared_ids": list(found.shared_ids),
            "same_text": [p.id for p in training if _plain(p.prompt) in texts],
            "near": [[t.training, t.evaluation] for t in found.twins if t.why == "text"],
        }
    ids = [problem.id for problem in training]
    return {"data": _digests(), "alike": ALIKE, "training": ids, "against": against}


def write() -> None:
    """Package the proof again."""
    text = json.dumps(computed_proof(), indent=1)
    rundir.write_text(packaged.FOLDER / PROOF, text + "\n")


def mbpp_lines(proof: Mapping[str, Any], size: int | None) -> list[str]:
    """The proof in words, for the first `size` training problems (None: all)."""
    trained = proof["training"][:size]
    lines = []
    for name, shown in AGAINST.items():
        facts = proof["against"][name]
        shared = [item for item in facts["shared_ids"] if f"mbpp/{item}" in trained]
        same = [item for item in facts["same_text"] if item in trained]
        near = [pair for pair in facts["near"] if pair[0] in trained]
        examples = ", ".join(f"{mine} ~ {theirs}" for mine, theirs in near[:3])
        told = f" ({examples}{', ...' if len(near) > 3 else ''})" if near else ""
        lines.append(
            f"{len(trained)} training problems against the {facts['problems']} of {shown}: "
            f"{len(shared)} ids in common, {len(same)} with the same text, "
            f"{len(near)} worded alike (at least {proof['alike']:g} of the telling words "
            f"shared){told}."
        )
    hashes = ", ".join(f"`{name}` {digest[:12]}" for name, digest in proof["data"].items())
    return [*lines, f"Data files (sha256): {hashes}."]


def _gsm8k_lines() -> list[str]:
    """Exact texts only: near-duplicates of 7,473 x 1,319 texts take longer than a push should."""
    texts = {_plain(row["question"]) for row in packaged.rows("gsm8k_train.jsonl.gz")}
    test = packaged.rows("gsm8k_test.jsonl.gz")
    exact = sum(_plain(row["question"]) in texts for row in test)
    return [
        f"{len(texts)} GSM8K training texts against the {len(test)} test problems: {exact} with "
        "the same text; near-duplicates were not looked for."
    ]


def _plain(text: str) -> str:
    return " ".join(text.split())
