"""Trackers beside metrics.jsonl: the console line, wandb, trackio, tensorboard.

What: opening the trackers that `track.loggers` names, one call per step, tables of samples. Each
library is imported only when asked for. A tracker that fails is named once and left out; it never
stops a run. Samples leave the machine only with `track.samples`. A resumed run continues the same
history, and no other run does: its random id lies in the run folder and goes with it, so that
`--overwrite` and a run of the same name elsewhere begin their own. Not here: metrics.jsonl
(recording.py), printing (rlfe.cli).

Without an API key wandb writes offline (`wandb sync` sends it later) instead of asking.
"""

from __future__ import annotations

import json
import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlfe.rundir import write_text
from rlfe.types import StepRecord


class SampleRow(NamedTuple):
    """A line of a sample table."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    advantage: float | None


class Tracker(Protocol):
    """One hosted or local history."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def samples(self, rows: Sequence[SampleRow], step: int) -> None: ...
    def close(self) -> None: ...


class Start(NamedTuple):
    """What a tracker is opened with. `step` is the number of finished steps (0: a new run)."""

    project: str
    name: str
    run_id: str
    folder: Path
    config: Mapping[str, Any]
    step: int


class Trackers:
    """All trackers of a run; a failure takes one out and says so once.

    Args:
        loggers: Names from `track.loggers`; `console` has no library and is `step_line`.
        start: See `Start`.
        samples: `track.samples`.
        warn: Called with a sentence.
    """

    def __init__(
        self, loggers: Sequence[str], start: Start, *, samples: bool, warn: Callable[[str], None]
    ) -> None:
        self._warn, self._samples = warn, samples
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(loggers):
            if name != "console":
                self._guarded(name, partial(self._start, name, start))

    @property
    def names(self) -> tuple[str, ...]:
        """Trackers that work."""
        return tuple(self._open)

    def log(self, record: StepRecord) -> None:
        """Numbers of a step; what is absent is not sent."""
        values = tracked(record)
        for name, tracker in list(self._open.items()):
            self._guarded(name, partial(tracker.log, values, record.step))

    def samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """A table of samples; nothing without `track.samples`."""
        if not self._samples:
            return
        for name, tracker in list(self._open.items()):
            self._guarded(name, partial(tracker.samples, rows, step))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close)
        self._open.clear()

    def _start(self, name: str, start: Start) -> None:
        self._open[name] = BY_NAME[name](start)

    def _guarded(self, name: str, action: Callable[[], Any]) -> None:
        try:
            with redirect_stdout(sys.stderr):  # trackio prints; stdout is for results
                action()
        except Exception as error:
            self._open.pop(name, None)
            self._warn(f"tracker {name} is off from here on: {error or type(error).__name__}")


class Wandb:
    """Weights & Biases; steps that a resumed run repeats are dropped by it, as identical."""

    def __init__(self, start: Start) -> None:
        import wandb

        self._library = wandb
        self._run = wandb.init(
            project=start.project,
            name=start.name,
            id=start.run_id,
            dir=str(start.folder),
            config=dict(start.config),
            resume="allow",
            mode=None if wandb.setup().settings.api_key else "offline",
            # Neither the console's text nor our code is sent: it may hold samples.
            settings=wandb.Settings(console="off", save_code=False),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        table = self._library.Table(
            columns=list(SampleRow._fields), data=[list(row) for row in rows]
        )
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio, local first; the run's id is part of its name, which is what it resumes by."""

    def __init__(self, start: Start) -> None:
        import trackio

        self._library = trackio
        trackio.init(
            project=start.project,
            name=f"{start.name}-{start.run_id}",
            config=dict(start.config),
            resume="allow",
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._library.log(dict(metrics), step=step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        import pandas as pd

        table = self._library.Table(dataframe=pd.DataFrame(rows, columns=list(SampleRow._fields)))
        self._library.log({"samples": table}, step=step)

    def close(self) -> None:
        self._library.finish()


class Tensorboard:
    """Event files in the run's folder; what a resumed run repeats is purged first."""

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(start.folder / "tensorboard" / start.run_id),
            purge_step=start.step + 1 if start.step else None,
        )
        self._writer.add_text("config", f"```json\n{json.dumps(dict(start.config), indent=1)}\n```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        text = "\n\n---\n\n".join(_as_text(row) for row in rows)
        self._writer.add_text("samples", text, step)

    def close(self) -> None:
        self._writer.close()


def tracked(record: StepRecord) -> dict[str, float]:
    """The finite numbers of a record, wall times as `seconds/<phase>`, rates as `speed/<name>`."""
    values = {
        "version": record.version,
        "behavior_version": record.behavior_version,
        **record.metrics,
        **{f"seconds/{phase}": value for phase, value in record.seconds.items()},
        **{f"speed/{name}": value for name, value in record.speed.items()},
    }
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def step_line(record: StepRecord, *, steps: int) -> str:
    """The console's aligned line: step, reward, kept/total groups, replayed, KL, seconds."""
    metrics = record.metrics
    kept, groups = metrics.get("filter/kept_groups"), metrics.get("filter/groups")
    width = len(str(steps))
    return (
        f"step {record.step:>{width}}/{steps}"
        f"  reward {_shown(metrics.get('reward/mean'), '.3f'):>6}"
        f"  groups {_shown(kept, 'd'):>3}/{_shown(groups, 'd'):<3}"
        f"  replayed {_shown(metrics.get('replay/rollouts', 0), 'd'):>4}"
        f"  kl {_shown(metrics.get('kl/k3'), '.2e'):>8}"
        f"  {sum(record.seconds.values()):6.1f} s"
    )


def run_id(path: Path) -> str:
    """The id kept in file `path`; made and written on first use, so that a resume finds it."""
    if path.is_file():
        return path.read_text().strip()
    made = uuid.uuid4().hex[:12]
    write_text(path, made + "\n")
    return made


def _as_text(row: SampleRow) -> str:
    head = f"reward {_shown(row.reward, '.3g')}, advantage {_shown(row.advantage, '.3g')}"
    return f"**{head}**\n\n{_fenced(row.prompt)}\n\n{_fenced(row.completion)}"


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:  # a longer fence than any in the text
        fence += "`"
    return f"{fence}\n{text}\n{fence}"


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


BY_NAME: dict[str, Callable[[Start], Tracker]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": Tensorboard,
}
