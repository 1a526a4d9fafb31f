"""Everything that the report states, computed from the gathered counts; plain values out.

Shares become rounded numbers at the very end. One set of bootstrap and sign draws per (task,
number of problems) serves all comparisons, derived from the report seed: same inputs, same bytes.
Comparisons against the base and between arms at the last common step are exploratory unless a
criterion declares them; the arm comparisons are corrected together (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from rlfe.eval import forgetting as lost
from rlfe.eval.paired import Comparison, compare, crossover, draw_signs, holm
from rlfe.eval.passk import pass_at_all_k, shown_ks
from rlfe.eval.report.gather import Group, Point, Run
from rlfe.eval.report.series import series_payload, trained_task
from rlfe.eval.statistics import (
    DRAWS,
    bootstrap_means,
    cluster_standard_error,
    draw_weights,
    hierarchical,
    over_seeds,
    percentiles,
    sampling_only,
)
from rlfe.randomness import generator

ONE_SEED = "1 seed: intervals cover problems, not training randomness"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Shared random draws for one (task, number of problems)."""

    weights_BP: np.ndarray
    signs_BP: np.ndarray


class Analysis:
    """Computes the payload of a report.

    Args:
        runs: The runs, by name.
        groups: Their evaluations (`gather.read_groups`).
        seed: Report seed.
        clusters: Problem id -> cluster, for problems that belong together; empty: none.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        groups: Sequence[Group],
        seed: int = 0,
        clusters: Mapping[str, str] | None = None,
    ) -> None:
        self.runs, self.groups, self._seed = runs, groups, seed
        self._clusters = clusters or {}
        self._by_name = {run.name: run for run in runs}
        self._draws: dict[tuple[str, int], Draws] = {}
        self._values: dict[tuple[str, str, str, int], np.ndarray] = {}
        self._means: dict[tuple[str, str, str, int], np.ndarray] = {}

    def payload(self) -> dict[str, Any]:
        """Every number of the report, in JSON's own types."""
        return {
            "runs": [self._run(run) for run in self.runs],
            "groups": [self._group(group) for group in self._ordered() if group.points],
            **series_payload(self.runs, self.groups),
            "notes": self.notes(),
        }

    def _ordered(self) -> list[Group]:
        """Trained tasks first, then the others, then the base-tests rows."""
        trained = {trained_task(run) for run in self.runs}

        def place(group: Group) -> tuple[int, str, str]:
            side = 2 if group.task.endswith("_base") else int(group.task not in trained)
            return side, group.task, group.settings

        return sorted(self.groups, key=place)

    def notes(self) -> list[str]:
        """What a reader has to know before the numbers."""
        notes = [f"{g.task} {g.settings}: {text}" for g in self.groups for text in g.left_out]
        arms: dict[tuple[str, str, float], int] = {}
        for run in self.runs:
            key = (run.cell.model, run.arm, run.cell.lr)
            arms[key] = arms.get(key, 0) + 1
        if arms and max(arms.values()) == 1:
            notes.append(ONE_SEED)
        for run in self.runs:
            if not run.finished:
                last = max((line["step"] for line in run.metrics), default=0)
                reason = run.provenance.get("ended")
                why = f" ({reason})" if reason else ""
                notes.append(f"{run.name} stopped at step {last} of {run.recipe.train.steps}{why}")
        return notes

    def _run(self, run: Run) -> dict[str, Any]:
        return {
            "name": run.name,
            "model": run.cell.model,
            "arm": run.arm,
            "lr": run.cell.lr,
            "lr_text": run.lr_text,
            "seed": run.cell.seed or 0,
            "finished": run.finished,
        }

    # -- scores

    def values(self, group: Group, point: Point) -> np.ndarray:
        """Per-problem pass@k [P, K] of a point, computed once."""
        key = (group.task, group.settings, point.cell, point.step)
        if key not in self._values:
            self._values[key] = pass_at_all_k(group.n, point.correct_P)
        return self._values[key]

    def means(self, group: Group, point: Point) -> np.ndarray:
        """Bootstrap means [B, K] of a point.

        Kept for the base models of a task, which everything is compared with, and for the newest
        other point: 13 MB each at 160 samples.
        """
        key = (group.task, group.settings, point.cell, point.step)
        if key not in self._means:
            same = (k for k in self._means if k[:2] == key[:2] and k[3] == 0)
            self._means = {k: self._means[k] for k in same}
            self._means[key] = bootstrap_means(
                self.values(group, point), self.draws(group).weights_BP
            )
        return self._means[key]

    def draws(self, group: Group) -> Draws:
        """Draws of this task and number of problems."""
        key = (group.task, len(group.problems))
        if key not in self._draws:
            size = len(group.problems)
            self._draws[key] = Draws(
                weights_BP=draw_weights(size, DRAWS, self._stream("bootstrap", group.task)),
                signs_BP=draw_signs(size, self._stream("signs", group.task)),
            )
        return self._draws[key]

    def _stream(self, use: str, task: str) -> np.random.Generator:
        return generator(self._seed, use, "report", task)

    def base_of(self, group: Group, cell: str) -> Point | None:
        """The base model's point of a cell in this group."""
        run = self._by_name.get(cell)
        return group.at(run.cell.model, 0) if run is not None else None

    def _group(self, group: Group) -> dict[str, Any]:
        points, against = [], []
        for point in group.points:
            points.append(self._point(group, point))
            entry = self._against_base(group, point)
            against += [] if entry is None else [entry]
        return {
            "task": group.task,
            "settings": group.settings,
            "n": group.n,
            "shown": list(shown_ks(group.n)),
            "problems": list(group.problems),
            "facts": dict(group.facts),
            "points": points,
            "against_base": against,
            "arms": self._arms(group),
            "seeds": self._seeds(group),
        }

    def _point(self, group: Group, point: Point) -> dict[str, Any]:
        p_PK = self.values(group, point)
        found: dict[str, Any] = {
            "cell": point.cell,
            "step": point.step,
            "score": rounded(p_PK.mean(axis=0)),
            "correct": [int(c) for c in point.correct_P],
            "rates": {name: round(value, 4) for name, value in point.rates.items()},
        }
        if len(group.problems) > 1:
            interval = percentiles(self.means(group, point))
            noise = sampling_only(
                group.n, point.correct_P, self._stream("sampling", group.task), 200
            )
            found |= {
                "low": rounded(interval.low_K),
                "high": rounded(interval.high_K),
                "sampling_se": rounded(noise.se_K, 5),
                "sampling_method": list(noise.method_K),
            }
        if self._clusters.keys() & set(group.problems):
            names = [self._clusters.get(problem, problem) for problem in group.problems]
            found["cluster_se"] = rounded(cluster_standard_error(p_PK, names), 5)
        return found

    # -- comparisons

    def comparison(self, group: Group, a: Point, b: Point) -> Comparison | None:
        """a - b, paired; None where there is a single problem."""
        if len(group.problems) < 2:
            return None
        draws = self.draws(group)
        means_BK = self.means(group, a) - self.means(group, b)
        return compare(
            self.values(group, a),
            self.values(group, b),
            draws.weights_BP,
            draws.signs_BP,
            tested=shown_ks(group.n),
            means_BK=means_BK,
        )

    def _against_base(self, group: Group, point: Point) -> dict[str, Any] | None:
        base = self.base_of(group, point.cell)
        result = None if base is None else self.comparison(group, point, base)
        if base is None or result is None:
            return None
        return {
            "cell": point.cell,
            "step": point.step,
            **_curve(result),
            "crossover": crossover(result),
            "transitions": lost.transitions(base.correct_P, point.correct_P, group.n)._asdict(),
            "support": lost.support(base.correct_P, point.correct_P, group.n, group.n)._asdict(),
            "retention": self._retention(group, base, point),
        }

    def _retention(self, group: Group, base: Point, point: Point) -> list[float] | None:
        """s(t)/s(0) at pass@1 with its paired interval; None where the base solves too little."""
        ratio = lost.retention(
            self.values(group, base)[:, 0],
            self.values(group, point)[:, 0],
            self.draws(group).weights_BP,
        )
        return None if ratio is None else [round(value, 4) for value in ratio]

    def _arms(self, group: Group) -> list[dict[str, Any]]:
        """Pairs of arms with the same model, lr and seed, at their last common kept step."""
        found = []
        for a, b in combinations(self.runs, 2):
            if (a.cell.model, a.cell.lr, a.cell.seed) != (b.cell.model, b.cell.lr, b.cell.seed):
                continue
            steps = {p.step for p in group.series(a.name)} & {p.step for p in group.series(b.name)}
            if not steps:
                continue
            step = max(steps)
            points = group.at(a.name, step), group.at(b.name, step)
            assert points[0] is not None
            assert points[1] is not None
            result = self.comparison(group, points[0], points[1])
            if result is not None:
                names = {"a": a.name, "b": b.name, "step": step, "lr_text": a.lr_text}
                found.append({**names, **_curve(result)})
        for k in shown_ks(group.n):
            adjusted = holm([entry["p"][k - 1] for entry in found])
            for entry, p in zip(found, adjusted, strict=True):
                entry.setdefault("holm", {})[str(k)] = round(p, 4)
        return found

    def _seeds(self, group: Group) -> list[dict[str, Any]]:
        """pass@1 over seeds of one (model, arm, lr) and step, where there are several.

        The mean with its t interval, and an interval over seeds and problems together.
        """
        places: dict[tuple[str, str, float, int], list[Point]] = {}
        for point in group.points:
            run = self._by_name.get(point.cell)
            if run is not None:
                key = (run.cell.model, run.arm, run.cell.lr, point.step)
                places.setdefault(key, []).append(point)
        found = []
        for (model, arm, lr, step), points in sorted(places.items()):
            if len(points) > 1:
                p_SPK = np.stack([self.values(group, point)[:, :1] for point in points])
                both = hierarchical(p_SPK, self._stream("hierarchical", group.task))
                mean = over_seeds([float(p_PK.mean()) for p_PK in p_SPK])
                ends = {"both_low": float(both.low_K[0]), "both_high": float(both.high_K[0])}
                where = {"model": model, "arm": arm, "lr": lr, "step": step}
                found.append({**where, **mean._asdict(), **ends})
        return found


def _curve(result: Comparison) -> dict[str, Any]:
    names = ("effect", "low", "high", "band_low", "band_high", "detectable")
    arrays = {name: rounded(getattr(result, f"{name}_K")) for name in names}
    return {
        **arrays,
        "p": rounded(result.p_K),
        "multiplier": round(result.multiplier, 3),
    }


def rounded(values: np.ndarray, digits: int = 4) -> list[float | None]:
    """Plain numbers; NaN becomes None. Adding 0.0 turns -0.0 into 0.0."""
    return [
        None if math.isnan(value) else round(float(value), digits) + 0.0
        for value in values.tolist()
    ]
