"""The checks of `rlfe doctor`. Each gives findings; none raises for a missing part.

Marks: `ok`; `-` absent and not needed for everything; `warn` something will be worse; `FAIL` what
every command needs. Try: `data()`.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, resources, util
from pathlib import Path
from typing import Any, NamedTuple

from rlfe import __version__, checkpoints
from rlfe.errors import RlfeError
from rlfe.schema import Recipe

OK, ABSENT, WARN, FAIL = "ok", "-", "warn", "FAIL"
CORE = ("click", "pydantic", "rich", "numpy", "pandas", "pyarrow", "huggingface_hub", "jinja2")
TRAIN = ("torch", "transformers", "peft", "accelerate", "safetensors", "datasets")
TABLE_ROW = re.compile(r"\| (\S+) \| \d+ \|.*\| ([0-9a-f]{64}) \|")
GIB = 1 << 30
# float32 weights, two moments and one more copy while saving, against the kept dtype's bytes
STATE_BYTES_PER_WEIGHT = 16


class Finding(NamedTuple):
    """One line. `Finding("ok", "python", "3.11.9")`"""

    mark: str
    name: str
    value: str
    fix: str = ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    """rlfe, Python, the core packages and the training extra."""
    yield Finding(OK, "rlfe", __version__)
    mark = OK if sys.version_info >= (3, 11) else FAIL
    yield Finding(mark, "python", f"{platform.python_version()} on {platform.platform()}")
    missing = [name for name in CORE if _version(name) is None]
    told = ", ".join(f"{name} {_version(name)}" for name in CORE if name not in missing)
    if missing:
        yield Finding(FAIL, "core packages", f"missing: {', '.join(missing)}", "pip install rlfe")
    else:
        yield Finding(OK, "core packages", told)
    missing = [name for name in TRAIN if _version(name) is None]
    if missing:
        value = f"missing: {', '.join(missing)}"
        yield Finding(ABSENT, "training packages", value, "pip install 'rlfe[train]'")
    else:
        told = ", ".join(f"{name} {_version(name)}" for name in TRAIN)
        yield Finding(OK, "training packages", told)


def engines() -> Iterator[Finding]:
    """What may sample and learn here."""
    for name, needs in (("transformers", "train"), ("vllm", "vllm"), ("tinker", "tinker")):
        there = util.find_spec(name) is not None and (name != "transformers" or _has_torch())
        fix = "" if there else f"pip install 'rlfe[{needs}]'"
        version = _version(name) if there else "not installed"
        yield Finding(OK if there else ABSENT, f"engine {name}", version or "present", fix)


def _has_torch() -> bool:
    return util.find_spec("torch") is not None


def gpus() -> Iterator[Finding]:
    """GPUs as the driver sees them, and whether torch can use them."""
    names = gpu_names()
    if not names:
        yield Finding(ABSENT, "GPU", "none: training and sampling run on the CPU")
        return
    yield Finding(OK, "GPU", "; ".join(names))
    if _has_torch():
        import torch

        usable = torch.cuda.is_available()
        value = f"CUDA {torch.version.cuda}" if usable else "cannot use the GPU"
        fix = "" if usable else "install the torch build for your CUDA version"
        yield Finding(OK if usable else WARN, "torch on GPU", value, fix)


def gpu_names() -> list[str]:
    """Name and memory of each GPU; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [
        line.strip() for line in done.stdout.splitlines() if line.strip() and not done.returncode
    ]


def data() -> Finding:
    """The packaged data against the digests of its table."""
    folder = resources.files("rlfe") / "data"
    wanted = dict(TABLE_ROW.findall((folder / "README.md").read_text(encoding="utf-8")))
    wrong = []
    for name, digest in sorted(wanted.items()):
        file = folder / name
        if not file.is_file():
            wrong.append(f"{name} is missing")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            wrong.append(f"{name} differs")
    if wrong or not wanted:
        value = ", ".join(wrong) or "no table of digests"
        return Finding(FAIL, "packaged data", value, "pip install --force-reinstall rlfe")
    return Finding(OK, "packaged data", f"{len(wanted)} files as published")


STRONGER = {
    "namespaces": "allow user namespaces, or install bubblewrap",
    "filters": "use Linux 5.13 or later with Landlock and seccomp",
}


def isolation() -> Iterator[Finding]:
    """The tier in force and what it really stopped; then every stronger one, and why not that."""
    if sys.platform == "win32":
        yield Finding(WARN, "isolation", "programs cannot be judged on Windows", "use WSL2")
        return
    try:
        facts = _tried()
    except (RlfeError, OSError, EOFError, RuntimeError) as error:
        value = " ".join(str(error).split())[:200]
        yield Finding(FAIL, "isolation", f"the sandbox does not start: {value}", "run it on Linux")
        return
    ends = facts["tried"]
    left_open = [name for name, end in ends.items() if end != "stopped"]
    stopped = ", ".join(name for name in ends if name not in left_open)
    value = f"tier {facts['tier']} by {facts['by']}; tried and stopped: {stopped or 'nothing'}"
    if left_open:
        value += f"; not stopped: {', '.join(left_open)}"
    if {"endless loop", "memory bomb"} & set(left_open):
        yield Finding(FAIL, "isolation", value, "do not judge programs here")
    elif left_open or facts["tier"] == "limits":
        yield Finding(WARN, "isolation", value, "run in a container, or on Linux with namespaces")
    else:
        yield Finding(OK, "isolation", value)
    for name, why in facts["refused"].items():
        yield Finding(ABSENT, f"isolation tier {name}", f"not possible: {why}", STRONGER[name])


def _tried() -> Mapping[str, Any]:
    from rlfe.sandbox import tier

    return tier()


def token(repo: str | None) -> Finding:
    """Whether the Hub's library finds a token (never shown), and with `repo` its right to write."""
    from huggingface_hub import get_token

    fix = "hf auth login, or set HF_TOKEN"
    if not get_token():
        return Finding(FAIL if repo else ABSENT, "Hub token", "none (needed to push only)", fix)
    if repo is None:
        return Finding(OK, "Hub token", "present")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().auth_check(repo, write=True)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        value = f"present, but not for {repo}: {type(error).__name__}"
        return Finding(FAIL, "Hub token", value, "ask for write access, or choose another --repo")
    return Finding(OK, "Hub token", f"present, may write to {repo}")


def disk(runs_dir: Path, recipe: Recipe | None) -> Finding:
    """Free space where runs go, against what a recipe writes if its model is a folder here."""
    place = next(
        path for path in (runs_dir.resolve(), *runs_dir.resolve().parents) if path.exists()
    )
    free = shutil.disk_usage(place).free
    value = f"{free / GIB:.1f} GiB free at {place}"
    if recipe is None:
        return Finding(OK if free > GIB else WARN, "disk", value, "" if free > GIB else "free some")
    needed = bytes_needed(recipe)
    if needed is None:
        return Finding(OK, "disk", f"{value}; the model is not here, so its size is not known")
    value += f"; the recipe needs about {needed / GIB:.1f} GiB a cell"
    fix = "" if free > needed else "free some, or set save.keep"
    return Finding(OK if free > needed else FAIL, "disk", value, fix)


def bytes_needed(recipe: Recipe) -> int | None:
    """Kept checkpoints plus resumable state of one cell; None if the model is no local folder."""
    folder = Path(recipe.model.path) if recipe.model.path else None
    files: Sequence[Path] = sorted(folder.glob("*.safetensors")) if folder else []
    if not files:
        return None
    steps = checkpoints.kept_steps(recipe.train.steps, recipe.save.every)
    kept = min(len(steps), recipe.save.keep or len(steps))
    size = sum(file.stat().st_size for file in files)
    width = 4 if recipe.model.dtype == "float32" else 2
    return size * kept + size // width * STATE_BYTES_PER_WEIGHT
