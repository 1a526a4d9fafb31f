"""Environment variables for a while: some libraries and child processes take settings no other way.

Try: `with changed({"A": "1"}): ...`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def changed(values: Mapping[str, str], without: Iterable[str] = ()) -> Iterator[None]:
    """Set `values` and hide `without`; everything is as it was afterwards."""
    hidden = list(without)
    before = {name: os.environ.get(name) for name in (*values, *hidden)}
    os.environ.update(values)
    for name in hidden:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
