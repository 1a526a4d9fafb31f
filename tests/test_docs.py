"""The documents say what is true: generated pages are fresh, and README blocks run.

A shell block of README.md has a comment on the line before it: `<!-- runs -->` (run here, in order,
in one folder, on a tiny model), `<!-- make -->` (its targets must exist) or `<!-- needs: ... -->`.
Every `rlfe ...` line of README.md and docs/ is parsed, not run: command, options, keys and recipes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rlfe import config
from rlfe.cli import main
from scripts.write_docs import written

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?:bash|sh)\n(?P<text>.*?)```", re.DOTALL)
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(rlfe [^`]+)`")
SHELL = {"|", "||", "&&", ";", ">", ">>", "&"}
OWN_FILES = {"mine.toml"}  # a file that the reader writes
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> list[tuple[str, str]]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return [(match["mark"] or "", match["text"]) for match in BLOCK.finditer(readme)]


def test_generated_pages_are_what_the_code_would_write() -> None:
    for path, text in written().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run `make docs`"


def test_every_shell_block_of_the_readme_is_run_or_marked() -> None:
    marks = [mark for mark, _ in blocks()]
    assert marks
    assert all(mark in ("runs", "make") or mark.startswith("needs: ") for mark in marks), marks


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "".join(text for mark, text in blocks() if mark == "make")
    targets = re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_blocks_run_as_they_stand(tiny_model: Path, tmp_path: Path) -> None:
    script = "\n".join(text for mark, text in blocks() if mark == "runs")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "RLFE_MODEL__PATH": str(tiny_model),
        "RLFE_MODEL__LICENSE": "apache-2.0",  # the random model has no card that says it
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("runs/tiny*/global_step_*/model.safetensors"))


def command_lines(text: str) -> Iterator[str]:
    """Every `rlfe ...` of a page: lines of its blocks, continued ones joined, and inline ones."""
    for block in FENCE.findall(text):
        joined = re.sub(r" *\\\n *|\n +(?=\[)", " ", block)
        yield from (line.strip() for line in joined.split("\n") if line.strip().startswith("rlfe "))
    yield from INLINE.findall(FENCE.sub("", text).replace("\n", " "))


def words_of(line: str) -> list[str]:
    """The words of a command line up to what the shell does with it."""
    words = shlex.split(line, comments=True)
    end = next((place for place, word in enumerate(words) if word in SHELL), len(words))
    return words[1:end]


def wrong(line: str, page: Path = PAGES[0]) -> str | None:
    """What a command line names that does not exist; nothing is run."""
    try:
        words, command = words_of(line), main.cli
        context = click.Context(command)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words[0])
            if found is None:
                return f"no command {words[0]}"
            command, words = found, words[1:]
        options = {
            name for param in command.params for name in (*param.opts, *param.secondary_opts)
        }
        if "[--" in line or "..." in line:  # a synopsis
            unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)) - options - {"--help"}
            return f"no option {', '.join(sorted(unknown))}" if unknown else None
        if words in (["--help"], ["--version"]):
            return None
        given, left, _ = command.make_parser(context).parse_args(words)
    except (click.ClickException, ValueError) as error:
        return getattr(error, "message", str(error))
    return wrong_values(command, given, left, page)


def wrong_values(
    command: click.Command, given: dict[str, object], left: list[str], page: Path
) -> str | None:
    """A recipe, a key or a choice of a parsed command line that does not exist."""
    for name in listed(given.get("recipe")):
        file = (ROOT / name).is_file() or (page.parent / name).is_file() or name in OWN_FILES
        if not (file or name in config.shipped() or name.isupper()):
            return f"no recipe {name}"
    known = config.keys()
    for text in listed(given.get("sets")):
        key = text.partition("=")[0]
        if key != "KEY" and key not in known and not key.startswith(("eval.", "data.col")):
            return f"no key {key}"
    for param in command.params:
        for value in listed(given.get(param.name or "")):
            if isinstance(param.type, click.Choice) and value not in param.type.choices:
                return f"{value} is none of {', '.join(param.type.choices)}"
    if not any(isinstance(param, click.Argument) for param in command.params) and left:
        return f"no argument {left[0]}"
    return None


def listed(value: object) -> list[str]:
    if value is None or isinstance(value, bool):
        return []
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_of_a_page_names_what_exists(page: Path) -> None:
    lines = list(command_lines(page.read_text(encoding="utf-8")))
    found = {line: why for line in lines if (why := wrong(line, page)) is not None}
    assert found == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rlfe trian --recipe tiny", "no command trian"),
        ("rlfe train --recipe study2 --engine vllm", "no recipe study2"),
        ("rlfe sweep study2 --run", "no recipe study2"),
        ("rlfe train --recipe tiny --tpu", "No such option"),
        ("rlfe train --recipe tiny --engine jax", "none of transformers, vllm, tinker, fake"),
        ("rlfe train --set optim.rate=1", "no key optim.rate"),
        ("rlfe hub squash", "no command hub"),
        ("rlfe push RUN... [--layout NAME]", "no option --layout"),
        ("rlfe doctor now", "no argument now"),
    ],
)
def test_a_command_line_that_does_not_exist_is_found(line: str, said: str) -> None:
    assert said in (wrong(line) or "")
