"""The card's tables of scores, forgetting and comparisons, from the evaluation tables.

Rows of different settings never share a table. Not here: intervals and p values, which come in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlfe.hub.card_text import one_line
from rlfe.hub.evaluations import Point, Results, Score, percent
from rlfe.hub.material import Material
from rlfe.hub.series import Cell

TRAINED_AS = {"mbpp": ("mbpp_plus", "mbpp_base", "mbpp_test"), "gsm8k": ("gsm8k",)}
EVERY = 100  # the card shows base, best, last and each of these steps; tables hold all


def score_table(material: Material, task: str, settings: str) -> dict[str, Any]:
    results = material.results
    points = sorted(p for p in results.scores if (p.task, p.settings) == (task, settings))
    names = {cell.name for cell in material.cells}
    chosen = _shown(points, results)
    shown = [point for point in points if point.cell not in names or point in chosen]
    ks = _shown_ks(results.samples[task, settings])
    return {
        "task": task, "ks": ks, "rows": [_score_row(p, results, ks, names) for p in shown],
        "protocol": protocol(material, task, settings),
        "caption": f"pass@k in percent [{results.intervals[task, settings] or 'no interval'}]. "
        "Base, best, last and every 100th step; all steps are in `evals/`.",
    }  # fmt: skip


def _shown(points: Sequence[Point], results: Results) -> set[Point]:
    """Best, last and every 100th step of every cell."""
    found: set[Point] = set()
    for cell in {point.cell for point in points}:
        mine = [point for point in points if point.cell == cell]
        best = max(mine, key=lambda point: (results.scores[point][1].score, -point.step))
        found |= {best, mine[-1], *(point for point in mine if point.step % EVERY == 0)}
    return found


def _shown_ks(n: int) -> list[int]:
    return sorted({k for k in (1, 5, 10, 50, 100, n) if k <= n})


def _score_row(
    point: Point, results: Results, ks: Sequence[int], names: set[str]
) -> dict[str, Any]:
    scores, rates = results.scores[point], results.rates.get(point, {})
    base = "" if point.cell in names else " (base)"
    return {
        "cell": f"`{point.cell}`{base}", "step": point.step,
        "scores": [scores[k].text if k in scores else "-" for k in ks],
        "cut": _rate(rates, "cut"), "syntax": _rate(rates, "syntax_error"),
        "distinct": _rate(rates, "distinct"),
    }  # fmt: skip


def _rate(rates: Mapping[str, float], name: str) -> str:
    return f"{percent(rates[name])} %" if name in rates else "-"


def protocol(material: Material, task: str, settings: str) -> str:
    """The evaluation in one line, from the settings that lie beside the table."""
    results, key = material.results, (task, settings)
    facts = results.settings.get(settings, {})
    told = [f"{results.problems[key]} problems", f"n={results.samples[key]}"]
    told += _named(facts.get("sampling", {}), ("temperature", "top_p", "max_tokens"))
    told += _prompt_facts(facts.get("prompt", {}))
    told += _named(facts, ("judge", "mode", "limit", "seed"))
    told += _named(engine := facts.get("engine", {}), sorted(engine))
    if facts.get("data_sha256"):
        told.append(f"data {facts['data_sha256'][:8]}")
    return "; ".join([*told, "unbiased pass@k", f"settings `{settings}`"]) + "."


def _named(facts: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """`name value` of what is there."""
    return [one_line(f"{n} {facts[n]}") for n in names if facts.get(n) not in (None, "")]


def _prompt_facts(prompt: Mapping[str, Any]) -> list[str]:
    if not prompt:
        return []
    # as JSON between four backticks: stop texts hold line ends, bars and fences
    stop = f"```` {json.dumps(prompt['stop'])} ````" if prompt.get("stop") else "none"
    return [f"prompt {prompt.get('format')} ({str(prompt.get('sha256'))[:8]})", f"stop {stop}"]


def forgetting_rows(material: Material) -> list[dict[str, Any]]:
    results, rows = material.results, []
    for cell in material.cells:
        trained = TRAINED_AS.get(cell.parts.task, (cell.parts.task,))
        for task, settings in results.groups():
            base = results.scores.get(Point(cell.parts.model, 0, task, settings), {}).get(1)
            steps = [s for s in results.steps(cell.name, task, settings) if s > 0]
            if task in trained or base is None or not steps:
                continue
            series = {s: results.scores[Point(cell.name, s, task, settings)][1] for s in steps}
            rows.append(_drop_row(cell, task, base, series))
    return rows


def _drop_row(cell: Cell, task: str, base: Score, series: Mapping[int, Score]) -> dict[str, Any]:
    last = max(series)
    worst = max(series, key=lambda step: (base.score - series[step].score, -step))
    has_retention = base.low is not None and base.low > 0
    kept = f"{percent(series[last].score / base.score)} %" if has_retention else "-"
    return {
        "cell": cell.name, "step": last, "task": task, "base": base.text,
        "score": series[last].text, "drop": f"{100 * (base.score - series[last].score):+.1f}",
        "retention": kept,
        "worst": f"{100 * (base.score - series[worst].score):+.1f} ({worst})",
    }  # fmt: skip


def forgetting_note(material: Material) -> str:
    paired = [row for row in material.comparisons if row.kind == "forgetting"]
    if not paired:
        return "Drops are differences of two scores; paired intervals were not computed."
    told = [f"{row.name} on {row.task}: {row.text}" for row in paired]
    return f"Paired, checkpoint minus base, points, 95 % over problems: {'; '.join(told)}."


def transition_rows(material: Material) -> list[dict[str, str]]:
    return [
        {
            "name": row.name, "task": row.task, "lost": f"{percent(row.lost)} %",
            "found": f"{percent(row.found)} %",
        }
        for row in material.comparisons
        if row.lost is not None and row.found is not None
    ]  # fmt: skip


def comparison_rows(material: Material) -> list[dict[str, str]]:
    return [
        {
            "name": row.name, "task": row.task, "text": row.text, "p": f"{row.p:.4f}",
            "detectable": f"{row.detectable:.1f}", "label": row.label,
        }
        for row in material.comparisons
    ]  # fmt: skip


def seeds_note(cells: Sequence[Cell]) -> str:
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for cell in cells:
        key = (cell.parts.model, cell.parts.task, cell.parts.arm, cell.parts.lr)
        seeds.setdefault(key, set()).add(cell.parts.seed or 0)
    fewest = min((len(found) for found in seeds.values()), default=0)
    if fewest > 1:
        return f"Every arm was trained with at least {fewest} seeds."
    return (
        "At least one arm was trained once (1 seed): intervals cover problems, not training "
        "randomness. A difference between two runs may be the difference between two seeds."
    )
