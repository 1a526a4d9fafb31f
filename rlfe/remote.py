"""Checkpoints on the Hub: `hf://org/repo/<cell>/global_step_N[@revision]`, globs included.

`from_pretrained` takes no such path and some engines know no subfolder at all, so a reference is
resolved here: the repository's tree is listed once, one checkpoint at a time is downloaded into a
folder that the caller names, and the user's Hub cache is never touched. Only files that a model
directory needs come along, safetensors only. Try: `find("hf://org/series/*/global_step_*")`.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlfe import checkpoints, naming
from rlfe.errors import NotFoundError, PartialError, RequestError
from rlfe.hub_calls import USUAL, Context, Patience, patiently
from rlfe.types import CheckpointRef

PREFIX = "hf://"
MODEL_FILES = (".json", ".safetensors", ".txt", ".jinja", ".model")
RECORDS = ("config.toml", "provenance.json", "metrics.jsonl", "logs/*", "rollouts/*", "evals/*")


class Reference(NamedTuple):
    """A place in a repository. `Reference("org/series", "x/global_step_30", None)`;
    `path` is "" for all of it and may hold glob characters."""

    repo: str
    path: str
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repo}/{self.path}".rstrip("/") + at


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a reference gives: checkpoints by cell and integer step, and what was passed over."""

    found: tuple[CheckpointRef, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def is_remote(text: str) -> bool:
    """Whether a path, glob or model name is a place on the Hub."""
    return text.startswith(PREFIX)


def parse(text: str) -> Reference:
    """The reference that `text` names, `hf://` in front or not.

    `parse("hf://org/s/x/global_step_30@v1") == Reference("org/s", "x/global_step_30", "v1")`.
    Raises `RequestError` when there is no ORG/NAME, or the path leaves the repository.
    """
    rest, _, revision = text.removeprefix(PREFIX).partition("@")
    parts = rest.replace("\\", "/").strip("/").split("/")
    if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts):
        raise RequestError(
            f"{text!r} is no place on the Hub",
            hint="Write hf://ORG/NAME/<cell>/global_step_<N>, with @REVISION if wanted.",
        )
    return Reference("/".join(parts[:2]), "/".join(parts[2:]), revision or None)


def find(text: str, patience: Patience = USUAL) -> Found:
    """Checkpoints that a reference or glob names, from one listing of the tree.

    Every `CheckpointRef` carries the commit that was listed, so that a push in the middle of an
    evaluation changes nothing. Raises `NotFoundError` when none matches, naming what is near.
    """
    reference = parse(text)
    commit, files = tree(reference, patience)
    folders: dict[str, set[str]] = {}
    for path in files:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, set()).add(name)
    steps = [name for name in folders if naming.step_of(name.rpartition("/")[2]) is not None]
    matching = [name for name in steps if _matches(name, reference.path)]
    if not matching:
        raise _nothing(reference, steps)
    skipped = {name: why for name in matching if (why := _lacks(folders[name]))}
    good = sorted((name for name in matching if name not in skipped), key=_order)
    root = f"{PREFIX}{reference.repo}"
    return Found(
        found=tuple(CheckpointRef(root=root, subfolder=n, revision=commit) for n in good),
        skipped=skipped,
    )


def _matches(name: str, pattern: str) -> bool:
    """Part by part: `*` does not cross a slash. A cell alone stands for all its checkpoints."""
    if not pattern:
        return True
    parts, wanted = name.split("/"), pattern.split("/")
    is_below = len(wanted) <= len(parts)
    return is_below and all(map(fnmatch.fnmatchcase, parts, wanted))


def _order(name: str) -> tuple[str, int]:
    cell, _, step = name.rpartition("/")
    return cell, naming.step_of(step) or 0


def _lacks(names: Iterable[str]) -> str:
    """What a listed folder lacks for being a model directory, as far as names tell."""
    there = set(names)
    if "config.json" not in there:
        return "no config.json"
    if not any(name.endswith(".safetensors") for name in there):
        return "no safetensors weights"
    one = {"tokenizer.json", "tokenizer.model"} & there
    return "" if one or {"vocab.json", "merges.txt"} <= there else "no tokenizer"


def _nothing(reference: Reference, steps: Iterable[str]) -> NotFoundError:
    near = difflib.get_close_matches(reference.path, list(steps), n=3, cutoff=0.3)
    near.sort(key=_order)
    told = f"The nearest: {', '.join(near)}." if near else "It holds no <cell>/global_step_<N>."
    return NotFoundError(f"no checkpoint of {reference.repo} matches {reference.path!r}", hint=told)


def tree(reference: Reference, patience: Patience = USUAL) -> tuple[str, list[str]]:
    """Commit id of the revision, and all file paths of the repository at it."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="rlfe")
    context = Context(repo_id=reference.repo)

    def listing() -> tuple[str, list[str]]:
        commit = str(api.repo_info(reference.repo, revision=reference.revision).sha)
        entries = api.list_repo_tree(reference.repo, recursive=True, revision=commit)
        return commit, [entry.path for entry in entries if hasattr(entry, "blob_id")]

    try:
        return patiently(listing, context, patience)
    except NotFoundError as error:
        if reference.revision is None or "revision" not in error.what:
            raise
        refs = patiently(lambda: api.list_repo_refs(reference.repo), context, patience)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        raise no_revision(reference.repo, reference.revision, names) from error


def no_revision(repo: str, revision: str, names: Iterable[str]) -> NotFoundError:
    """The error for a revision that is not there: lists branches and tags, nearest first."""
    there = list(names)
    near = difflib.get_close_matches(revision, there, n=max(len(there), 1), cutoff=0.0)
    return NotFoundError(
        f"{repo} has no revision {revision!r}", hint=f"Branches and tags: {', '.join(near)}."
    )


def fetch(
    reference: CheckpointRef,
    folder: Path,
    patience: Patience = USUAL,
) -> Path:
    """Download a checkpoint into `folder`; returns `folder/<cell>/global_step_N`.

    Files that are there already and unchanged are not downloaded again; a killed download goes on.
    `folder` also gets the client's own `.cache/`, which remembers that.

    Raises:
        PartialError: What came down is not a complete model directory.
    """
    _download(reference, [f"{reference.subfolder}/*{end}" for end in MODEL_FILES], folder, patience)
    place = folder / reference.subfolder
    lacks = checkpoints.problems(place)
    if lacks:
        raise PartialError(f"{reference.root}/{reference.subfolder}: {'; '.join(lacks)}")
    return place


def in_hub_cache(text: str, patience: Patience = USUAL) -> Path:
    """The one checkpoint that a reference names, in the client's own cache: a model to start from.

    Raises:
        RequestError: It names several.
        NotFoundError, PartialError: It names none, or one that is not complete.
    """
    from huggingface_hub import snapshot_download

    listed = find(text, patience)
    if len(listed.found) > 1:
        names = ", ".join(one.subfolder for one in listed.found[:3])
        raise RequestError(f"{text} names {len(listed.found)} checkpoints: {names}, ...")
    if not listed.found:
        raise PartialError(f"{text}: {'; '.join(listed.skipped.values())}")
    one = listed.found[0]
    repo = one.root.removeprefix(PREFIX)
    patterns = [f"{one.subfolder}/*{end}" for end in MODEL_FILES]

    def download() -> str:
        return snapshot_download(repo, revision=one.revision, allow_patterns=patterns)

    return Path(patiently(download, Context(repo_id=repo), patience)) / one.subfolder


def fetch_records(
    reference: CheckpointRef,
    folder: Path,
    patience: Patience = USUAL,
) -> Path:
    """Download what lies beside the checkpoints of a cell; returns `folder/<cell>`."""
    _download(reference, [f"{reference.cell}/{name}" for name in RECORDS], folder, patience)
    return folder / reference.cell


def fetch_files(
    reference: CheckpointRef,
    names: Iterable[str],
    folder: Path,
    patience: Patience = USUAL,
) -> None:
    """Download these paths of the repository into `folder`; those that do not exist are skipped."""
    _download(reference, list(names), folder, patience)


def _download(
    reference: CheckpointRef, patterns: list[str], folder: Path, patience: Patience
) -> None:
    from huggingface_hub import snapshot_download

    repo = reference.root.removeprefix(PREFIX)

    def download() -> str:
        return snapshot_download(
            repo, revision=reference.revision, allow_patterns=patterns, local_dir=folder
        )

    patiently(download, Context(repo_id=repo), patience)


def cache_folder(cache: Path, reference: CheckpointRef) -> Path:
    """Where a checkpoint of the Hub lies below rlfe's own cache: one folder per repository and
    commit, so that two revisions never mix."""
    repo = reference.root.removeprefix(PREFIX).replace("/", "--")
    return cache / "hub" / repo / (reference.revision or "main")[:12]
