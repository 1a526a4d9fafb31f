"""Criteria and comparisons declared before the runs: reading them and refusing impossible ones.

A recipe declares them in `[[study.criteria]]` and `[[study.comparisons]]`, a file of its own in
`[[criterion]]` and `[[comparison]]`; every field is described in docs/statistics.md 8. A criterion
whose validated and refuted conditions could hold together is refused, so that exactly one verdict
fits every outcome. A run's record keeps what was declared with its hash (`record`), so a report
can say what was changed afterwards. Not here: reading runs, deciding (`rlfe.eval`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlfe.errors import NotFoundError, RequestError
from rlfe.records import canonical_json
from rlfe.schema import Recipe
from rlfe.toml import read_toml

GUARDS = (
    "all_runs_finished",
    "base_evaluated",
    "fingerprints_ok",
    "fresh_ratio_one",
    "lag_raises_kl_and_clipping",
    "control_above_zero",
)
CONTROL_FLOOR = 1e-6


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
        return digest(self)


class Comparison(Part):
    """A question that states no success criterion: two arms side by side, no verdict.

    `readouts` are keys of the step log or `eval/<task>/pass@<k>`. `each`: a recipe key whose values
    are compared apart. `axes`: what curves of the step log are drawn over.
    """

    name: str
    readouts: tuple[str, ...] = Field(min_length=1)
    treatment: dict[str, Any]
    control: dict[str, Any]
    each: str | None = None
    axes: tuple[Literal["step", "updates", "tokens"], ...] = ("step",)

    def digest(self) -> str:
        """Hash of what was declared."""
        return digest(self)


Declared = Criterion | Comparison
Kind = TypeVar("Kind", bound=BaseModel)


def digest(declared: BaseModel) -> str:
    """Sixteen hex digits of everything in it, defaults included."""
    return hashlib.sha256(canonical_json(declared.model_dump()).encode()).hexdigest()[:16]


def shipped_criteria() -> list[str]:
    """Names of the shipped recipes that declare something."""
    folder = resources.files("rlfe") / "recipes"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    return sorted(
        name.removesuffix(".toml")
        for name, text in texts.items()
        if "[[study.criteria]]" in text or "[[study.comparisons]]" in text
    )


def read_declared(path: Path) -> list[Declared]:
    """What a TOML file declares, or a shipped recipe by its name.

    Raises:
        NotFoundError: There is no such file.
        RequestError: No TOML, an unknown field or guard, or conditions that contradict.
    """
    names = shipped_criteria()
    recipe = resources.files("rlfe") / "recipes" / f"{path}.toml"
    source = recipe if str(path) in names else path
    try:
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(
            f"{path} does not exist", hint=f"Recipes that declare: {', '.join(names)}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    table = read_toml(text, str(path))
    study = table.get("study", {})
    criteria = table.get("criterion", study.get("criteria", []))
    comparisons = table.get("comparison", study.get("comparisons", []))
    found: list[Declared] = [
        *(parse_criterion(entry, str(path)) for entry in criteria),
        *(parse_comparison(entry, str(path)) for entry in comparisons),
    ]
    if not found:
        raise RequestError(
            f"{path} declares nothing", hint="Write [[criterion]] or [[comparison]] tables."
        )
    return found


def declared_by(recipe: Recipe, origin: str = "study") -> list[Declared]:
    """What a recipe declares, checked.

    Raises:
        RequestError: An unknown field or guard, or conditions that contradict.
    """
    return [
        *(parse_criterion(entry, origin) for entry in recipe.study.criteria),
        *(parse_comparison(entry, origin) for entry in recipe.study.comparisons),
    ]


def record(recipe: Recipe) -> dict[str, str]:
    """Name -> hash of what a recipe declares: what a run's record keeps from its first step on."""
    return {entry.name: entry.digest() for entry in declared_by(recipe)}


def parse_comparison(entry: Mapping[str, Any], origin: str = "comparison") -> Comparison:
    """One table as a checked comparison; RequestError names field and value."""
    return _parsed(Comparison, entry, origin)


def _parsed(kind: type[Kind], entry: Mapping[str, Any], origin: str) -> Kind:
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{origin}: {place}: {first['msg']} (got {first['input']!r})") from None


def parse_criterion(entry: Mapping[str, Any], origin: str = "criterion") -> Criterion:
    """One table as a checked criterion; RequestError names field and value."""
    criterion = _parsed(Criterion, entry, origin)
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
