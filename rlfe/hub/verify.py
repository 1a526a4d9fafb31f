"""After the upload: is everything there, does it load, and the receipt that says so.

File ids are compared, no weights are downloaded. Try: `verify(client, plan, caches) == []`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rlfe import records, rundir
from rlfe.hub.cache import Cache
from rlfe.hub.client import Client
from rlfe.hub.plan import Item, Plan, RemoteFile
from rlfe.hub.upload import Sent, differing, with_hashes

RECEIPT = "receipt.json"


def verify(client: Client, plan: Plan, caches: Mapping[str, Cache]) -> list[str]:
    """What differs between the repository and the plan, in words; empty: all is as it should be.

    Compares ids, downloads nothing.
    """
    there: dict[str, RemoteFile] = {}
    for run in plan.runs:
        there |= client.files(run.name)
    items = [with_hashes(item, caches[unit.cell]) for unit in plan.units for item in unit.items]
    return [f"{path} is not what was sent" for path in differing(items, there)]


def load_problems(client: Client, plan: Plan, caches: Mapping[str, Cache]) -> list[str]:
    """Pushed subfolders whose configuration or tokenizer does not load, in words; empty: all do.

    Loaded from the local folder (the same bytes, as `verify` has found), each kind of files once,
    and the last checkpoint through the Hub. What loaded before is remembered with its files.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:  # torch-free installation: ids were compared, nothing is loaded
        return []
    items = [with_hashes(item, caches[unit.cell]) for unit in plan.units for item in unit.items]
    wrong: list[str] = []
    seen: dict[str, str | None] = {}
    checkpoints = [unit.checkpoint for unit in plan.units if unit.checkpoint is not None]
    for checkpoint in checkpoints:
        cache = caches[checkpoint.subfolder.split("/")[0]]
        key = _small_files_key(checkpoint.subfolder, items)
        if key not in seen:
            seen[key] = None if cache.is_loadable(key) else _load_problem(checkpoint.folder)
        problem = seen[key]
        if problem is None:
            cache.put_loadable(key)
        else:
            wrong.append(f"{checkpoint.subfolder} does not load: {problem}")
    return wrong or _remote_load_problem(client, [c.subfolder for c in checkpoints][-1:])


def _load_problem(folder: Path) -> str | None:
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # any failure of the loaders is the finding itself
        return _words(error)
    return None


def _remote_load_problem(client: Client, subfolders: Sequence[str]) -> list[str]:
    from tempfile import TemporaryDirectory

    from transformers import AutoConfig

    for subfolder in subfolders:
        with TemporaryDirectory() as cache:
            try:
                AutoConfig.from_pretrained(
                    client.repo_id, subfolder=subfolder, revision=client.revision, cache_dir=cache
                )
            except Exception as error:  # any failure of the loaders is the finding itself
                return [f"{subfolder} does not load from the Hub: {_words(error)}"]
    return []


def _words(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _small_files_key(subfolder: str, items: Sequence[Item]) -> str:
    """One text for everything of a checkpoint but its weights."""
    lines = [
        f"{item.remote.removeprefix(subfolder)} {item.hashes.sha256}"
        for item in items
        if item.remote.startswith(f"{subfolder}/") and item.hashes
        if not item.remote.endswith(".safetensors")
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def write_receipts(
    plan: Plan, commits: Sequence[Sent], *, repo: str, revision: str, head: str,
    verified: bool | None, tag: str | None, unloadable: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """A receipt (JSON) into every run's `.rlfe/`: commits, files, bytes, verified or not."""
    written = []
    for run in plan.runs:
        mine = [sent for sent in commits if run.name in sent.cells or not sent.cells]
        items = [i for unit in plan.units if unit.cell == run.name for i in unit.items]
        receipt = {
            "schema": "rlfe.receipt/1", "repo": repo, "revision": revision, "head": head,
            "cell": run.name, "tag": tag, "verified": verified,
            "unloadable": _of(run.name, unloadable),
            "checkpoints": [checkpoint.name for checkpoint in run.checkpoints],
            "left_home": dict(run.left_home), "files": len(items),
            "bytes": sum(item.size for item in items), "commits": [asdict(sent) for sent in mine],
        }  # fmt: skip
        path = run.folder / ".rlfe" / RECEIPT
        rundir.write_text(path, json.dumps(records.plain(receipt), indent=2) + "\n")
        written.append(path)
    return written


def _of(cell: str, findings: Sequence[str]) -> list[str]:
    return [text for text in findings if text.startswith(f"{cell}/")]
