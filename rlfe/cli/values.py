"""What the shell completes: recipes, configuration keys, tasks, run folders.

Each function has click's `shell_complete` signature. They import what they need when asked.
Try: `rlfe completion bash`.
"""

from __future__ import annotations

from pathlib import Path

import click

ENGINES = ("transformers", "vllm", "tinker", "fake")
EVALUATING = ("transformers", "vllm", "fake")  # those that load a folder


def recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of the shipped recipes, and TOML files here."""
    from rlfe.config import shipped

    files = [path.name for path in Path(".").glob("*.toml")]
    return [name for name in (*shipped(), *sorted(files)) if name.startswith(incomplete)]


def setting_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Keys after --set, with the sign behind."""
    from rlfe.config import keys

    return [f"{key}=" for key in keys() if key.startswith(incomplete)]


def tasks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of the tasks."""
    import rlfe.tasks

    names: list[str] = sorted(vars(rlfe.tasks).get("BY_NAME", {}))
    return [name for name in names if name.startswith(incomplete)]


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Run folders under ./runs, or under what is typed so far."""
    folder = Path(incomplete).parent if "/" in incomplete else Path("runs")
    if not folder.is_dir():
        return []
    found = sorted(str(path) for path in folder.iterdir() if (path / "config.toml").is_file())
    return [name for name in found if name.startswith(incomplete)]
