"""The one sampler of an evaluation, and when another one has to be built."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlfe.engines.base import Sampler
from rlfe.errors import RlfeError
from rlfe.eval.jobs import Job
from rlfe.eval.settings import digest
from rlfe.types import Request

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model")
VERIFIED = 8  # prompts of a comparison with a fresh engine


@runtime_checkable
class Verifiable(Protocol):
    """An engine that can compare itself with a fresh one."""

    def verify_reload(self, requests: Sequence[Request]) -> tuple[str, ...]:
        """Ids of the requests whose greedy tokens differ."""
        ...


class Samplers:
    """The one sampler: reloads in place while the architecture and the tokenizer stay the same.

    Args:
        make: Builds a sampler for a job's checkpoint.
        same: Whether a sampler built for the first job can load the second's checkpoint.
        verify: Compare what was loaded in place with a fresh engine, token for token.
    """

    def __init__(
        self,
        make: Callable[[Job], Sampler],
        same: Callable[[Job, Job], bool],
        *,
        verify: bool = False,
    ) -> None:
        self._make, self._same, self._verify = make, same, verify
        self._reloaded = False
        self._sampler: Sampler | None = None
        self._built_for: Job | None = None
        self._holds: Path | None = None
        self.loads = self.engines = 0
        self.load_seconds: list[float] = []

    def on(self, job: Job) -> Sampler:
        """A sampler that holds the weights of the job's checkpoint."""
        path, fits, start = job.target.path, False, time.monotonic()
        if self._sampler is not None and self._built_for is not None:
            fits = self._same(self._built_for, job)
        if self._sampler is None or not fits:
            self.close()
            self._sampler, self._built_for = self._make(job), job
            self._reloaded = False
            self.engines += 1
            if isinstance(self._sampler, Verifiable):
                self._sampler.load(path)  # starts it now, and proves what it holds
        elif self._holds == path:
            return self._sampler
        else:
            self._sampler.load(path)
            self._reloaded = True
        self._holds = path
        self.loads += 1
        self.load_seconds.append(time.monotonic() - start)
        return self._sampler

    def verified(self, requests: Sequence[Request]) -> None:
        """Greedy tokens equal a fresh engine's, where verifying was asked for.

        Only an engine that keeps running while weights change can differ; the fresh one stays.

        Raises:
            RlfeError: They differ: what was loaded is not what is computed with.
        """
        sampler = self._sampler
        if not (self._verify and self._reloaded and isinstance(sampler, Verifiable)):
            return
        differ = sampler.verify_reload(requests[:VERIFIED])
        self._reloaded = False
        if differ:
            raise RlfeError(
                f"{self._holds}: greedy tokens differ from a fresh engine's for "
                f"{len(differ)} of {min(VERIFIED, len(requests))} prompts",
                hint="Use --engine-per-checkpoint.",
            )

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None


def make_engine(job: Job) -> Sampler:
    """The engine that a job's recipe names, with the job's checkpoint."""
    from rlfe.engines import make_sampler

    return make_sampler(
        job.recipe.engine,
        job.target.path,
        dtype=job.facts["engine"]["dtype"],
        thinking=job.settings.thinking,
        max_len=job.settings.max_len,
    )


def same_engine(first: Job, second: Job) -> bool:
    """Whether two jobs share engine, architecture and tokenizer."""
    one, two = first.target.path, second.target.path
    facts = [(job.facts["engine"], job.settings.thinking) for job in (first, second)]
    return (
        facts[0] == facts[1]
        and second.settings.max_len <= first.settings.max_len
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
    data = {name: hashlib.sha256(_bytes(folder / name) or b"").hexdigest() for name in TOKENIZER}
    return digest(data)[:16]
