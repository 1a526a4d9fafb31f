"""Array scripts for Slurm: the cells of a sweep, and the parts of an evaluation with their tables.

Only text is made; nothing is submitted. Lines of `#SBATCH` that a site needs (partition, account,
time) are added by hand or given to sbatch. Try: `rlfe sweep lr-ladder --slurm`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def head(name: str, array: str, gpus: int) -> list[str]:
    """The first lines of a script; a requeued element continues where it stopped."""
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --array={array}",
        f"#SBATCH --gpus={gpus}",
        "#SBATCH --requeue",
        f"#SBATCH --output={name}-%a.log",
        "",
    ]


def sweep_script(name: str, commands: Sequence[Sequence[str]], gpus: int = 1) -> str:
    """One element per cell. A failed one: `sbatch --array=<its number> FILE` resumes it."""
    lines = [
        *head(name, f"0-{len(commands) - 1}", gpus),
        "set -eu",
        'case "$SLURM_ARRAY_TASK_ID" in',
    ]
    for number, command in enumerate(commands):
        lines.append(f"{number}) exec {shlex.join(command)} ;;")
    return "\n".join([*lines, "esac"])


def eval_script(
    name: str, part: Sequence[str], tables: Sequence[str], parts: int, gpus: int = 1
) -> str:
    """Elements 1 to `parts` each do a part of the problems; element 0 makes the tables.

    `part` and `tables` are the commands, `part` without its `--shard`.

    Started by hand (`bash FILE`) it submits the parts, then element 0 for when all have ended
    well. Element 0 gets a GPU like the others: the precision of an engine belongs to what samples
    are called by.
    """
    return "\n".join(
        [
            *head(name, f"1-{parts}", gpus),
            "set -eu",
            'if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then',
            '  parts=$(sbatch --parsable "$0")',
            '  exec sbatch --array=0 --dependency="afterok:${parts%%;*}" "$0"',
            "fi",
            'if [ "$SLURM_ARRAY_TASK_ID" = 0 ]; then',
            f"  exec {shlex.join(tables)}",
            "fi",
            f'exec {shlex.join(part)} --shard "$SLURM_ARRAY_TASK_ID/{parts}"',
        ]
    )
