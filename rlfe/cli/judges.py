"""The judge of a command: its workers, its file of verdicts, one warning where the jail is weak.

Try: `with make_judge(environment, workers=2) as judge: ...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlfe.cli import output

if TYPE_CHECKING:
    from rlfe.sandbox.pool import Judge


def make_judge(
    environment: Mapping[str, str],
    *,
    workers: int | None = None,
    require_isolation: bool = False,
    fresh: bool = False,
) -> Judge:
    """A judge, not yet started. `fresh`: judge again what earlier runs have judged."""
    from rlfe.sandbox.pool import Judge
    from rlfe.sandbox.verdicts import default_file

    cache = None if fresh else default_file(environment)
    return Judge(workers, require_isolation, cache=cache, warn=output.warn)
