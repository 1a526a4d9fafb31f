"""Cases of the publishing room: plan, paths, repository names, cards."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlfe.hub import metadata
from rlfe.hub.cache import Cache
from rlfe.hub.cardfacts import License, common_license, lr_side, steps_text
from rlfe.hub.discover import discover
from rlfe.hub.paths import repo_id_problem, subfolder
from tests.hub_runs import make_checkpoint, safetensors_bytes


def hub_plan(given: Mapping[str, Any]) -> dict[str, Any]:
    """Local files that a push of such a folder sends; contents are made here."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / given["root"]
        root.mkdir(parents=True)
        _fill(root, given["files"])
        run = discover(root, Cache(root))
        sent = [e.name for c in run.checkpoints for e in c.entries]
        sent += [source.name for packed in run.records for source in packed.sources]
    return {"sent": sorted(sent)}


def _fill(root: Path, names: list[str]) -> None:
    sharded = any("-of-" in name for name in names)
    model = make_checkpoint(root.parent / "_model", shards=2 if sharded else 1)
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        made = model / path.name
        if made.exists():
            path.write_bytes(made.read_bytes())
        elif path.suffix == ".safetensors":
            path.write_bytes(safetensors_bytes({"x": [0.0]}))
        else:
            path.write_text("{}")


def compare_plan(output: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What must go up and must not; `free` files may."""
    sent = set(output["sent"])
    missing = sorted(set(expected["upload"]) - sent)
    wrong = sorted(sent - set(expected["upload"]) - set(expected["free"]))
    return [f"not sent: {missing}"] * bool(missing) + [f"sent: {wrong}"] * bool(wrong)


def hub_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    path = subfolder(given["given"], windows=given["windows"])
    return {"path_in_repo": path, "subfolder": path}


def repo_id(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"valid": repo_id_problem(given["repo_id"]) is None}


def model_card(given: Mapping[str, Any]) -> dict[str, Any]:
    """Our check, and beside it what the client's own reader does."""
    found = metadata.problem(given["readme"])
    answer: dict[str, Any] = {"valid": found is None, "hub": _client_reads(given["readme"])}
    return answer if found is None else {**answer, "problem": found.word}


def _client_reads(readme: str) -> str:
    from huggingface_hub import ModelCard
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            card = ModelCard(readme)
    except Exception:  # whatever the reader raises is the answer
        return "raises"
    return "ok" if card.data.to_dict() else "no_metadata"


def card_facts(given: Mapping[str, Any]) -> dict[str, Any]:
    if given["ask"] == "lr_side":
        return {"side": lr_side(given["lr"], given["default"])}
    if given["ask"] == "steps_text":
        return {"text": steps_text(given["steps"])}
    found = common_license([License(text) if text else None for _, text in given["bases"]])
    return {"license": found.id if found else None}


ADAPTERS = {
    "hub_plan": hub_plan,
    "hub_paths": hub_paths,
    "repo_id": repo_id,
    "model_card": model_card,
    "card_facts": card_facts,
}
COMPARE = {"hub_plan": compare_plan}
