""" "Did you mean": the nearest name, and the nearest configuration key.

Keys are compared by spelling, by initials (`learning_rate` -> `lr`) and by the words of their
description, because the usual mistake is another program's name for the same thing.
Try: `nearest_key("optim.learning_rate", {"optim.lr": "learning rate"})`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

ENOUGH = 0.6  # below this a suggestion is more confusing than none


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=ENOUGH)
    return close[0] if close else None


def nearest_key(key: str, about: Mapping[str, str]) -> str | None:
    """The key most like an unknown one; `about` maps known keys to their descriptions."""
    scores = {known: _likeness(key, known, text) for known, text in about.items()}
    best = max(scores, key=lambda known: scores[known], default=None)
    return best if best is not None and scores[best] >= ENOUGH else None


def _likeness(key: str, known: str, about: str) -> float:
    section, _, name = key.rpartition(".")
    known_section, _, known_name = known.rpartition(".")
    words = re.findall(r"[a-z0-9]+", name.lower())
    described = set(re.findall(r"[a-z0-9]+", about.lower()))
    spelling = difflib.SequenceMatcher(None, name, known_name).ratio()
    initials = len(words) > 1 and "".join(word[0] for word in words) == known_name
    told = 0.9 * sum(word in described for word in words) / max(1, len(words))
    here = difflib.SequenceMatcher(None, section, known_section).ratio()
    whole = difflib.SequenceMatcher(None, key, known).ratio()
    return max(whole, max(spelling, 1.0 if initials else told) * (0.7 + 0.3 * here))
