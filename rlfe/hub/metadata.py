"""The metadata block of a model card: written, read back, checked as strictly as the Hub's reader.

The Hub reads no metadata at all, without a word, when the block does not open at byte 0 or is
never closed; it takes the last of a repeated key, and `language: no` is false in YAML. So a card
is read back and compared with what was meant. Not here: what it says (`rlfe.hub.card`).
Try: `problem("---\\nlicense: mit\\n---\\n") is None`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from rlfe.errors import RequestError
from rlfe.hub.cardfacts import is_license
from rlfe.hub.paths import repo_id_problem

BLOCK = re.compile(r"---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
UNKNOWN_LICENSE = "unknown"
RELATIONS = ("finetune", "quantized", "adapter", "merge")
KEEP = re.compile(r"<!-- rlfe:keep:([\w.-]+) -->\n?(.*?)<!-- /rlfe:keep -->", re.DOTALL)
MARK = "<!-- rlfe:card -->"


class Fault(NamedTuple):
    """What is wrong with a card. `Fault("bad_tags", "tags has to be a list of texts", 3)`; `word`
    is stable, `line` counts from 1."""

    word: str
    text: str
    line: int = 1


def _repeated_key(node: Any) -> Fault | None:
    """The first key that stands twice in a mapping of this YAML node or below it."""
    if isinstance(node, yaml.SequenceNode):
        return next((fault for item in node.value if (fault := _repeated_key(item))), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    seen: set[str] = set()
    for key, value in node.value:
        if str(key.value) in seen:
            line = key.start_mark.line + 2  # the block's first line is the file's second
            return Fault("repeated_key", f"the key {key.value!r} is there twice", line)
        seen.add(str(key.value))
        if fault := _repeated_key(value):
            return fault
    return None


def block(meta: Mapping[str, Any]) -> str:
    """The metadata block for these values, checked by reading it back.

    Raises `RequestError` when the card that starts with it would not be valid (an unknown license
    apart: a dry run shows the card all the same).
    """
    body = yaml.safe_dump(
        dict(meta), sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000
    )
    text = f"---\n{body}---\n"
    check(text)
    assert yaml.safe_load(body) == dict(meta), "the block does not read back"
    return text


def check(readme: str) -> None:
    """Raises `RequestError` (exit 2) with the line when the card's metadata is not valid.

    An unknown license is `rlfe.hub.card_metadata.check_license`'s, which names the bases.
    """
    found = problem(readme)
    if found is not None and found.word != "unknown_license":
        raise RequestError(
            f"README.md:{found.line}: {found.text}",
            hint="The card has to be valid before any weight goes up.",
        )


def problem(readme: str) -> Fault | None:
    """The first fault of a card's metadata, or None when it is valid to push."""
    match = BLOCK.match(readme)
    if match is None:
        return Fault("no_metadata", "no metadata: the file has to start with a closed --- block")
    try:
        repeated = _repeated_key(yaml.compose(match[1], Loader=yaml.SafeLoader))
        meta = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 2 if mark is not None else 1
        return Fault("bad_yaml", f"not YAML: {getattr(error, 'problem', error)}", line)
    if repeated is not None:
        return repeated
    if not isinstance(meta, dict):
        return Fault("not_a_mapping", "the metadata is not a list of `key: value`", 2)
    found = _value_fault(meta)
    return found._replace(line=_line_of(match[1], KEY_OF.get(found.word, ""))) if found else None


KEY_OF = {
    "bad_license": "license", "unknown_license": "license", "bad_tags": "tags",
    "bad_language": "language",
    "bad_model_index": "model-index", "bad_base_model": "base_model", "bad_datasets": "datasets",
    "bad_library": "library_name", "bad_pipeline": "pipeline_tag",
    "bad_relation": "base_model_relation",
}  # fmt: skip


def _line_of(body: str, key: str) -> int:
    """Line of a key in the file; the block's first line is 2."""
    lines = body.splitlines()
    return next((n for n, line in enumerate(lines, start=2) if key and line.startswith(key)), 1)


def _value_fault(meta: Mapping[str, Any]) -> Fault | None:
    faults = (
        _license_fault(meta),
        _texts_fault(meta, "tags", "bad_tags", single=False),
        _texts_fault(meta, "language", "bad_language", single=True),
        _ids_fault(meta, "base_model", "bad_base_model"),
        _ids_fault(meta, "datasets", "bad_datasets"),
        _text_fault(meta, "library_name", "bad_library"),
        _text_fault(meta, "pipeline_tag", "bad_pipeline"),
        _relation_fault(meta),
        _index_fault(meta),
    )
    return next((fault for fault in faults if fault is not None), None)


def _license_fault(meta: Mapping[str, Any]) -> Fault | None:
    found = meta.get("license")
    if found is None:
        return Fault("no_license", "no license is stated")
    if found == UNKNOWN_LICENSE:
        return Fault("unknown_license", "the license is not known; state it")
    if not is_license(found):
        return Fault("bad_license", f"{found!r} is not a license id that the Hub knows")
    if found == "other" and not meta.get("license_name"):
        return Fault("bad_license", "license `other` needs license_name")
    return None


def _texts_fault(meta: Mapping[str, Any], key: str, word: str, *, single: bool) -> Fault | None:
    found = meta.get(key)
    if found is None and key not in meta:
        return None
    texts = [found] if single and isinstance(found, str) else found
    if isinstance(texts, list) and all(isinstance(item, str) for item in texts):
        return None
    return Fault(word, f"{key} has to be {'a text or ' if single else ''}a list of texts")


def _ids_fault(meta: Mapping[str, Any], key: str, word: str) -> Fault | None:
    fault = _texts_fault(meta, key, word, single=True)
    found = meta.get(key) or []
    ids = [found] if isinstance(found, str) else found
    if fault is not None:
        return fault
    wrong = [name for name in ids if "/" in name and repo_id_problem(name)]
    return Fault(word, f"{key}: {wrong[0]!r} is not an id on the Hub") if wrong else None


def _text_fault(meta: Mapping[str, Any], key: str, word: str) -> Fault | None:
    if key not in meta or isinstance(meta[key], str):
        return None
    return Fault(word, f"{key} has to be a text")


def _relation_fault(meta: Mapping[str, Any]) -> Fault | None:
    relation = meta.get("base_model_relation")
    if relation is None or relation in RELATIONS:
        return None
    return Fault("bad_relation", f"base_model_relation {relation!r} is none of {RELATIONS}")


def _index_fault(meta: Mapping[str, Any]) -> Fault | None:
    if "model-index" not in meta:
        return None
    models = meta["model-index"]
    is_good = isinstance(models, list) and models and all(_is_indexed(model) for model in models)
    needs = "model-index needs name, task.type, dataset.type, dataset.name and metrics"
    return None if is_good else Fault("bad_model_index", needs)


def _is_indexed(model: Any) -> bool:
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        return False
    results = model.get("results")
    return isinstance(results, list) and all(_is_result(result) for result in results)


def _is_result(result: Any) -> bool:
    if not isinstance(result, dict) or not isinstance(result.get("metrics"), list):
        return False
    task, data = result.get("task"), result.get("dataset")
    named = isinstance(data, dict) and {"type", "name"} <= set(data)
    return named and isinstance(task, dict) and "type" in task


# -- parts written by hand ----------------------------------------------------------------------


def kept_parts(readme: str) -> dict[str, str]:
    """Hand-written parts by name: what stands between `<!-- rlfe:keep:NAME -->` markers."""
    return {match[1]: match[2] for match in KEEP.finditer(readme)}


def with_kept_parts(card: str, old: str | None) -> str:
    """The card with the old card's hand-written parts in place; unknown ones go to the end."""
    if not old:
        return card
    parts = kept_parts(old)

    def put(match: re.Match[str]) -> str:
        return keep_block(match[1], parts.pop(match[1], match[2]))

    merged = KEEP.sub(put, card)
    return merged + "".join(f"\n{keep_block(name, text)}\n" for name, text in parts.items())


def keep_block(name: str, text: str) -> str:
    """A part that survives the next push."""
    return f"<!-- rlfe:keep:{name} -->\n{text}<!-- /rlfe:keep -->"


def is_ours(readme: str | None) -> bool:
    """Whether rlfe wrote this card; another one is replaced only after a yes."""
    return readme is None or MARK in readme


def read(readme: str) -> dict[str, Any]:
    """The metadata of somebody else's card; empty when there is none that can be read."""
    match = BLOCK.match(readme.removeprefix("\ufeff").lstrip())
    try:
        meta = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return meta if isinstance(meta, dict) else {}
