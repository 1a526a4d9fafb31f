"""Evidence for declared criteria: which runs belong to an arm, their readouts, the guards.

A criterion is judged from the runs that it names and from nothing else: the runs of an arm are
those whose recipe has the arm's keys; every other key (run seed and free ones apart) has to be
equal between the arms. Guards are computed from the same records. Rules: docs/statistics.md 8.
"""

from __future__ import annotations

import math
import statistics as plain_statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlfe.config import flat
from rlfe.criteria import CONTROL_FLOOR, Criterion, Support, Window, arm_keys
from rlfe.eval.paired import DETECTABLE
from rlfe.eval.passk import pass_at_all_k
from rlfe.eval.report.gather import Group, Run, read_groups
from rlfe.eval.statistics import DRAWS, draw_weights
from rlfe.eval.verdicts import Decision, Guard, Verdict, decide
from rlfe.randomness import generator

# Keys that may differ between runs without changing what is compared.
FREE = ("about", "track.", "run.", "naming.", "study.", "matrix.", "engine.", "save.", "eval.")
Readings = dict[int, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The runs of one side by seed: `Arm(name="treatment", keys={...}, runs={0: run, 1: run})`."""

    name: str
    keys: Mapping[str, Any]
    runs: Mapping[int, Run]


class Evidence:
    """What the runs say about one criterion.

    Args:
        criterion: The declared criterion.
        runs: All runs of the report; those that fit no arm are ignored.
        groups: Their evaluations.
    """

    def __init__(self, criterion: Criterion, runs: Sequence[Run], groups: Sequence[Group]) -> None:
        self.criterion, self.groups = criterion, groups
        self._runs = runs
        self.treatment = self._arm("treatment", arm_keys(criterion.treatment))
        self.control = self._arm("control", arm_keys(criterion.control))

    def _arm(self, name: str, keys: Mapping[str, Any]) -> Arm:
        found: dict[int, Run] = {}
        for run in self._runs:
            values = flat(run.recipe)
            if all(values.get(key) == value for key, value in keys.items()):
                found.setdefault(run.recipe.run.seed, run)
        return Arm(name=name, keys=keys, runs=found)

    def fresh(self, arm: Arm) -> Arm:
        """The same arm at lag 0."""
        return self._arm(f"{arm.name} at lag 0", {**arm.keys, "lag.steps": 0})

    @property
    def lagged(self) -> bool:
        """Whether the arms lag, so that lag-0 runs belong to the evidence."""
        return bool(self.treatment.keys.get("lag.steps"))

    @property
    def arms(self) -> list[Arm]:
        """All arms that the evidence needs."""
        main = [self.treatment, self.control]
        return main + ([self.fresh(arm) for arm in main] if self.lagged else [])

    # -- readouts

    def readings(self, arm: Arm) -> Readings:
        """The reduced readout of every declared seed; None where there is none."""
        found: Readings = {}
        for seed in self.criterion.seeds:
            run = arm.runs.get(seed)
            found[seed] = None if run is None else self.reading(run, self.criterion.readout)
        return found

    def reading(self, run: Run, readout: str) -> float | None:
        """One run's readout over the window, or its evaluation at the window's end."""
        if readout.startswith("eval/"):
            return self.score(run, readout)
        return reduced(run, readout, self.criterion.window)

    def score(self, run: Run, readout: str) -> float | None:
        """`eval/<task>/pass@<k>` of a run at the last scored step up to the window's end."""
        found = self._scored(run, readout)
        return None if found is None else float(found.mean())

    def _scored(self, run: Run, readout: str) -> Any:
        _, task, name = readout.split("/")
        k, end = int(name.removeprefix("pass@")), self.criterion.window.to_step
        for group in sorted(self.groups, key=lambda g: -len(g.points)):
            points = [p for p in group.series(run.name) if end is None or p.step <= end]
            if group.task == task and points and k <= group.n:
                return pass_at_all_k(group.n, points[-1].correct_P)[:, k - 1]
        return None

    def excess_share(self) -> float | None:
        """Share of the gap in `excess_buckets`: sum over them of the differences of c_b / gap."""
        buckets = self.criterion.validated.excess_buckets
        if not buckets:
            return None
        shares: list[float] = []
        for readout in (None, *buckets):
            sides = [self._contribution(arm, readout) for arm in (self.treatment, self.control)]
            if sides[0] is None or sides[1] is None:
                return None
            shares.append(sides[0] - sides[1])
        gap, inside = shares[0], math.fsum(shares[1:])
        return inside / gap if gap else None

    def _contribution(self, arm: Arm, bucket: str | None) -> float | None:
        """Mean over seeds of the window mean of clipped mass (in a bucket) / mass of all."""
        suffix = "" if bucket is None else f"/{bucket}"
        values = []
        for seed in self.criterion.seeds:
            run = arm.runs.get(seed)
            lines = [] if run is None else in_window(run, self.criterion.window)
            parts = [
                (line.get(f"clip/clip_mass{suffix}") or 0.0) / line["clip/adv_mass"]
                for line in lines
                if line.get("clip/adv_mass")
            ]
            if not parts:
                return None
            values.append(math.fsum(parts) / len(parts))
        return math.fsum(values) / len(values)

    # -- guards

    def guards(self) -> list[Guard]:
        """Every declared guard, and that the arms differ in their own keys only."""
        known = {
            "all_runs_finished": self._all_finished,
            "base_evaluated": self._base_evaluated,
            "fingerprints_ok": self._fingerprints_ok,
            "fresh_ratio_one": self._fresh_ratio_one,
            "lag_raises_kl_and_clipping": self._lag_raises,
            "control_above_zero": self._control_above_zero,
        }
        return [self._same_settings(), *(known[name]() for name in self.criterion.guards)]

    def _same_settings(self) -> Guard:
        own = {*self.treatment.keys, *self.control.keys, "lag.steps"}
        tables = [flat(run.recipe) for arm in self.arms for run in arm.runs.values()]
        keys = sorted({key for table in tables for key in table})
        differ = [
            key
            for key in keys
            if key not in own
            and not key.startswith(FREE)
            and any(table.get(key) != tables[0].get(key) for table in tables)
        ]
        text = (
            f"arms also differ in {', '.join(differ)}" if differ else "arms differ in nothing else"
        )
        return Guard(name="same_settings", ok=not differ, text=text)

    def _all_finished(self) -> Guard:
        lacks = []
        for arm in self.arms:
            for seed in self.criterion.seeds:
                run = arm.runs.get(seed)
                if run is None:
                    lacks.append(f"{arm.name} seed {seed} is missing")
                elif not run.finished:
                    lacks.append(f"{run.name} is unfinished")
        return Guard(
            name="all_runs_finished", ok=not lacks, text="; ".join(lacks) or "all finished"
        )

    def _base_evaluated(self) -> Guard:
        models = {run.cell.model for arm in self.arms for run in arm.runs.values()}
        lacks = [m for m in sorted(models) if not any(g.at(m, 0) is not None for g in self.groups)]
        ok = bool(models) and not lacks
        text = f"no step-0 evaluation of {', '.join(lacks)}" if lacks else "step 0 is evaluated"
        return Guard(name="base_evaluated", ok=ok, text=text if models else "no runs")

    def _fingerprints_ok(self) -> Guard:
        bad = [
            f"{run.name} step {line['step']}"
            for arm in self.arms
            for run in arm.runs.values()
            for line in run.metrics
            if line.get("lag/fingerprint_ok") in (0, False)
        ]
        text = f"does not match: {', '.join(bad[:3])}" if bad else "every hand-over matches"
        return Guard(name="fingerprints_ok", ok=not bad, text=text)

    def _fresh_ratio_one(self) -> Guard:
        """At lag 0 sampler and trainer agree before the first update of a step."""
        bad, worst = [], 0.0
        for arm in (self.fresh(self.treatment), self.fresh(self.control)):
            for run in arm.runs.values():
                worst = max(
                    [worst, *(line.get("lag/fresh_mean_abs") or 0.0 for line in run.metrics)]
                )
                if any(line.get("lag/fresh_ok") in (0, False) for line in run.metrics):
                    bad.append(run.name)
        text = f"largest mean |log ratio| {worst:.3g}" + (f"; over the limit: {bad}" if bad else "")
        return Guard(name="fresh_ratio_one", ok=not bad, text=text)

    def _lag_raises(self) -> Guard:
        """The lag raises k3 and the raw clip share over lag 0, in every objective and seed."""
        bad = []
        for arm in (self.treatment, self.control):
            fresh = self.fresh(arm)
            for seed in self.criterion.seeds:
                pair = arm.runs.get(seed), fresh.runs.get(seed)
                for readout in ("kl/k3", "clip/clip_raw"):
                    values = [None if r is None else self.reading(r, readout) for r in pair]
                    if values[0] is None or values[1] is None or values[0] <= values[1]:
                        bad.append(f"{arm.name} seed {seed} {readout}")
        text = f"not raised: {', '.join(bad)}" if bad else "both rise everywhere"
        return Guard(name="lag_raises_kl_and_clipping", ok=not bad, text=text)

    def _control_above_zero(self) -> Guard:
        values = [value for value in self.readings(self.control).values() if value is not None]
        mean = math.fsum(values) / len(values) if values else 0.0
        ok = mean >= CONTROL_FLOOR
        return Guard(name="control_above_zero", ok=ok, text=f"{mean:.3g} (at least 1e-6)")

    # -- decision and what stands beside it

    def decision(self) -> Decision:
        """The verdict."""
        return decide(
            self.criterion,
            self.readings(self.treatment),
            self.readings(self.control),
            excess_share=self.excess_share(),
            interval=self._interval(),
            guards=self.guards(),
        )

    def _interval(self) -> tuple[float, float] | None:
        """Paired interval over problems of an evaluation readout, within seeds; else None."""
        if not self.criterion.readout.startswith("eval/"):
            return None
        d_P = self._paired(self.criterion.readout, [(self.treatment, 1.0), (self.control, -1.0)])
        if d_P is None:
            return None
        low, high = _percentiles(d_P, self.criterion.readout)
        return low, high

    def _paired(self, readout: str, terms: Sequence[tuple[Arm, float]]) -> Any:
        """Signed sum of per-problem scores, mean over seeds; None where something is missing."""
        total: Any = 0.0
        for arm, sign in terms:
            for seed in self.criterion.seeds:
                run = arm.runs.get(seed)
                values = None if run is None else self._scored(run, readout)
                if values is None:
                    return None
                total = total + sign * values / len(self.criterion.seeds)
        return total

    def extra(self) -> list[str]:
        """Numbers beside the verdict that never change it."""
        lines = []
        if self.criterion.readout == "clip/wclip_active":
            lines += self._weighting()
        for support in self.criterion.support:
            lines.append(self._support(support))
        return lines

    def _weighting(self) -> list[str]:
        """Common-weight totals, and the ratio that weighting alone would give."""
        common = [self._mean(arm, "clip/wclip_common") for arm in (self.treatment, self.control)]
        if common[0] is None or not common[1]:
            return ["common-weight totals: not logged"]
        ratio = common[0] / common[1]
        note = ": the finding is about weights, not drift" if abs(ratio - 1) < 0.1 else ""
        lines = [
            f"common-weight totals {common[0]:.4g} and {common[1]:.4g}, ratio {ratio:.3g}{note}"
        ]
        alone = self._weighting_alone()
        return lines + ([] if alone is None else [f"ratio that weighting alone gives: {alone:.3g}"])

    def _weighting_alone(self) -> float | None:
        """sum_k share_treatment(k) f_k(control) / sum_k share_control(k) f_k(control)."""
        size = next((r.recipe.train.group_size for r in self.control.runs.values()), 0)
        sums = [0.0, 0.0]
        for k in range(1, size):
            clipped = self._mean(self.control, f"clip/wclip_active/k={k}")
            if clipped is None:
                continue
            for place, arm in enumerate((self.treatment, self.control)):
                sums[place] += (self._mean(arm, f"clip/adv_share/k={k}") or 0.0) * clipped
        return sums[0] / sums[1] if sums[1] else None

    def _mean(self, arm: Arm, readout: str) -> float | None:
        runs = (arm.runs.get(seed) for seed in self.criterion.seeds)
        values = [v for run in runs if run and (v := self.reading(run, readout)) is not None]
        return math.fsum(values) / len(values) if values else None

    def _support(self, support: Support) -> str:
        terms = [(self.treatment, 1.0), (self.control, -1.0)]
        if support.effect.startswith("drop"):  # lag 0 minus lag, same objective
            terms = [
                (self.fresh(self.treatment), 1.0),
                (self.treatment, -1.0),
                (self.fresh(self.control), -1.0),
                (self.control, 1.0),
            ]
        d_P = self._paired(support.readout, terms)
        if d_P is None:
            return f"support {support.readout}: not evaluated everywhere"
        low, high = _percentiles(d_P, support.readout)
        detectable = DETECTABLE * float(d_P.std(ddof=1)) / math.sqrt(len(d_P))
        weak = ", underpowered" if 100 * detectable > support.at_least_points else ""
        return (
            f"support {support.readout}, {support.effect}: {100 * float(d_P.mean()):.1f} points "
            f"[{100 * low:.1f}, {100 * high:.1f}], at least {support.at_least_points:g} expected, "
            f"{100 * detectable:.1f} detectable (supporting only{weak})"
        )


def _percentiles(d_P: Any, label: str) -> tuple[float, float]:
    """95 % bootstrap interval over problems of a mean of per-problem values."""
    stream = generator(0, "bootstrap", "criteria", label)
    means = sorted((draw_weights(len(d_P), DRAWS, stream) @ d_P / len(d_P)).tolist())
    return means[int(0.025 * len(means))], means[int(0.975 * len(means))]


def in_window(run: Run, window: Window) -> list[Mapping[str, Any]]:
    """The logged steps of the window, both ends included."""
    last = window.to_step if window.to_step is not None else run.recipe.train.steps
    return [line for line in run.metrics if window.from_step <= line["step"] <= last]


def reduced(run: Run, readout: str, window: Window) -> float | None:
    """A readout over the window; steps without a value are left out, none at all gives None."""
    values = [line[readout] for line in in_window(run, window) if line.get(readout) is not None]
    if not values or not all(math.isfinite(value) for value in values):
        return None
    if window.reduce == "last":
        return float(values[-1])
    if window.reduce == "median":
        return float(plain_statistics.median(values))
    return math.fsum(values) / len(values)


def verdict_entry(
    criterion: Criterion, runs: Sequence[Run], runs_dir: Path | None = None
) -> dict[str, Any]:
    """A criterion's verdict with everything that the report prints."""
    evidence = Evidence(criterion, runs, read_groups(runs, runs_dir))
    decision = evidence.decision()
    numbers = {
        name: value for name, value in asdict(decision.quantities).items() if value is not None
    }
    readings = [
        [f"{arm.name} seed {seed}", "-" if value is None else f"{value:.4g}"]
        for arm in (evidence.treatment, evidence.control)
        for seed, value in evidence.readings(arm).items()
    ]
    return {
        "name": criterion.name,
        "readout": criterion.readout,
        "digest": criterion.digest(),
        "verdict": str(decision.verdict),
        "sentence": decision.sentence,
        "quantities": [*readings, *([name, f"{value:.4g}"] for name, value in numbers.items())],
        "guards": [[g.name, "yes" if g.ok else "no", g.text] for g in decision.guards],
        "extra": evidence.extra() if decision.verdict is not Verdict.INVALID else [],
    }
