"""From what a recipe calls its model to a folder on this machine.

A path of a folder is taken as it is; `org/name`, and a checkpoint of a series as
`hf://org/name/<cell>/global_step_N[@revision]`, is fetched from the Hub once (safetensors only).
Whatever reads a model afterwards reads plain files. Not here: loading weights.
Try it: `model_folder("HuggingFaceTB/SmolLM2-135M-Instruct")`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlfe import remote
from rlfe.errors import NotFoundError, RequestError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "chat_templates/*")


def model_folder(path: Path | str, revision: str | None = None) -> Path:
    """The folder that holds the model.

    Raises:
        RequestError: No model was named.
        NotFoundError: There is no such folder, or the Hub has no such model.
    """
    folder, text = local_folder(path), str(path)
    if folder is not None:
        return folder
    return remote.in_hub_cache(text) if remote.is_remote(text) else _fetched(text, revision)


def local_folder(path: Path | str) -> Path | None:
    """The folder if the model is one on this machine; None: a place on the Hub, not looked up.

    Raises:
        RequestError: No model was named.
        NotFoundError: There is no such folder, and the name is no place on the Hub.
    """
    text = str(path)
    if not text:
        raise RequestError("model.path is empty", hint="Give --set model.path=FOLDER or a Hub id.")
    if remote.is_remote(text):
        return None
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise NotFoundError(
                f"{folder} has no config.json: it is no model folder",
                hint="A model folder holds config.json, tokenizer files and *.safetensors.",
            )
        return folder
    if HUB_ID.fullmatch(text) and not folder.exists():
        return None
    raise NotFoundError(
        f"model folder {text} does not exist", hint="Give a folder or a Hub id such as org/name."
    )


def _fetched(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(WANTED)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFoundError(
            f"{repo_id} is neither a folder here nor a model that the Hub gives: {reason}",
            hint="Check the name and the network, or give the path of a model folder.",
        ) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object in a file; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        raise NotFoundError(f"{path} is no JSON: the model folder is damaged") from None
    return value if isinstance(value, dict) else None
