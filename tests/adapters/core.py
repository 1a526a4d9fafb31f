"""Adapters of the foundation: names, learning rates, checkpoints."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlfe import checkpoints, config, naming
from rlfe.errors import RequestError


def lr_tag(given: dict[str, Any]) -> dict[str, Any]:
    if given["op"] == "format":
        return {"tag": naming.lr_tag(given["value"])}
    return {"lr": naming.parse_lr_tag(given["value"])}


def lr_from_config(given: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(given["toml"])
        return {"lr": config.load([str(path)], given.get("set", [])).recipe.optim.lr}


def run_name(given: dict[str, Any]) -> dict[str, Any]:
    cell, step = naming.parse_path(given["name"])
    answer = {"model": cell.model, "dataset": cell.task, "arm": cell.arm, "lr": cell.lr}
    return answer | {"seed": cell.seed, "step": step}


def arm_name(given: dict[str, Any]) -> dict[str, Any]:
    return naming.arm_facts(given["arm"])._asdict()


def save_schedule(given: dict[str, Any]) -> dict[str, Any]:
    return {"steps": checkpoints.kept_steps(given["total"], given["stride"], given["done"])}


def checkpoint_retention(given: dict[str, Any]) -> dict[str, Any]:
    arguments = (given["complete"], given["incomplete"], given["just_saved"], given["limit"])
    return {"delete": checkpoints.expired(*arguments)}


def checkpoint_listing(given: dict[str, Any]) -> dict[str, Any]:
    with tree(given):
        listing = checkpoints.find(given["globs"])
    if not listing.found:
        raise RequestError("nothing to evaluate")
    return {
        "order": [str(found.path) for found in listing.found],
        "skipped": dict(listing.skipped),
    }


@contextmanager
def tree(given: dict[str, Any]) -> Iterator[Path]:
    """Make the case's files, folders and links in a temporary folder and go there."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in given.get("files", {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            binary = content.startswith("b64:")
            path.write_bytes(base64.b64decode(content[4:]) if binary else content.encode())
        for name in given.get("dirs", []):
            Path(folder, name).mkdir(parents=True, exist_ok=True)
        for name, target in given.get("links", {}).items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).symlink_to(target)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def generation_config_save(given: dict[str, Any]) -> dict[str, Any]:
    changes = given["training_changes"]
    kept = checkpoints.repaired_generation_config(
        given["base_generation_config"], given["base_config"], changes
    )
    saved = {**given["base_config"], **changes}
    return {"kept": kept, "config": checkpoints.repaired_config(saved, given["base_config"])}


def compare_generation_config(output: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The case names what must and what must not stand in the files that were made."""
    kept, lacks = output["kept"], []
    for name, value in expected["must_have"].items():
        if kept.get(name) != value:
            lacks.append(f"{name} is {kept.get(name)!r}, expected {value!r}")
    for name, value in expected.get("config_must_have", {}).items():
        if output["config"].get(name) != value:
            lacks.append(f"config {name} is {output['config'].get(name)!r}, expected {value!r}")
    stands = {f"{name}={str(value).lower()}" for name, value in kept.items()}
    lacks += [f"has {pair}" for pair in expected["must_not_have"] if set(pair) <= stands]
    if expected["saved_ok"] is not saved_ok(kept):
        lacks.append(f"transformers saves it: {saved_ok(kept)}")
    return lacks


def saved_ok(kept: dict[str, Any]) -> bool:
    """Whether the real library saves this generation config."""
    from transformers import GenerationConfig

    with tempfile.TemporaryDirectory() as folder:
        try:
            GenerationConfig(**kept).save_pretrained(folder)
        except ValueError:
            return False
    return True


ADAPTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lr_tag": lr_tag,
    "lr_from_config": lr_from_config,
    "run_name": run_name,
    "arm_name": arm_name,
    "save_schedule": save_schedule,
    "checkpoint_retention": checkpoint_retention,
    "checkpoint_listing": checkpoint_listing,
    "generation_config_save": generation_config_save,
}
COMPARE = {"generation_config_save": compare_generation_config}
