"""Reads tests/fixtures/reference; tolerances are those of its README (float32 sources)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fixtures" / "reference"
RTOL, ATOL = 1e-5, 2e-6  # float32 sources, nine decimals


@cache
def reference(name: str) -> dict[str, Any]:
    """One reference file; `nan` and `inf` stay the texts that they are there."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found
