"""What push and card share: from run folders and tables to the card and the files beside it.

This is where the rooms meet (`rlfe.hub` may not import `rlfe.eval`): tables and pictures are made
by `rlfe.eval`, the card by `rlfe.hub.card`. Try: `rlfe card runs/* --repo my-org/series`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from rlfe import records
from rlfe.cli import help as pages
from rlfe.cli.card_holdout import holdout
from rlfe.cli.card_statistics import comparisons, gain_plot, read_counts
from rlfe.errors import RequestError, RlfeError
from rlfe.hub import card, metadata
from rlfe.hub.cache import Cache
from rlfe.hub.cardfacts import License, is_license
from rlfe.hub.client import Client
from rlfe.hub.discover import LocalRun, discover
from rlfe.hub.evaluations import Results, find_tables, read_tables
from rlfe.hub.material import Material, Plot
from rlfe.hub.paths import run_folder
from rlfe.hub.series import read_cell
from rlfe.hub_calls import Patience

F = TypeVar("F", bound=Callable[..., Any])
PLOT = "plots/pass_at_k.png"
GAIN_PLOT = "plots/gain_forgetting.png"
CAPTIONS = {PLOT: "pass@k over steps", GAIN_PLOT: "gain against forgetting"}
TABLE = "evals/scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What the user states for the card where the runs do not say it."""

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    base_model: str | None = None
    tables: tuple[Path, ...] = ()

    def options(self) -> list[tuple[str, str | None]]:
        """The options that state the same, for a command line."""
        return [
            ("--license", self.license), ("--license-name", self.license_name),
            ("--license-link", self.license_link), ("--base-model", self.base_model),
            *(("--table", str(table)) for table in self.tables),
        ]  # fmt: skip

    def license_or_none(self) -> License | None:
        """The stated license. Raises `RequestError` for an id that the Hub does not know."""
        if self.license is None:
            return None
        if not is_license(self.license):
            raise RequestError(
                f"--license {self.license!r} is not an id that the Hub knows",
                hint="Use an id such as apache-2.0, or `other` with --license-name.",
            )
        if self.license == "other" and not self.license_name:
            raise RequestError("--license other needs --license-name", hint="And --license-link.")
        return License(self.license, self.license_name or "", self.license_link or "")


def card_options(function: F) -> F:
    """Adds the options of `Stated`, passed to the command as `stated`."""

    @functools.wraps(function)
    def with_stated(
        *args: Any, license_id: str | None, license_name: str | None, license_link: str | None,
        base_model: str | None, tables: tuple[Path, ...], **others: Any,
    ) -> Any:  # fmt: skip
        stated = Stated(
            license=license_id, license_name=license_name, license_link=license_link,
            base_model=base_model, tables=tables,
        )  # fmt: skip
        return function(*args, stated=stated, **others)

    wrapped: Any = with_stated
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    table = "Evaluation table (CSV, Parquet); default: those beside the runs."
    for option in (
        pages.option("Card", "--table", "tables", multiple=True, type=file, help=table),
        pages.option("Card", "--base-model", metavar="ID", help="Hub id of the base model."),
        pages.option("Card", "--license-link", metavar="URL", help="Link to a license `other`."),
        pages.option("Card", "--license-name", metavar="NAME", help="Name of a license `other`."),
        pages.option("Card", "--license", "license_id", metavar="ID", help="License of the runs."),
    ):
        wrapped = option(wrapped)
    return cast(F, wrapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The card's material and the other files at the root of the repository."""

    runs: tuple[LocalRun, ...]
    material: Material
    files: dict[str, bytes]

    def card_text(self, old: str | None = None) -> str:
        """README.md with the hand-written parts of the old one in place."""
        return metadata.with_kept_parts(card.render(self.material), old)

    def with_commits(self) -> Publication:
        """The same with the commits that the runs' journals name by now."""
        commits = journal_commits(self.runs, self.material.repo_id)
        material = replace(self.material, commits=commits)
        return replace(self, material=material)


def open_runs(
    given: Sequence[str], *, steps: str | None, exclude: Sequence[str]
) -> tuple[list[LocalRun], dict[str, Cache]]:
    """The runs that the user named, each once, and their caches (saved).

    `runs/*` also names what lies beside the runs, such as `_base` and `_tables`: no runs.
    """
    runs: dict[str, LocalRun] = {}
    caches: dict[str, Cache] = {}
    folders = [run_folder(text) for text in given]
    for folder in [path for path in folders if path.name[0] != "_"] or folders:
        if folder.name in runs:
            if runs[folder.name].folder != folder:
                raise RequestError(
                    f"two runs are called {folder.name}: {runs[folder.name].folder} and {folder}",
                    hint="A run's name is its folder in the repository; push one of them.",
                )
            continue
        caches[folder.name] = Cache(folder)
        runs[folder.name] = discover(folder, caches[folder.name], steps=steps, exclude=exclude)
        caches[folder.name].save()
    return list(runs.values()), caches


def publication(
    runs: Sequence[LocalRun],
    repo_id: str,
    stated: Stated,
    *,
    base_card: Callable[[str], str | None],
    other_cells: Sequence[str] = (),
) -> Publication:
    """Card material, tables and plots of these runs."""
    chosen = stated.license_or_none()
    cells = [read_cell(run, no_base_card if chosen else base_card) for run in runs]
    names = {cell.name for cell in cells} | {cell.parts.model for cell in cells}
    paths = list(stated.tables) or find_tables(table_folders(runs))
    results = read_tables(paths, names)
    rows = [row for path in paths for row in _rows(path, names)] if results.scores else []
    files = _files(rows, results)
    counts = read_counts(paths, names) if results.scores else {}
    picture = gain_plot([run.folder for run in runs]) if results.scores else None
    if picture is not None:
        files[GAIN_PLOT] = picture
    plots = [Plot(path=path, caption=text) for path, text in CAPTIONS.items() if path in files]
    material = Material(
        repo_id=repo_id, cells=cells, results=results, license=chosen,
        base_model=stated.base_model, plots=plots, other_cells=other_cells,
        comparisons=comparisons(counts, cells), commits=journal_commits(runs, repo_id),
        holdout=holdout(cells),
    )  # fmt: skip
    return Publication(runs=tuple(runs), material=material, files=files)


def table_folders(runs: Sequence[LocalRun]) -> list[Path]:
    """Where `rlfe eval` leaves tables, nearest last: beside the runs, the base's, the run's own."""
    roots = {run.folder.parent for run in runs}
    folders = [place for root in sorted(roots) for place in (root.parent, root, root / "_tables")]
    bases = {run.folder.parent / "_base" / run.cell.model / "evals" for run in runs}
    return [*folders, *sorted(bases), *(run.folder / "evals" for run in runs)]


def _rows(path: Path, names: set[str]) -> list[dict[str, str]]:
    from rlfe.eval import merge, tables

    if path.suffix == ".parquet":
        found = tables.read_parquet(path)
    else:
        found = merge.read_rows(path.read_text(encoding="utf-8"))
    return [dict(row) for row in found if row["cell"] in names]


def _files(rows: Sequence[dict[str, str]], results: Results) -> dict[str, bytes]:
    """The score table of these cells as CSV and Parquet, the settings, and the plot."""
    if not rows:
        return {}
    from rlfe.eval import merge, plots, tables

    unique = {(r["cell"], r["step"], r["task"], r["k"], r["settings"]): r for r in rows}
    ordered = merge.sort_rows(list(unique.values()))
    used = {settings for _, settings in results.groups()}
    settings = {name: facts for name, facts in results.settings.items() if name in used}
    files = {
        f"{TABLE}.csv": merge.csv_text(ordered, tables.COLUMNS).encode(),
        f"{TABLE}.parquet": tables.parquet_bytes(ordered, tables.COLUMNS),
        f"{TABLE}_settings.json": (records.canonical_json(settings) + "\n").encode(),
    }
    grid = plots.panels(ordered, plots.plotted_ks(ordered))
    return {**files, PLOT: plots.png(grid)} if grid else files


def journal_commits(runs: Sequence[LocalRun], repo_id: str) -> dict[str, str]:
    """`<cell>/global_step_N` -> commit id, from the journals of earlier pushes to `repo_id`."""
    found: dict[str, str] = {}
    for run in runs:
        lines: list[dict[str, Any]] = records.read_jsonl(run.folder / ".rlfe" / "push.jsonl")
        names = {checkpoint.name for checkpoint in run.checkpoints}
        for line in lines:
            cell, _, rest = str(line.get("title", "")).partition(": ")
            name = rest.split(" ")[0]
            if line.get("repo") == repo_id and cell == run.name and name in names:
                found[f"{cell}/{name}"] = str(line["oid"])
    return found


def no_base_card(name: str) -> str | None:
    """A base model's README from the local Hub cache only; no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "README.md")
    return Path(found).read_text(encoding="utf-8") if isinstance(found, str) else None


def hub_base_card(name: str) -> str | None:
    """A base model's README from the cache or the Hub; None when neither has it."""
    cached = no_base_card(name)
    if cached is not None:
        return cached
    client = Client(name, patience=Patience(tries=1))
    try:
        return client.text("README.md") if client.facts() else None
    except RlfeError:  # gated, offline, gone: the license is then unknown, and that is said
        return None
