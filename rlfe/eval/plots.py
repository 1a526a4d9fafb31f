"""pass@k over steps as a PNG: arms by colour, the base model dashed, one panel per task and lr.

The picture is drawn from the rows of the score table and from nothing else. Bands are the rows'
own intervals; points of different settings never share a panel; a gap in the steps that others
have is drawn as a gap. Same rows, same bytes (fixed fonts, no dates). Not here: the HTML report.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfe.errors import RequestError
from rlfe.eval.merge import Row
from rlfe.naming import REPLAY, TASKS, lr_tag, parse_cell, task_token
from rlfe.rundir import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart; black is the base model's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
ARM_WORDS = {"nobuf", *REPLAY.values()}  # what an arm's name begins with
INK, GRID = "#222222", "#d9d9d9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One drawn score. `lr` is None for the base model, which belongs to every panel of its task.

    `Point(model="tiny", arm="nobuf", lr=1e-3, seed=None, step=30, score=0.5, low=0.4, high=0.6)`
    """

    model: str
    arm: str
    lr: float | None
    seed: int | None
    step: int
    score: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Everything in one frame."""

    title: str
    k: int
    n: int
    points: tuple[Point, ...]


def own_tasks(rows: Iterable[Row]) -> set[str]:
    """Names of own tasks in the cells of a table, which does not say them.

    An own task is scored itself, or it stands behind the name of a scored base model, or before an
    arm as `rlfe train` names it.
    """
    rows = list(rows)
    found = {task_token(row["task"]) for row in rows}
    bases = {row["cell"] for row in rows if int(row["step"]) == 0}
    for cell in {row["cell"] for row in rows} - bases:
        tokens = cell.split("_")
        behind = (cell.removeprefix(f"{base}_") for base in bases if cell.startswith(f"{base}_"))
        found |= {rest.split("_")[0] for rest in behind}
        arms = [place for place, token in enumerate(tokens) if token in ARM_WORDS and place > 1]
        found |= {tokens[place - 1] for place in arms[:1]}
    return found


def point_of(row: Row, own: Collection[str] = ()) -> Point:
    """A row as a point; a cell whose name is no run name is a base model. `own`: own tasks."""
    try:
        cell = parse_cell(row["cell"], {*TASKS, *own})
        model, arm, lr, seed = cell.model, cell.arm, cell.lr, cell.seed
    except RequestError:
        model, arm, lr, seed = row["cell"], "base", None, None
    return Point(
        model=model,
        arm=arm,
        lr=lr,
        seed=seed,
        step=int(row["step"]),
        score=float(row["score"]),
        low=float(row["low"]) if row["low"] else None,
        high=float(row["high"]) if row["high"] else None,
    )


def plotted_ks(rows: Iterable[Row], asked: Sequence[int] = ()) -> tuple[int, ...]:
    """The k to draw: 1 and the largest shown k up to n/2, where the estimate is still steady."""
    n = max((int(row["n"]) for row in rows), default=1)
    usual = [k for k in (asked or (5, 10, 50, 100)) if 1 < k <= n / 2]
    return (1, max(usual)) if usual else (1,)


def panels(rows: Sequence[Row], ks: Sequence[int]) -> list[list[Panel]]:
    """Panels by line (task, settings, model, k) and column (lr); by k where there is one lr."""
    scored = [row for row in rows if row["score"] and int(row["k"]) in ks]
    lines = sorted({(row["task"], row["settings"]) for row in scored})
    tasks = [task for task, _ in lines]
    own = own_tasks(rows)
    grid: list[list[list[Panel]]] = []
    for task, settings in lines:
        name = task if tasks.count(task) == 1 else f"{task} {settings}"
        here = [row for row in scored if (row["task"], row["settings"]) == (task, settings)]
        drawn = [(int(row["k"]), point_of(row, own)) for row in here]
        for model in sorted({point.model for _, point in drawn}):
            points = {k: [p for at, p in drawn if at == k and p.model == model] for k in ks}
            n = int(here[0]["n"])
            grid.append([_line(name, model, k, n, points[k]) for k in ks if points[k]])
    if all(len(line) == 1 for block in grid for line in block):
        return [[line[0] for line in block] for block in grid if block]
    return [line for block in grid for line in block]


def _line(task: str, model: str, k: int, n: int, points: Sequence[Point]) -> list[Panel]:
    rates = sorted({p.lr for p in points if p.lr is not None}, reverse=True)
    base = [p for p in points if p.lr is None]
    head = f"{task}  pass@{k}\n{model}"
    if not rates:
        return [Panel(title=head, k=k, n=n, points=tuple(base))]
    return [
        Panel(
            title=f"{head}  {lr_tag(lr)}",
            k=k,
            n=n,
            points=(*base, *(p for p in points if p.lr == lr)),
        )
        for lr in rates
    ]


def write_plot(path: Path, rows: Sequence[Row], ks: Sequence[int]) -> bool:
    """Write the PNG; False when no row has a score, then nothing is written."""
    grid = panels(rows, ks)
    if grid:
        write_bytes(path, png(grid))
    return bool(grid)


def png(grid: Sequence[Sequence[Panel]]) -> bytes:
    """The figure as PNG bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    wide = max(len(line) for line in grid)
    style: Any = {"font.family": "DejaVu Sans", "font.size": 9, "axes.edgecolor": GRID}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(1.2 + 3.6 * wide, 0.9 + 2.7 * len(grid)), dpi=144)
        axes = figure.subplots(len(grid), wide, squeeze=False, sharex=True)
        arms = sorted({p.arm for line in grid for panel in line for p in panel.points if p.lr})
        for line, row_axes in zip(grid, axes, strict=True):
            for index, ax in enumerate(row_axes):
                if index < len(line):
                    _draw(ax, line[index], arms)
                else:
                    ax.set_axis_off()
            if len({panel.k for panel in line}) == 1:
                _share_y(row_axes[: len(line)])
        for ax in axes[-1]:
            ax.set_xlabel("training step")
        _legend(figure, arms, grid)
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _share_y(axes: Sequence[Axes]) -> None:
    low = min(ax.get_ylim()[0] for ax in axes)
    high = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(max(-2.0, low), min(102.0, high))


def _draw(ax: Axes, panel: Panel, arms: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(panel.title, fontsize=9, loc="left", color=INK)
    ax.grid(axis="y", color=GRID, linewidth=0.6)
    ax.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.set_ylabel("%")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for base in (p for p in panel.points if p.lr is None):
        ax.axhline(100 * base.score, color=INK, linestyle="--", linewidth=1.1)
        if base.low is not None and base.high is not None:
            ax.axhspan(100 * base.low, 100 * base.high, color=INK, alpha=0.05, linewidth=0)
    steps = sorted({p.step for p in panel.points if p.lr is not None})
    for arm, seed in sorted({(p.arm, p.seed or 0) for p in panel.points if p.lr is not None}):
        chosen = [
            p for p in panel.points if (p.arm, p.seed or 0) == (arm, seed) and p.lr is not None
        ]
        _curve(
            ax, sorted(chosen, key=lambda p: p.step), steps, COLOURS[arms.index(arm) % len(COLOURS)]
        )


def _curve(ax: Axes, points: Sequence[Point], steps: Sequence[int], colour: str) -> None:
    by_step = {point.step: point for point in points}
    inside = [s for s in steps if points[0].step <= s <= points[-1].step]
    nan = float("nan")  # a step that others have and this arm lacks breaks its line

    def values(read: Any) -> list[float]:
        return [100 * read(by_step[s]) if s in by_step else nan for s in inside]

    ax.plot(
        inside, values(lambda p: p.score), color=colour, marker="o", markersize=3.5, linewidth=1.5
    )
    if all(p.low is not None and p.high is not None for p in points):
        low, high = values(lambda p: p.low), values(lambda p: p.high)
        ax.fill_between(inside, low, high, color=colour, alpha=0.12, linewidth=0)


def _legend(figure: Any, arms: Sequence[str], grid: Sequence[Sequence[Panel]]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLOURS[i % len(COLOURS)], marker="o", markersize=3.5, label=arm)
        for i, arm in enumerate(arms)
    ]
    if any(p.lr is None for line in grid for panel in line for p in panel.points):
        handles.append(Line2D([], [], color=INK, linestyle="--", label="base model"))
    bands = "bands: 95 % over problems"
    height = figure.get_size_inches()[1]
    figure.legend(handles=handles, loc="upper left", ncols=4, frameon=False, fontsize=9)
    figure.text(0.995, 0.004, bands, ha="right", va="bottom", fontsize=7, color="#666666")
    figure.tight_layout(rect=(0.008, 0.0, 1, 1 - 0.35 / height), h_pad=1.5)
