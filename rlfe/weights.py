"""Safetensors files read as bytes: is a folder's weight set whole, and what is its hash.

No torch and no safetensors package: a header is eight bytes of length and JSON. Rules of
completeness: docs/hub.md 1. Try: `weight_problems(Path("model"), {"model_type": "llama"})`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes, the format's own limit
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")

Header = dict[str, dict[str, Any]]


def read_header(path: Path) -> tuple[Header, int]:
    """Tensors of a file and where its data starts.

    Raises:
        ValueError: The file is empty, cut short, or no safetensors; the text says which.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError("is empty")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise ValueError("is cut short or no safetensors file")
        header = _parse(file.read(length))
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"has {size} bytes, its header needs {8 + length + end}")
    return header, 8 + length


def _parse(data: bytes) -> Header:
    try:
        header = json.loads(data)
        header.pop("__metadata__", None)
        if all(len(tensor["data_offsets"]) == 2 for tensor in header.values()):
            return dict(header)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ValueError("has a damaged header")


def weight_problems(folder: Path, config: Mapping[str, Any], *, strict: bool) -> list[str]:
    """What is missing or wrong with the weights of a model directory; empty: they are whole."""
    if (folder / INDEX).is_file():
        try:
            wanted = _index(folder / INDEX)
        except ValueError as error:
            return [f"{INDEX} {error}"]
    elif (folder / WEIGHTS).is_file():
        wanted = {WEIGHTS: set()}
    else:
        return [_no_weights(folder)]
    lacks, tensors = _read_files(folder, wanted)
    extra = sorted({path.name for path in folder.glob("*.safetensors")} - set(wanted))
    lacks += [f"{name} is not in the weight set (vLLM would read it)" for name in extra]
    return lacks or _config_problems(tensors, config, strict)


def _no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if names:
        return f"{names[0]} without {INDEX}"
    if any(folder.glob("pytorch_model*.bin")):
        return "weights are not safetensors"
    return "no weights (model.safetensors)"


def _index(path: Path) -> dict[str, set[str]]:
    """File name -> tensors that the index places there."""
    try:
        placed = json.loads(path.read_bytes())["weight_map"].items()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("is damaged") from None
    wanted: dict[str, set[str]] = {}
    for tensor, name in placed:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise ValueError(f"names a file outside the folder: {name}")
        wanted.setdefault(name, set()).add(tensor)
    if not wanted:
        raise ValueError("is empty")
    return wanted


def _read_files(folder: Path, wanted: Mapping[str, set[str]]) -> tuple[list[str], Header]:
    lacks: list[str] = []
    tensors: Header = {}
    for name, placed in sorted(wanted.items()):
        if not (folder / name).is_file():
            lacks.append(f"{name} is missing")
            continue
        try:
            header, _ = read_header(folder / name)
        except ValueError as error:
            lacks.append(f"{name} {error}")
            continue
        lacks += [f"{name} lacks {tensor}" for tensor in sorted(placed - set(header))[:3]]
        tensors |= header
    return lacks, tensors


def _config_problems(tensors: Header, config: Mapping[str, Any], strict: bool) -> list[str]:
    lacks = []
    wanted = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    stored = _main_dtype(tensors)
    if wanted is not None and stored is not None and stored != wanted:
        lacks.append(f"weights are {stored}, config.json says {wanted}")
    tied = config.get("tie_word_embeddings")
    has_head = any(name.endswith(HEADS) for name in tensors)
    has_embedding = any(name.endswith(EMBEDDINGS) for name in tensors)
    if tied is False and has_embedding and not has_head:
        lacks.append("no output head, and config.json says tie_word_embeddings = false")
    if strict and tied is True and has_head:
        lacks.append("an output head is stored, and config.json says tie_word_embeddings = true")
    return lacks


def _main_dtype(tensors: Header) -> str | None:
    """The floating dtype that holds most bytes: a norm or a router may be kept wider."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        begin, end = tensor["data_offsets"]
        if tensor["dtype"] in DTYPES.values():
            sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + end - begin
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def weights_hash(folder: Path) -> str:
    """SHA-256 over the tensors in name order (name, dtype, shape, bytes), however sharded."""
    places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, start = read_header(path)
        places |= {name: (path, start, tensor) for name, tensor in header.items()}
    digest = hashlib.sha256()
    for name, (path, start, tensor) in sorted(places.items()):
        digest.update(f"{name}\x1f{tensor['dtype']}\x1f{tensor['shape']}\x1f".encode())
        begin, end = tensor["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + begin)
            left = end - begin
            while left > 0:
                chunk = file.read(min(left, 1 << 22))
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()
