"""Kept checkpoints: which folders a glob gives, whether one is whole, and when one may go.

A checkpoint is a folder named exactly `global_step_<digits>` that holds a complete Hugging Face
model directory. A bad folder is named with its reason and never stops the rest. Nothing here loads
a model: safetensors headers are read as bytes. Not here: saving weights (`rlfe.engines`).
Try: `find(["runs/*/global_step_*"])`.
"""

from __future__ import annotations

import glob as globbing
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlfe.errors import NotFoundError, RequestError
from rlfe.naming import checkpoint_name, step_of
from rlfe.weights import weight_problems, weights_hash

__all__ = [
    "Checkpoint",
    "Listing",
    "copy_tokenizer",
    "expired",
    "find",
    "kept_steps",
    "problems",
    "repaired_config",
    "repaired_generation_config",
    "weights_hash",
]

SHARDED = ("*_rank_*.pt", "*.distcp", "mp_rank_*", "*optim_states.pt", "pytorch_model_fsdp_*")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_templates/*",
)
SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
ENDING_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_TOKENIZER_CONFIG = "no tokenizer_config.json: the end token may be a default, not the model's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint.

    `Checkpoint(path=Path("runs/x/global_step_30"), cell_text="x", step=30)`
    """

    path: Path
    cell_text: str
    step: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a glob gives: checkpoints in order, and every other match with its reason.

    Reasons: not_a_checkpoint, incomplete, needs_merge, adapter_only, duplicate, broken_link.
    `details` says for an incomplete one what is missing.
    """

    found: tuple[Checkpoint, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """What should have been a checkpoint and is not: a reason for exit 3."""
        harmless = ("duplicate", "not_a_checkpoint")
        return {path: why for path, why in self.skipped.items() if why not in harmless}


def find(globs: Sequence[str]) -> Listing:
    """Checkpoints that the globs match: by run name, then by the integer step, each once.

    Raises:
        RequestError: Nothing matches at all; the message names what is nearby.
    """
    matches = list(dict.fromkeys(os.path.normpath(path) for g in globs for path in _expand(g)))
    if not matches:
        raise _nothing(globs)
    places: dict[tuple[Path, int], list[str]] = {}
    skipped: dict[str, str] = {}
    for text in matches:
        if os.path.islink(text) and not os.path.exists(text):
            skipped[text] = "broken_link"
            continue
        shown = _resolved(text)
        if os.path.islink(text) and shown != text:
            skipped[text] = "duplicate"
        step = step_of(os.path.basename(shown))
        if step is None or not os.path.isdir(shown):
            skipped.setdefault(text, "not_a_checkpoint")
            continue
        claims = places.setdefault((Path(shown).parent, step), [])
        if shown not in claims:
            claims.append(shown)
    return _listing(places, skipped)


def _listing(places: Mapping[tuple[Path, int], list[str]], skipped: dict[str, str]) -> Listing:
    found: list[Checkpoint] = []
    details: dict[str, tuple[str, ...]] = {}
    for (run, step), claims in sorted(places.items()):
        lacks = {text: problems(Path(text)) for text in claims}
        good = [text for text in claims if not lacks[text]]
        plain = str(run / checkpoint_name(step))
        chosen = plain if plain in good else (good[0] if good else None)
        for text in claims:
            if text == chosen:
                continue
            skipped[text] = "duplicate" if not lacks[text] else _reason(Path(text))
            details[text] = tuple(lacks[text])
        if chosen is not None:
            found.append(_checkpoint(Path(chosen), step, found))
    return Listing(found=tuple(found), skipped=skipped, details=details)


def _checkpoint(path: Path, step: int, earlier: Sequence[Checkpoint]) -> Checkpoint:
    cell = path.resolve().parent.name
    warnings = [] if (path / "tokenizer_config.json").is_file() else [NO_TOKENIZER_CONFIG]
    twins = [other.path for other in earlier if (other.cell_text, other.step) == (cell, step)]
    if twins:
        warnings.append(f"another run folder has the same name: {twins[0]}")
    return Checkpoint(path=path, cell_text=cell, step=step, warnings=tuple(warnings))


def _expand(pattern: str) -> list[str]:
    """Matches of a pattern, broken links included (a path without magic may be one)."""
    pattern = os.path.expanduser(pattern)
    if pattern.startswith("hf://"):
        raise RequestError(
            f"{pattern} is on the Hub, not a folder", hint="Fetch it with rlfe pull first."
        )
    matches = sorted(globbing.glob(pattern, recursive=True))
    stripped = pattern.rstrip("/") or pattern
    return matches or ([stripped] if os.path.lexists(stripped) else [])


def _resolved(text: str) -> str:
    """The path with links resolved, relative to here when it was given relative."""
    real = os.path.realpath(text)
    if os.path.isabs(text):
        return real
    here = os.path.realpath(".")
    return os.path.relpath(real, here) if real.startswith(here + os.sep) else real


def _nothing(globs: Sequence[str]) -> RequestError:
    asked = ", ".join(f"'{pattern}'" for pattern in globs)
    root = Path(globs[0] if globs else ".")
    while root.name and not (root.is_dir() and not globbing.has_magic(str(root))):
        root = root.parent
    entries = sorted(root.iterdir()) if root.is_dir() else []
    folders = [str(entry) for entry in entries if entry.is_dir()]
    nearby = (
        f"; {len(folders)} folders exist under {root}" if folders else f"; {root} has no folders"
    )
    names = f", such as {', '.join(folders[:3])}" if folders else ""
    return RequestError(
        f"no checkpoint matches {asked}{nearby}{names}",
        hint="Give folders such as 'runs/*/global_step_*', quoted.",
    )


def _reason(folder: Path) -> str:
    if any(folder.glob("*.safetensors")) and not (folder / "adapter_config.json").exists():
        return "incomplete"
    if any(True for pattern in SHARDED for _ in folder.rglob(pattern)):
        return "needs_merge"
    whole = [path for path in folder.glob("*.safetensors") if path.name.startswith("model")]
    adapters = ("adapter_config.json", "adapter/adapter_config.json")
    if not whole and any((folder / name).exists() for name in adapters):
        return "adapter_only"
    return "incomplete"


def problems(folder: Path, *, need_tokenizer_config: bool = False) -> list[str]:
    """What is missing or wrong in a model directory, in words; empty: it is complete.

    `need_tokenizer_config` is what a push asks for: the tokenizer's configuration too, and no
    output head beside tied embeddings.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return ["no config.json", *_tokenizer_problems(folder, need_tokenizer_config)]
    except ValueError:
        return ["config.json is no JSON"]
    lacks = (
        []
        if isinstance(config, dict) and config.get("model_type")
        else ["no model_type in config.json"]
    )
    lacks += _tokenizer_problems(folder, need_tokenizer_config)
    if (folder / "adapter_config.json").exists():
        lacks.append("adapter_config.json beside the weights (its place is adapter/)")
    unfinished = sorted(path.name for path in folder.glob("*.safetensors.tmp"))
    lacks += [f"unfinished file {name}" for name in unfinished]
    facts = config if isinstance(config, dict) else {}
    return lacks + weight_problems(folder, facts, strict=need_tokenizer_config)


def _tokenizer_problems(folder: Path, need_config: bool) -> list[str]:
    lacks = []
    one = ("tokenizer.json", "tokenizer.model")
    pair = all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))
    if not pair and not any((folder / name).is_file() for name in one):
        lacks.append("no tokenizer (tokenizer.json, tokenizer.model, or vocab.json + merges.txt)")
    if need_config and not (folder / "tokenizer_config.json").is_file():
        lacks.append(NO_TOKENIZER_CONFIG)
    return lacks


def kept_steps(total: int, every: int, done: int = 0) -> list[int]:
    """Steps whose checkpoint is kept: every multiple of `every`, plus the last; after `done`.

    `kept_steps(500, 30)` is 30, 60, ..., 480, 500 (17 steps; docs/algorithms.md 13).
    """
    assert total >= 0, total
    assert every >= 1, every
    steps = list(range(every, total + 1, every))
    if total and total % every:
        steps.append(total)
    return [step for step in steps if step > done]


def expired(
    complete: Sequence[int], incomplete: Sequence[int], just_saved: int, limit: int | None
) -> list[int]:
    """Steps whose folder may be deleted now that `just_saved` is complete.

    Never the newest complete one; nothing when there is no limit, when the new one is not
    complete, or when a higher step lies there (an older run's: nobody knows which is newer).
    `incomplete` steps never count as kept.
    """
    steps = sorted(set(complete) - set(incomplete))
    if limit is None or limit < 1 or just_saved not in steps or just_saved != steps[-1]:
        return []
    return steps[:-limit]


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer's files byte for byte; returns their names.

    Raises:
        NotFoundError: `source` has no tokenizer.
    """
    files = sorted({file for pattern in TOKENIZER_FILES for file in source.glob(pattern)})
    files = [file for file in files if file.is_file()]
    if _tokenizer_problems(source, need_config=False):
        raise NotFoundError(
            f"{source} has no tokenizer",
            hint="A model folder needs tokenizer.json and tokenizer_config.json.",
        )
    for file in files:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return [str(file.relative_to(source)) for file in files]


def repaired_generation_config(
    base_generation_config: Mapping[str, Any] | None,
    base_config: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """The generation config that a kept checkpoint gets: the base model's own, made savable.

    What training set on the model (`changes`) is its own affair and is left out, for how the
    model stops must not change; only a pad token that the base lacks is taken. transformers
    refuses to save sampling values without do_sample, hours into a run
    (huggingface/transformers#29988), so unused ones of the base are dropped.
    """
    kept = dict(base_generation_config or {})
    for name in ENDING_KEYS:
        if name not in kept and base_config.get(name) is not None:
            kept[name] = base_config[name]
    if changes.get("pad_token_id") is not None:
        kept.setdefault("pad_token_id", changes["pad_token_id"])
    if kept.get("do_sample") is not True:
        kept = {name: value for name, value in kept.items() if name not in SAMPLING_KEYS}
    return kept


def repaired_config(saved: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that a kept checkpoint gets: `use_cache` as in the base model.

    Gradient checkpointing sets it to false, which makes generation slow for whoever loads it.
    """
    config = dict(saved)
    if "use_cache" in base:
        config["use_cache"] = base["use_cache"]
    return config
