"""One HTML file from the payload: no network, light and dark, keyboard usable, under 3 MB.

Drawing happens in the page (`page.js`), from the same numbers that the tables hold. Sentences are
computed here. Try: `rlfe report runs/* -o report`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from rlfe.config import dump
from rlfe.eval.report.analysis import Analysis
from rlfe.eval.report.gather import Run
from rlfe.records import plain

LIMIT_BYTES = 3_000_000
CURVE_POINTS = 300  # a training curve is thinned to this many
CURVES = {
    "reward (mean)": "reward/mean",
    "success share": "reward/success",
    "KL to the behaviour policy (k3)": "kl/k3",
    "entropy": "entropy",
    "kept groups (share)": "filter/kept_ratio",
    "gradient norm": "optim/grad_norm",
    "replies cut (share)": "length/truncated",
    "clipped advantage share (all)": "clip/wclip_active",
}
BUCKET = "clip/wclip_active/"


def page(payload: Mapping[str, Any], title: str) -> str:
    """The HTML text; the payload is embedded as JSON that no tag can end."""
    data = json.dumps(plain(payload), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {
        "@@TITLE@@": html.escape(title),
        "@@STYLE@@": _file("page.css"),
        "@@SCRIPT@@": _file("page.js"),
        "@@DATA@@": data,
    }
    text = _file("page.html")
    for token in ("@@TITLE@@", "@@STYLE@@", "@@SCRIPT@@", "@@DATA@@"):
        text = text.replace(token, parts[token])
    return text


def _file(name: str) -> str:
    return (resources.files("rlfe.eval.report") / name).read_text(encoding="utf-8")


def training_curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Curves of the training record that any run has, buckets of the clip share after the total."""
    buckets = sorted({key for run in runs for line in run.metrics[:50] for key in line
                      if key.startswith(BUCKET) and "k=" not in key})  # fmt: skip
    names = CURVES | {f"clipped advantage share, k = {k.removeprefix(BUCKET)}": k for k in buckets}
    found = []
    for name, key in names.items():
        lines = [
            {"run": run.name, "points": points} for run in runs if (points := _curve(run, key))
        ]
        if lines:
            found.append({"name": name, "lines": lines})
    return found


def _curve(run: Run, key: str) -> list[list[float | None]]:
    """[step, value] thinned to a few hundred points; a null stays a gap."""
    points = [[line["step"], line.get(key)] for line in run.metrics]
    if all(value is None for _, value in points):
        return []
    stride = max(1, -(-len(points) // CURVE_POINTS))
    return [[step, None if v is None else float(f"{v:.5g}")] for step, v in points[::stride]]


def settings_texts(runs: Sequence[Run], groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """(name, text) of every settings text and every run's configuration and provenance."""
    found = [
        [f"{g['task']} {g['settings']}", json.dumps(g["facts"], indent=1, sort_keys=True)]
        for g in groups
    ]
    for run in runs:
        facts = json.dumps(plain(run.provenance), indent=1, sort_keys=True)
        found.append([run.name, f"{dump(run.recipe)}\n{facts}"])
    return found


def answers(analysis: Analysis, payload: Mapping[str, Any]) -> list[str]:
    """What the runs came to in a few sentences, each with its interval."""
    sentences = []
    for path in payload["paths"]:
        group = next(g for g in payload["groups"] if g["task"] == path["trained"])
        last = [e for e in group["against_base"] if e["cell"] == path["cell"]]
        if last:
            entry = max(last, key=lambda e: e["step"])
            gained = f"{_points(entry)} on {path['trained']}"
            lost = f"mean forgetting {100 * path['forgetting'][-1]:.1f} points"
            others = ", ".join(path["others"])
            text = f"{path['cell']} at step {entry['step']}: {gained} pass@1, {lost} ({others})."
            sentences.append(text)
    for group in payload["groups"]:
        if group["task"].endswith("_base"):
            continue
        for entry in group["arms"]:
            differs = entry["band_low"][0] > 0 or entry["band_high"][0] < 0
            verdict = "different" if differs else (
                f"no difference shown ({100 * entry['detectable'][0]:.1f} points would have been)"
            )  # fmt: skip
            sentences.append(
                f"{entry['a']} against {entry['b']} at step {entry['step']}: {_points(entry)} on "
                f"{group['task']} pass@1, {verdict}."
            )
    return sentences or ["No claim: nothing was evaluated that could be compared."]


def _points(entry: Mapping[str, Any]) -> str:
    effect, low, high = (100 * entry[name][0] for name in ("effect", "low", "high"))
    return f"{effect:+.1f} points [{low:.1f}, {high:.1f}]"
