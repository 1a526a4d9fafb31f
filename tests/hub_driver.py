"""One client process for many command lines: the client reads its settings once, at import.

`python -m tests.hub_driver` reads a JSON line {"args", "env", "cwd"}, runs `rlfe ARGS` in this
process and answers {"code", "out", "err"}. Only HF_TOKEN and XDG_CACHE_HOME may differ by call.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


class Driver:
    """A client process under these variables; `rlfe(...)` runs a command in it."""

    def __init__(self, environment: Mapping[str, str], cwd: Path) -> None:
        self.cwd = cwd
        root = str(Path(__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub_driver"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=root,
            env={**os.environ, **environment, "PYTHONPATH": root},
        )  # fmt: skip

    def rlfe(self, *args: object, **env: str) -> Done:
        """Run `rlfe ARGS`; `env` holds variables for this call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        call = {"args": [str(arg) for arg in args], "env": env, "cwd": str(self.cwd)}
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return Done(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)


def main() -> None:
    from rlfe.cli.main import run

    for line in sys.stdin:
        call: dict[str, Any] = json.loads(line)
        os.chdir(call["cwd"])
        kept = dict(os.environ)
        os.environ.update(call["env"])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(call["args"], dict(os.environ))
        os.environ.clear()
        os.environ.update(kept)
        answer = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
