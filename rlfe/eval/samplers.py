"""The one sampler of an evaluation, and when another one has to be built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlfe.engines.base import Sampler
from rlfe.eval.jobs import Job
from rlfe.eval.settings import digest


class Samplers:
    """The one sampler: reloads in place while the architecture and the tokenizer stay the same.

    Args:
        make: Builds a sampler for a job's checkpoint.
        same: Whether a sampler built for the first job can load the second's checkpoint.
    """

    def __init__(self, make: Callable[[Job], Sampler], same: Callable[[Job, Job], bool]) -> None:
        self._make, self._same = make, same
        self._sampler: Sampler | None = None
        self._built_for: Job | None = None
        self._holds: Path | None = None
        self.loads = self.engines = 0

    def on(self, job: Job) -> Sampler:
        """A sampler that holds the weights of the job's checkpoint."""
        path, fits = job.target.path, False
        if self._sampler is not None and self._built_for is not None:
            fits = self._same(self._built_for, job)
        if self._sampler is None or not fits:
            self.close()
            self._sampler, self._built_for = self._make(job), job
            self.engines += 1
        elif self._holds == path:
            return self._sampler
        else:
            self._sampler.load(path)
        self._holds = path
        self.loads += 1
        return self._sampler

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None


def same_engine(first: Job, second: Job) -> bool:
    """Whether two jobs share engine, architecture and tokenizer."""
    one, two = first.target.path, second.target.path
    facts = [(job.facts["engine"], job.settings.thinking) for job in (first, second)]
    return (
        facts[0] == facts[1]
        and _architecture(one) == _architecture(two)
        and tokenizer_hash(one) == tokenizer_hash(two)
    )


def _architecture(folder: Path) -> dict[str, Any]:
    """config.json without what changes nothing about the shape of the model."""
    loose = ("dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path")
    config = json.loads(_bytes(folder / "config.json") or b"{}")
    return {name: value for name, value in config.items() if name not in loose}


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def tokenizer_hash(folder: Path) -> str:
    """Digest of what turns a prompt into ids: tokenizer files and chat template."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model")
    data = {name: hashlib.sha256(_bytes(folder / name) or b"").hexdigest() for name in names}
    return digest(data)[:16]
