"""The documents say what is true: generated pages are fresh, and README blocks run.

A shell block of README.md has a comment on the line before it: `<!-- runs -->` (run here, in order,
in one folder, on a tiny model), `<!-- make -->` (its targets must exist) or `<!-- needs: ... -->`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.write_docs import written

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?:bash|sh)\n(?P<text>.*?)```", re.DOTALL)


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
