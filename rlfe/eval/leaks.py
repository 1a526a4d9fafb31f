"""Are training problems and evaluation problems disjoint? By id, and how alike by text.

Ids can be disjoint while texts are not: 39 of the 320 MBPP training problems word an MBPP+ problem
anew. The list is reported with the results; nothing is dropped in silence. Likeness is Jaccard's,
on the sets of words of the task's text without numbers and the most usual words.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlfe.types import Problem

ALIKE = 0.6  # Jaccard likeness above which two texts are shown as near duplicates
USUAL = frozenset(
    {"write", "a", "python", "function", "to", "the", "of", "in", "given", "using", "and", "from"}
    | {"for", "find", "is", "an", "by"}
)
ASSERT = re.compile(r"^\s*assert .*$", re.MULTILINE)
WORD = re.compile(r"[a-z_]+")


class Twin(NamedTuple):
    """Two problems that are alike. `Twin("mbpp/831", "mbpp_plus/564", 0.83, "text")`"""

    training: str
    evaluation: str
    likeness: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What a training set and an evaluation set share."""

    training: int
    evaluation: int
    shared_ids: tuple[str, ...]
    twins: tuple[Twin, ...]

    @property
    def text(self) -> str:
        """One sentence for the report."""
        ids = "no id in common" if not self.shared_ids else f"{len(self.shared_ids)} ids in common"
        by_text = sum(twin.why == "text" for twin in self.twins)
        return (
            f"{self.training} training and {self.evaluation} evaluation problems, {ids}; "
            f"{by_text} training problems are near duplicates by text, "
            f"{len(self.twins) - by_text} more share a function name"
        )


def number_of(problem_id: str) -> str:
    """The id inside its data set: `mbpp_plus/564` and `mbpp/564` are the same source problem."""
    return problem_id.rsplit("/", 1)[-1]


def words(problem: Problem) -> frozenset[str]:
    """The telling words of a problem's text; asserts in it name functions and do not count."""
    text = ASSERT.sub("", problem.prompt.lower())
    return frozenset(WORD.findall(text)) - USUAL


def likeness(a: frozenset[str], b: frozenset[str]) -> float:
    """Jaccard: shared words / all words; two empty texts are not alike."""
    together = len(a | b)
    return len(a & b) / together if together else 0.0


class Texts:
    """Texts that can be asked for the one most like another, without comparing with all.

    Two sets of words with likeness >= ALIKE share one of the rarest |set| - ceil(ALIKE |set|) + 1
    words of either, so only texts that share such a word are compared.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._words = {problem.id: words(problem) for problem in problems}
        self._counts = Counter(word for found in self._words.values() for word in found)
        self._index: dict[str, list[str]] = {}
        for name, found in self._words.items():
            for word in self._rarest(found):
                self._index.setdefault(word, []).append(name)

    def _rarest(self, found: frozenset[str]) -> list[str]:
        ordered = sorted(found, key=lambda word: (self._counts[word], word))
        return ordered[: len(found) - math.ceil(ALIKE * len(found)) + 1]

    def nearest(self, mine: frozenset[str]) -> tuple[float, str]:
        """(likeness, id) of the most alike text of at least ALIKE, else (0.0, "")."""
        names = {name for word in self._rarest(mine) for name in self._index.get(word, ())}
        best = max(((likeness(mine, self._words[name]), name) for name in names), default=(0.0, ""))
        return best if best[0] >= ALIKE else (0.0, "")


def overlap(
    training: Sequence[Problem], evaluation: Sequence[Problem], same_source: bool
) -> Overlap:
    """Compare two sets. `same_source`: ids count within one data set, so equal numbers clash."""
    shared: Iterable[str] = {p.id for p in training} & {p.id for p in evaluation}
    if same_source:
        shared = {number_of(p.id) for p in training} & {number_of(p.id) for p in evaluation}
    names = {p.entry_point: p for p in evaluation if p.entry_point}
    texts = Texts(evaluation)
    twins = []
    for problem in training:
        mine = words(problem)
        value, name = texts.nearest(mine)
        if name:
            twins.append(Twin(problem.id, name, round(value, 2), "text"))
        elif problem.entry_point in names:
            other = names[problem.entry_point]
            value = likeness(mine, words(other))
            twins.append(Twin(problem.id, other.id, round(value, 2), "function name"))
    return Overlap(
        training=len(training),
        evaluation=len(evaluation),
        shared_ids=tuple(sorted(shared)),
        twins=tuple(sorted(twins, key=lambda t: (-t.likeness, t.training))),
    )
