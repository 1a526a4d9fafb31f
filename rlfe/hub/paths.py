"""Names on the Hub: repository ids, and the subfolder that `from_pretrained` takes.

Folder on disk = folder in the repository, so a path in the repository is computed from the run
folder's own name and never from what the user typed (`./`, `~`, backslashes, links). Nothing here
touches the network. Try: `subfolder("./runs/x_mbpp_nobuf_lr1e6/global_step_30")`.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath, PureWindowsPath

from rlfe.errors import RequestError

STEP_FOLDER = re.compile(r"global_step_[0-9]+", re.ASCII)
ID_LIMIT = 96  # characters of one part, as the client's own validator has it
TYPE_PREFIXES = ("models", "datasets", "spaces")
_PART = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)


def repo_id_problem(repo_id: str) -> str | None:
    """The rule that `repo_id` breaks, in words, or None when the Hub takes it.

    `repo_id_problem("org/Qwen2.5-3B") is None`. The rules are those of the client's validator
    (`huggingface/huggingface_hub:src/huggingface_hub/utils/_validators.py`), and a namespace is
    required, so that a push never lands in a personal account by accident.
    """
    if "://" in repo_id or repo_id.startswith("hf:"):
        return "it is a URL; give ORG/NAME only"
    parts = repo_id.split("/")
    if len(parts) != 2:
        return f"it has {len(parts)} parts between slashes; ORG/NAME has 2"
    if parts[0] in TYPE_PREFIXES:
        return f"{parts[0]!r} is a repository type, not an account; leave it out"
    return next((problem for part in parts if (problem := _part_problem(part))), None)


def _part_problem(part: str) -> str | None:
    if not part:
        return "a part is empty"
    if not _PART.fullmatch(part):
        return f"{part!r} may hold only letters, digits, '-', '_' and '.'"
    if len(part) > ID_LIMIT:
        return f"{part[:12]}... has {len(part)} characters; at most {ID_LIMIT} are allowed"
    if part[0] in "-." or part[-1] in "-.":
        return f"{part!r} may not start or end with '-' or '.'"
    if "--" in part or ".." in part:
        return f"{part!r} may not hold '--' or '..'"
    return f"{part!r} may not end in .git" if part.endswith(".git") else None


def check_repo_id(repo_id: str) -> str:
    """`repo_id` itself. Raises `RequestError` (exit 2) with the broken rule."""
    problem = repo_id_problem(repo_id)
    if problem:
        raise RequestError(
            f"{repo_id!r} is not a repository name: {problem}",
            hint="Give --repo ORG/NAME, for example --repo my-org/code-rl-lr-ablation.",
        )
    return repo_id


def local_path(given: str, *, windows: bool = False) -> PurePath:
    """What the user typed as an absolute path with links resolved (purely textual on `windows`).

    Backslashes typed on POSIX for a folder that does not exist literally are read as separators.
    """
    if windows:
        return PureWindowsPath(given)
    path = Path(given).expanduser()
    if "\\" in given and not path.exists():
        path = Path(given.replace("\\", "/")).expanduser()
    return path.resolve()


def subfolder(given: str, *, windows: bool = False) -> str:
    """`<run>/global_step_<digits>` of a checkpoint folder: its path in the repository.

    `subfolder("runs/a_mbpp_nobuf_lr1e6/global_step_30") == "a_mbpp_nobuf_lr1e6/global_step_30"`.
    Raises `RequestError` for anything else, a path that leaves the run included.
    """
    path = local_path(given, windows=windows)
    run, step = path.parent.name, path.name
    if not STEP_FOLDER.fullmatch(step) or not is_plain_name(run):
        raise RequestError(
            f"{given!r} is not a checkpoint of a run",
            hint="A checkpoint is <run>/global_step_<N>, for example runs/x/global_step_30.",
        )
    return f"{run}/{step}"


def is_plain_name(name: str) -> bool:
    """Whether `name` can be one folder of a path in a repository."""
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\:")


def run_folder(given: str) -> Path:
    """The real folder of a run that the user typed. Raises `RequestError` if there is none."""
    path = Path(local_path(given))
    if path.is_dir():
        return path
    siblings = sorted(p.name for p in path.parent.glob("*") if p.is_dir() and p.name[0] not in "._")
    listed = ", ".join(siblings[:5]) + (", ..." if len(siblings) > 5 else "")
    raise RequestError(
        f"there is no run folder {given!r}",
        hint=f"Folders beside it: {listed}." if siblings else "`rlfe runs` lists the runs.",
    )
