"""Every path of a run folder, and writing that never leaves half a thing that looks whole.

What a kill may interrupt is written beside and renamed: a file by `write_text`, a folder by
`new_folder`. A run is never silently overwritten: `RunDir.create` refuses and names the ways out.
Not here: what the files hold. Try: `RunDir(Path("runs/tiny_mbpp_nobuf_lr1e3")).checkpoint(30)`.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from rlfe import __version__
from rlfe.errors import RequestError, RlfeError
from rlfe.naming import checkpoint_name, step_of
from rlfe.schema import Recipe

PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "peft",
    "accelerate",
    "safetensors",
    "datasets",
    "numpy",
    "huggingface_hub",
)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FULL_TEXTS = ("No space left", "os error 28", "os error 122", "os error 27", "failed writing file")
# What may differ on resume: it changes no number of the run.
FREE_KEYS = (
    *("about", "track.", "run.resume", "run.timeout_minutes", "service.timeout_seconds"),
    *("matrix.", "study."),
)


def disk_full(error: BaseException) -> bool:
    """Whether an error says that the disk or quota is full (some say it only in text)."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(text in str(error) for text in FULL_TEXTS)


def disk_error(error: BaseException, path: Path, kept: str) -> RlfeError:
    """The error to raise for a failed write: what, where, what was kept, what next."""
    if disk_full(error):
        return RlfeError(
            f"disk full while writing {path}. {kept}",
            hint="Free some space (or set save.keep), then run the same command with --resume.",
        )
    return RlfeError(f"cannot write {path}: {error}. {kept}", hint="Check the path and its rights.")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file: beside, to the disk, renamed. RlfeError if the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise disk_error(error, path, "What was there before is kept.") from error


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for text, UTF-8 and newlines as given."""
    write_bytes(path, text.encode())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; renamed to `path` on success, removed on failure.

    An existing `path` is replaced as a whole. The name it is written under starts with a dot and
    is no step's name, so a kill at any moment leaves nothing that a listing accepts.

    Raises:
        RlfeError: The disk is full (what was at `path` before is kept).
    """
    settle(path)
    beside = path.with_name(f".{path.name}.partial")
    if beside.exists():
        shutil.rmtree(beside)
    try:
        beside.mkdir(parents=True)
        yield beside
        _sync(beside)
        _swap(beside, path)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if disk_full(error):
            kept = f"{path} is as before." if path.exists() else "Everything saved before is kept."
            raise disk_error(error, path, kept) from error
        raise


def settle(path: Path) -> None:
    """Finish a replacement that a kill interrupted between its two renames."""
    old = path.with_name(f".{path.name}.old")
    if not old.exists():
        return
    if path.exists():
        shutil.rmtree(old)
    else:
        os.rename(old, path)


def _swap(beside: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        os.rename(path, old)
    os.rename(beside, path)
    _sync_entry(path.parent)
    if old.exists():
        shutil.rmtree(old)


def _sync(folder: Path) -> None:
    """Bring every file below to the disk: a rename may otherwise reach it before the data."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            with file.open("rb+" if os.name == "nt" else "rb") as opened:
                os.fsync(opened.fileno())


def _sync_entry(folder: Path) -> None:
    with suppress(OSError):  # Windows cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RunDir:
    """The paths of one run. `RunDir(Path("runs/x")).metrics == Path("runs/x/metrics.jsonl")`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = self.path.resolve().name
        self.config = self.path / "config.toml"
        self.provenance = self.path / "provenance.json"
        self.metrics = self.path / "metrics.jsonl"
        self.state = self.path / "state"
        self.log = self.path / "logs" / "train.log"
        self.private = self.path / ".rlfe"

    def checkpoint(self, step: int) -> Path:
        return self.path / checkpoint_name(step)

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.jsonl.zst"

    def evals(self, task: str) -> Path:
        return self.path / "evals" / task

    def steps(self) -> list[int]:
        """Steps of the checkpoint folders, ascending; completeness is `rlfe.checkpoints`."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted({step for name in names if (step := step_of(name)) is not None})

    def create(
        self,
        recipe: Recipe,
        origins: Mapping[str, str],
        overwrite: bool = False,
        resume: bool = False,
        data_hashes: Mapping[str, str] | None = None,
    ) -> bool:
        """Make the folder with config.toml and provenance.json. True: an earlier run goes on.

        `resume` on a folder that does not exist starts afresh: a kill may come before the folder.

        Raises:
            RequestError: The folder exists and neither resume nor overwrite is given, holds
                something else than a run, or was started with other settings.
        """
        if self.check(recipe, overwrite=overwrite, resume=resume):
            settle(self.state)
            return True
        with new_folder(self.path) as folder:
            self._write_head(folder, recipe, origins, data_hashes or {})
        return False

    def check(self, recipe: Recipe, *, overwrite: bool = False, resume: bool = False) -> bool:
        """The refusals of `create`, writing nothing. True: an earlier run goes on."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return False
        if resume:
            self._check_resume(recipe)
            return True
        self._check_overwrite(overwrite)
        return False

    def _write_head(
        self, folder: Path, recipe: Recipe, origins: Mapping[str, str], hashes: Mapping[str, str]
    ) -> None:
        from rlfe.config import dump  # config imports no run folder; this is the one way back
        from rlfe.criteria import record

        facts = {
            **provenance(hashes),
            "assumptions": list(recipe.study.assumptions),
            "declared": record(recipe),
            "origins": {k: v for k, v in origins.items() if v != "default"},
        }
        write_text(folder / "config.toml", dump(recipe))
        write_text(folder / "provenance.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")

    def _check_overwrite(self, overwrite: bool) -> None:
        if not overwrite:
            raise RequestError(
                f"{self.path} exists" + (f" (steps {self.steps()})" if self.steps() else ""),
                hint="Continue it with --resume, replace it with --overwrite, or give --name.",
            )
        if not self.config.exists():
            raise RequestError(
                f"{self.path} has no config.toml: it is no run folder and is not overwritten",
                hint="Give another --name or --runs-dir.",
            )

    def _check_resume(self, recipe: Recipe) -> None:
        from rlfe.config import flat, read_run_config

        if not self.config.exists():
            raise RequestError(
                f"{self.path} has no config.toml: there is no run to resume",
                hint="Give another --name or --runs-dir.",
            )
        if recipe.run.resume == "never" and self.steps():
            raise RequestError(
                f'{self.path} has checkpoints and run.resume is "never"',
                hint="Give --name for a second run, or --set run.resume=auto.",
            )
        old, new = flat(read_run_config(self.config)), flat(recipe)
        keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        changed = [key for key in keys if not key.startswith(FREE_KEYS)]
        if changed:
            lines = [f"  {key}: {old.get(key)!r} then, {new.get(key)!r} now" for key in changed]
            raise RequestError(
                f"{self.path} was started with other settings:\n" + "\n".join(lines),
                hint="Resume with the settings of its config.toml, or give --name for a new run.",
            )


def provenance(data_hashes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ran: versions, commit, platform, and the data hashes passed in."""
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    return {
        "rlfe": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "data": dict(data_hashes or {}),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the source tree, with "+" when it has changes; None outside one."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():  # an installed package inside somebody's repository
        return None
    git = ["git", "-C", str(here.parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")
