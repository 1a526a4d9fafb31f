"""The report's figures as PNG and PDF, from the same payload as the page.

Three pictures: scores over steps (`rlfe.eval.plots`), gain against forgetting, paired differences
between arms with their simultaneous bands. Same payload, same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfe.eval.plots import COLOURS, GRID, INK
from rlfe.rundir import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (5.2, 3.4)


def write_figures(folder: Path, payload: Mapping[str, Any]) -> list[Path]:
    """Write every figure that has something to show; returns the files."""
    made = []
    if payload["paths"]:
        made += _save(folder / "gain_forgetting", _gain, payload["paths"], payload["runs"])
    for group in payload["groups"]:
        if group["arms"]:
            name = f"difference_{group['task']}_{group['settings']}"
            made += _save(folder / name, _difference, group["arms"], group)
    return made


def _save(base: Path, drawer: Any, data: Sequence[Any], extra: Any) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    style: Any = {"font.family": "DejaVu Sans", "font.size": 9, "axes.edgecolor": GRID}
    files = []
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, dpi=144)
        drawer(figure.subplots(), data, extra)
        figure.tight_layout()
        for ending, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
            out = io.BytesIO()
            figure.savefig(out, format=ending[1:], metadata=metadata)
            write_bytes(base.with_name(base.name + ending), out.getvalue())
            files.append(base.with_name(base.name + ending))
    return files


def _frame(ax: Axes, x: str, y: str) -> None:
    ax.grid(color=GRID, linewidth=0.6)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _gain(ax: Axes, paths: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> None:
    arms = sorted({run["arm"] for run in runs})
    arm_of = {run["name"]: run["arm"] for run in runs}
    for path in paths:
        colour = COLOURS[arms.index(arm_of[path["cell"]]) % len(COLOURS)]
        x = [100 * value for value in path["forgetting"]]
        y = [100 * value for value in path["gain"]]
        ax.plot(x, y, color=colour, marker="o", markersize=3, linewidth=1.2, label=path["cell"])
        ax.annotate(str(path["steps"][-1]), (x[-1], y[-1]), fontsize=7, color=colour)
    ax.axvline(0, color=INK, linewidth=0.8)
    _frame(ax, "forgetting, points of pass@1", f"gain on {paths[0]['trained']}, points of pass@1")
    ax.legend(fontsize=6, frameon=False)


def _difference(ax: Axes, arms: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> None:
    for index, entry in enumerate(arms):
        k = range(1, len(entry["effect"]) + 1)
        effect, low, high = (
            [100 * value for value in entry[name]] for name in ("effect", "band_low", "band_high")
        )
        colour = COLOURS[index % len(COLOURS)]
        label = f"{entry['a']} - {entry['b']}, step {entry['step']}"
        ax.plot(k, effect, color=colour, linewidth=1.4, label=label)
        ax.fill_between(k, low, high, color=colour, alpha=0.12, linewidth=0)
    ax.set_xscale("log")
    _frame(ax, "k", f"{group['task']} pass@k difference, points")
    ax.set_title("simultaneous 95 % bands over k", fontsize=8, loc="left")
    ax.legend(fontsize=6, frameon=False)
