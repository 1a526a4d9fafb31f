"""What a card is made of, beside the cells themselves; comparisons are computed elsewhere.

`rlfe.hub` may not import `rlfe.eval`: who makes a card hands their results in as these types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlfe.hub.cardfacts import License
from rlfe.hub.evaluations import Results
from rlfe.hub.series import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A paired difference in points, computed elsewhere from per-problem counts.

    `Comparison(name="a against base", task="gsm8k", difference=-2.1, low=-3.4, high=-0.8,
    p=0.002, detectable=1.6, label="exploratory", lost=0.05, found=0.02)`
    """

    name: str
    task: str
    difference: float
    low: float
    high: float
    p: float
    detectable: float
    label: str = "exploratory"
    kind: str = "arms"  # or gain, forgetting: against the base model
    lost: float | None = None  # share of problems
    found: float | None = None

    @property
    def text(self) -> str:
        return f"{self.difference:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"

    @property
    def is_claim(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture. `Plot(path="plots/pass_at_k.png", caption="pass@k over steps")`"""

    path: str
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything that a card is made of."""

    repo_id: str
    cells: Sequence[Cell]
    results: Results = field(default_factory=Results)
    license: License | None = None
    base_model: str | None = None
    comparisons: Sequence[Comparison] = ()
    plots: Sequence[Plot] = ()
    holdout: Sequence[str] = ()
    commits: Mapping[str, str] = field(default_factory=dict)  # "<cell>/global_step_N" -> commit id
    other_cells: Sequence[str] = ()  # folders of the repository that these runs do not describe
