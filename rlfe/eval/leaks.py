"""Are training problems and evaluation problems disjoint? By id, and how alike by text.

Ids can be disjoint while texts are not: some of the 320 MBPP training problems word one of MBPP+
anew, for instance mbpp/831 ("count equal element pairs") and mbpp_plus/564 ("unequal"). The list
is reported with the results; nothing is dropped in silence. Likeness is Jaccard's, on the sets of
words of the task's text without numbers and the most usual words. An evaluation problem that was
reworded counts with both of its texts: as it is asked, and as its source data set words it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


def words(text: str) -> frozenset[str]:
    """The telling words of a problem's text; asserts in it name functions and do not count."""
    return frozenset(WORD.findall(ASSERT.sub("", text.lower()))) - USUAL


def source_wordings(task: str) -> dict[str, str]:
    """How the source words the problems of a packaged task that rewords them; else nothing.

    MBPP+ asks 378 MBPP problems, many of them in other words than MBPP does.
    """
    if task != "mbpp_plus":
        return {}
    from rlfe.tasks import packaged

    rows = packaged.rows("mbpp.jsonl.gz")
    return {f"mbpp_plus/{row['task_id']}": row["text"] for row in rows}


def likeness(a: frozenset[str], b: frozenset[str]) -> float:
    """Jaccard: shared words / all words; two empty texts are not alike."""
    together = len(a | b)
    return len(a & b) / together if together else 0.0


class Texts:
    """Texts that can be asked for the one most like another, without comparing with all.

    `wordings`: further texts of a problem, by its id; the most alike one counts.

    Two sets of words with likeness >= ALIKE share one of the rarest |set| - ceil(ALIKE |set|) + 1
    words of either, so only texts that share such a word are compared.
    """

    def __init__(
        self, problems: Sequence[Problem], wordings: Mapping[str, str] | None = None
    ) -> None:
        asked = [(problem.id, words(problem.prompt)) for problem in problems]
        known = {problem.id for problem in problems}
        asked += [(name, words(text)) for name, text in (wordings or {}).items() if name in known]
        self._texts = list(dict.fromkeys(asked))
        self._counts = Counter(word for _, found in self._texts for word in found)
        self._index: dict[str, list[int]] = {}
        for place, (_, found) in enumerate(self._texts):
            for word in self._rarest(found):
                self._index.setdefault(word, []).append(place)

    def _rarest(self, found: frozenset[str]) -> list[str]:
        ordered = sorted(found, key=lambda word: (self._counts[word], word))
        return ordered[: len(found) - math.ceil(ALIKE * len(found)) + 1]

    def nearest(self, mine: frozenset[str]) -> tuple[float, str]:
        """(likeness, id) of the most alike text of at least ALIKE, else (0.0, "")."""
        places = {place for word in self._rarest(mine) for place in self._index.get(word, ())}
        pairs = ((likeness(mine, self._texts[p][1]), self._texts[p][0]) for p in places)
        best = max(pairs, default=(0.0, ""))
        return best if best[0] >= ALIKE else (0.0, "")


def overlap(
    training: Sequence[Problem],
    evaluation: Sequence[Problem],
    same_source: bool,
    wordings: Mapping[str, str] | None = None,
) -> Overlap:
    """Compare two sets. `same_source`: ids count within one data set, so equal numbers clash.

    `wordings`: further texts of evaluation problems, by id (`source_wordings`).
    """
    shared: Iterable[str] = {p.id for p in training} & {p.id for p in evaluation}
    if same_source:
        shared = {number_of(p.id) for p in training} & {number_of(p.id) for p in evaluation}
    names = {p.entry_point: p for p in evaluation if p.entry_point}
    texts = Texts(evaluation, wordings)
    twins = []
    for problem in training:
        mine = words(problem.prompt)
        value, name = texts.nearest(mine)
        if name:
            twins.append(Twin(problem.id, name, round(value, 2), "text"))
        elif problem.entry_point in names:
            other = names[problem.entry_point]
            value = likeness(mine, words(other.prompt))
            twins.append(Twin(problem.id, other.id, round(value, 2), "function name"))
    return Overlap(
        training=len(training),
        evaluation=len(evaluation),
        shared_ids=tuple(sorted(shared)),
        twins=tuple(sorted(twins, key=lambda t: (-t.likeness, t.training))),
    )
