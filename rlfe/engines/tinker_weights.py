"""A Tinker-API server's LoRA weights as the complete model folder that every engine writes.

What: the adapter is fetched, put into the base model on this machine and written by the
transformers learner, so merging, casting and `adapter/` are the same code. It needs the base model
here, in float32. Not here: which steps are kept (`rlfe.training.saving`).
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlfe.engines.adapter import learner_name
from rlfe.engines.learner import TransformersLearner
from rlfe.engines.tinker_service import Service, reason
from rlfe.engines.weights import Lora
from rlfe.errors import NetworkError, RlfeError
from rlfe.types import Batch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
EXPORT_SECONDS = 24 * 3600  # how long the server is asked to keep what was fetched
TRIES, TIMEOUT_SECONDS = 3, 600
FETCHING = "fetching a checkpoint"


def export(
    service: Service,
    training: Any,
    name: str,
    *,
    path: Path | str,
    revision: str | None,
    dtype: str,
    device: str,
    folder: Path,
    sample: Batch | None,
) -> Mapping[str, float]:
    """Write the current weights as a complete model directory into `folder`."""
    with tempfile.TemporaryDirectory() as place:
        adapter = fetched(service, training, name, Path(place))
        learner = with_adapter(adapter, path, revision=revision, dtype=dtype, device=device)
        return learner.export(folder, sample)


def fetched(service: Service, training: Any, name: str, folder: Path) -> Path:
    """The folder with the adapter of the current weights.

    Newer clients ask for an export and get an address per file; older ones get the snapshot as
    one archive.
    """
    if hasattr(training, "save_weights_external"):
        saving = training.save_weights_external(name, ttl_seconds=EXPORT_SECONDS)
        path = service.wait(saving, FETCHING).path
        files = service.wait(service.rest.get_external_weights_urls(path), FETCHING).urls
        for file, url in files.items():
            _download(url, _inside(folder, file))
    else:
        saving = training.save_weights_for_sampler(name, ttl_seconds=EXPORT_SECONDS)
        path = service.wait(saving, FETCHING).path
        place = urllib.parse.urlsplit(path)  # tinker://model/name, or /sampler_weights/name
        asking = service.rest.get_checkpoint_archive_url(place.netloc, place.path.strip("/"))
        _download(service.wait(asking, FETCHING).url, folder / "archive.tar")
        with tarfile.open(folder / "archive.tar") as archive:
            archive.extractall(folder, filter="data")
    found = [file.parent for file in folder.rglob(CONFIG) if (file.parent / TENSORS).is_file()]
    if not found:
        names = sorted(file.name for file in folder.rglob("*") if file.is_file())
        raise RlfeError(
            f"{path} holds no {CONFIG} with {TENSORS}, but {', '.join(names) or 'nothing'}"
        )
    return found[0]


def with_adapter(
    adapter: Path, path: Path | str, *, revision: str | None, dtype: str, device: str
) -> TransformersLearner:
    """The base model with these LoRA weights in place.

    Raises:
        RlfeError: The adapter's tensors are not those of its layers in this model.
    """
    from safetensors.torch import load_file

    facts = json.loads((adapter / CONFIG).read_text())
    stored = load_file(str(adapter / TENSORS))
    tensors = {learner_name(name): tensor for name, tensor in stored.items()}
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    lora = Lora(rank=facts["r"], alpha=facts["lora_alpha"], targets=tuple(sorted(targets)), seed=0)
    learner = TransformersLearner(path, dtype=dtype, device=device, lora=lora, revision=revision)
    held = {n: p for n, p in learner.model.named_parameters() if p.requires_grad}
    names = sorted(tensors.keys() | held.keys())
    differ = [name for name in names if _shape(tensors, name) != _shape(held, name)]
    if differ:
        raise RlfeError(
            f"the service's adapter does not fit {path}: {len(differ)} tensors differ, {differ[0]}",
            hint="model.path has to be the base model that the service trains.",
        )
    with torch.no_grad():
        for name, parameter in held.items():
            parameter.copy_(tensors[name])
    return learner


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def _inside(folder: Path, name: str) -> Path:
    """A file's place below the folder, whatever the server calls it."""
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()):
        raise RlfeError(f"the service names a file outside its checkpoint: {name}")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _download(url: str, place: Path) -> None:
    """A signed address into a file, tried again when the network fails."""
    for left in reversed(range(TRIES)):
        try:
            with (
                urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as reply,
                place.open("wb") as file,
            ):
                shutil.copyfileobj(reply, file)
                return
        except OSError as error:
            if not left:
                raise NetworkError(
                    f"the service failed (while {FETCHING}: {reason(error)})",
                    hint="Go on from the last saved state with --resume.",
                ) from error
