"""Criteria declared before the runs: reading `[[criterion]]` tables and refusing impossible ones.

They stand in a `report.toml`; every field is described in docs/statistics.md 8. A criterion whose
validated and refuted conditions could hold together is refused, so that exactly one verdict fits
every outcome. Not here: reading runs (`evidence.py`), deciding (`verdicts.py`).
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlfe.errors import NotFoundError, RequestError
from rlfe.records import canonical_json
from rlfe.schema import Recipe

GUARDS = (
    "all_runs_finished",
    "base_evaluated",
    "fingerprints_ok",
    "fresh_ratio_one",
    "lag_raises_kl_and_clipping",
    "control_above_zero",
)
CONTROL_FLOOR = 1e-6
ENDING = ".criteria.toml"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Window(Part):
    """Steps that a readout is taken over, inclusive, on the logged `step`."""

    from_step: int = Field(default=1, ge=0)
    to_step: int | None = Field(default=None, ge=0)
    reduce: Literal["mean", "median", "last"] = "mean"


class Validated(Part):
    """All of what is given must hold."""

    ratio_min: float | None = None
    difference_min: float | None = None
    gap_over_seed_range: float | None = Field(default=None, ge=0)
    excess_buckets: tuple[str, ...] = ()
    excess_share_min: float | None = None


class Refuted(Part):
    """One of what is given is enough."""

    ratio_below: float | None = None
    difference_below: float | None = None
    gap_within_seed_range: float | None = Field(default=None, ge=0)


class Support(Part):
    """A further readout, printed and never decisive."""

    readout: str
    effect: Literal["drop(treatment) - drop(control)", "treatment - control"] = (
        "treatment - control"
    )
    at_least_points: float


class Criterion(Part):
    """One declared criterion. `treatment` and `control` are recipe keys, dotted or nested."""

    name: str
    readout: str
    window: Window = Window()
    treatment: dict[str, Any]
    control: dict[str, Any]
    seeds: tuple[int, ...] = Field(min_length=1)
    guards: tuple[str, ...] = ()
    validated: Validated
    refuted: Refuted = Refuted()
    support: tuple[Support, ...] = ()

    def digest(self) -> str:
        """Hash of what was declared; a changed criterion has another one."""
        return hashlib.sha256(canonical_json(self.model_dump()).encode()).hexdigest()[:16]


def shipped_criteria() -> list[str]:
    """Names of the packaged criteria files."""
    names = [entry.name for entry in (resources.files("rlfe") / "data").iterdir()]
    return sorted(name.removesuffix(ENDING) for name in names if name.endswith(ENDING))


def read_criteria(path: Path) -> list[Criterion]:
    """The criteria of a TOML file, or of a packaged one by its name.

    Raises:
        NotFoundError: There is no such file.
        RequestError: No TOML, an unknown field or guard, or conditions that contradict.
    """
    names = shipped_criteria()
    source = resources.files("rlfe") / "data" / f"{path}{ENDING}" if str(path) in names else path
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(
            f"{path} does not exist", hint=f"Packaged criteria: {', '.join(names)}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is no TOML: {error}") from None
    return [parse_criterion(entry, str(path)) for entry in table.get("criterion", [])]


def parse_criterion(entry: Mapping[str, Any], origin: str = "criterion") -> Criterion:
    """One table as a checked criterion; RequestError names field and value."""
    try:
        criterion = Criterion.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{origin}: {place}: {first['msg']} (got {first['input']!r})") from None
    for guard in criterion.guards:
        if guard not in GUARDS:
            raise RequestError(
                f'{origin}: unknown guard "{guard}"', hint=f"Guards are {', '.join(GUARDS)}."
            )
    _refuse_contradictions(criterion, origin)
    return criterion


def _refuse_contradictions(criterion: Criterion, origin: str) -> None:
    """Every refuting condition needs a validating one that excludes it."""
    yes, no = criterion.validated, criterion.refuted
    conditions = [yes.ratio_min, yes.difference_min, yes.gap_over_seed_range, yes.excess_share_min]
    if all(value is None for value in conditions):
        raise RequestError(f"{origin}: {criterion.name}: validated states no condition")
    if (yes.excess_share_min is None) != (not yes.excess_buckets):
        raise RequestError(f"{origin}: excess_buckets and excess_share_min go together")
    rises = (yes.gap_over_seed_range is not None) or (yes.ratio_min or 0) >= 1
    pairs = (
        ("ratio_below", no.ratio_below, "ratio_min", yes.ratio_min),
        ("difference_below", no.difference_below, "difference_min", yes.difference_min),
        ("gap_within_seed_range", no.gap_within_seed_range, "gap_over_seed_range",
         yes.gap_over_seed_range),
    )  # fmt: skip
    for refuting, below, validating, least in pairs:
        if below is None or (least is not None and below <= least):
            continue
        if refuting == "difference_below" and below <= 0 and rises:
            continue  # what validates has a gap above 0
        raise RequestError(
            f"{origin}: {criterion.name}: {refuting} = {below} and {validating} = {least} can hold "
            "together",
            hint=f"Give validated.{validating} of at least {below}.",
        )


def arm_keys(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe keys of an arm: `{"advantage": "maxrl", "lag": {"steps": 4}}` -> advantage.name ..."""
    sections = {name for name, f in Recipe.model_fields.items() if f.annotation is not str}
    found: dict[str, Any] = {}
    for key, value in arm.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": item for inner, item in arm_keys(value).items()}
        else:
            found[f"{key}.name" if key in sections else key] = value
    return found
