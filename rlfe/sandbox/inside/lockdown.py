"""The jail."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Mapping
from typing import Any


class Jail:
    """Limits only: rlimits and a kill of the process group."""

    PIPE = 3

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.scratch = tempfile.mkdtemp(prefix="rlfe-", dir=options["scratch"])

    def facts(self) -> dict[str, Any]:
        return {"tier": "limits"}

    def script_files(self, job: Mapping[str, Any]) -> tuple[int, int]:
        source, sink = os.memfd_create("stdin"), os.memfd_create("stdout")
        os.write(source, job["stdin"].encode("utf-8", "surrogateescape"))
        os.lseek(source, 0, 0)
        return source, sink

    def before_fork(self) -> None:
        pass

    def in_child(self, job: Mapping[str, Any], writer: int, files: tuple[int, ...]) -> None:
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(files[target] if target < len(files) else devnull, target)
        os.dup2(writer, self.PIPE)
        os.closerange(self.PIPE + 1, 256)
        os.chdir(self.scratch)
        limits = (
            (resource.RLIMIT_AS, job["memory_bytes"]),
            (resource.RLIMIT_CPU, int(job["cpu_seconds"]) + 2),
            (resource.RLIMIT_FSIZE, 64 << 20),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        )
        for kind, wish in limits:
            hard = resource.getrlimit(kind)[1]
            limit = wish if hard == resource.RLIM_INFINITY else min(wish, hard)
            resource.setrlimit(kind, (limit, limit))

    def kill(self, pid: int) -> None:
        for send in (os.killpg, os.kill):
            try:
                send(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def after_child(self) -> None:
        for name in os.listdir(self.scratch):
            path = os.path.join(self.scratch, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def enter(options: Mapping[str, Any]) -> Jail:
    return Jail(options)
