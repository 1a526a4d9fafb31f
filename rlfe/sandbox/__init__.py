"""Running programs that nobody vouches for: jail, fork server, typed results, pool.

`rlfe.sandbox.pool.Judge` is the entrance; `inside/` is what runs in the jail.
Try: `rlfe.sandbox.tier()`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["tier"]


def tier() -> dict[str, Any]:
    """The isolation in force here, after really trying it (`rlfe.sandbox.probe`).

    `{"tier": "namespaces", "tried": {"endless loop": "stopped", ...}, ...}`; a few seconds.
    """
    from rlfe.sandbox.probe import tried

    return tried()
