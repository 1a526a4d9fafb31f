"""What an evaluation is run with, resolved once and written beside every sample.

Strongest first: a flag, the run's `[eval.<task>]`, the recipe's, the defaults (n 160, gsm8k 8;
temperature 0.6, top_p 0.95). Nothing comes from a checkpoint's generation_config.json but end
tokens. Two keys follow from it: the *sample key* names everything that shapes a sample except how
many there are, so that n 16 -> 160 adds samples and never repeats one; the *settings text* of a
table row adds the judging rule, n, the problem limit and the gsm8k mode, because rows that differ
in any of them never share a table or a plot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlfe.errors import RequestError
from rlfe.records import canonical_json
from rlfe.schema import EvalTask
from rlfe.types import Prompt, Sampling

BLOCK = 8  # samples of one request; the unit that is stored, resumed and seeded
DEFAULT_N = {"gsm8k": 8}
NEUTRAL = {  # what the user did not set is off, whatever the model's own file says
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Resolved settings of one task.

    `Settings(task="gsm8k", style="base", n=8, temperature=0.6, top_p=0.95, max_tokens=512,
    max_len=1024, seed=0, ks=(1, 8))`
    """

    task: str
    style: str
    n: int
    temperature: float
    top_p: float
    max_tokens: int
    max_len: int
    seed: int
    ks: tuple[int, ...] = ()
    limit: int | None = None
    examples: tuple[str, ...] = ()
    mode: str | None = None
    thinking: bool | None = None


def effective_sampling(
    *, n: int, temperature: float, max_tokens: int, top_p: float = 1.0, top_k: int = -1
) -> dict[str, Any]:
    """Every value that must reach the engine; top_k 0 and -1 both stand for off.

    Raises:
        RequestError: n < 1, max_tokens < 1, temperature < 0, top_p outside (0, 1], or n > 1 at
            temperature 0: copies of one sample say nothing about pass@k.
    """
    if n < 1:
        raise RequestError(f"n is at least 1, got {n}")
    if max_tokens < 1:
        raise RequestError(f"max_tokens is at least 1, got {max_tokens}")
    if temperature < 0:
        raise RequestError(f"temperature is at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise RequestError(f"top_p lies in (0, 1], got {top_p}")
    if temperature == 0 and n > 1:
        raise RequestError(
            f"n={n} at temperature 0: {n} copies are one sample",
            hint="Give -n 1, or a temperature above 0.",
        )
    values = {"n": n, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    return values | NEUTRAL | {"top_k": top_k if top_k > 0 else -1}


def resolve(
    task: str,
    *,
    section: EvalTask | None,
    flags: Mapping[str, Any],
    style: str | None,
    max_len: int,
    thinking: bool | None = None,
) -> Settings:
    """Settings of `task`: flags, else its section of the run or recipe, else the defaults.

    `flags` holds what was typed (None: not given): n, temperature, top_p, max_tokens, seed, ks,
    limit, prompt. `style` and `thinking` are what the run was trained with, if there is one.

    Raises:
        RequestError: no prompt style is known, or a value or a k that cannot be.
    """
    section = section or EvalTask()
    given = {name: value for name, value in flags.items() if value is not None}
    style = given.get("prompt") or section.prompt or style
    if style is None:
        raise RequestError(
            f"the prompt style of {task} is not known: a bare model does not say how to ask it",
            hint="Give --prompt base (completion format) or --prompt chat (chat template).",
        )
    settings = Settings(
        task=task,
        style=style,
        n=given.get("n", section.n or DEFAULT_N.get(task, 160)),
        temperature=given.get("temperature", section.temperature),
        top_p=given.get("top_p", section.top_p),
        max_tokens=given.get("max_tokens", section.max_tokens),
        max_len=max_len,
        seed=given.get("seed", section.seed),
        ks=tuple(given.get("ks", section.k)),
        limit=given.get("limit", section.limit),
        examples=section.examples,
        mode=(section.mode or "flexible") if task == "gsm8k" else None,
        thinking=thinking,
    )
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Refuse settings that cannot give a score, before anything is loaded."""
    effective_sampling(
        n=settings.n,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens,
    )
    for k in settings.ks:
        if k < 1:
            raise RequestError(f"k is at least 1, got k={k}")
        if k > settings.n:
            raise RequestError(
                f"k={k} needs at least {k} samples, {settings.task} has n={settings.n}",
                hint=f"Ask for k up to {settings.n}, or sample more with -n.",
            )
    if settings.limit is not None and settings.limit < 1:
        raise RequestError(f"limit is at least 1 problem, got {settings.limit}")


class Budget(NamedTuple):
    """What becomes of a request: `Budget("shorten", 3071)`."""

    action: str  # fits, shorten, fail_problem
    max_tokens: int


def budget(prompt_tokens: int, max_tokens: int, max_len: int) -> Budget:
    """Room for a reply (algorithms 11): a problem that does not fit stays in the average.

    >>> budget(1025, 3072, 4096)
    Budget(action='shorten', max_tokens=3071)
    """
    room = max_len - prompt_tokens
    if room >= max_tokens:
        return Budget("fits", max_tokens)
    return Budget("shorten", room) if room >= 1 else Budget("fail_problem", 0)


def prompt_hash(prompts: Sequence[Prompt]) -> str:
    """Digest of the prompts of a whole task, before tokenisation (64 hex digits)."""
    rows = [
        [p.format, p.text, [[m.role, m.text] for m in p.messages], list(p.stop), p.continues_code]
        for p in prompts
    ]
    return digest(rows)


def sample_facts(
    settings: Settings, prompts: Sequence[Prompt], *, data_sha256: str, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that shapes a sample but the weights, the number of samples and the limit.

    `prompts` are those of the whole task, so that `--limit 20` and all of it share samples.
    """
    values = effective_sampling(
        n=1,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens,
    )
    del values["n"]
    return {
        "task": settings.task,
        "data_sha256": data_sha256,
        "prompt": {
            "style": settings.style,
            "format": prompts[0].format if prompts else "",
            "sha256": prompt_hash(prompts),
            "examples": list(settings.examples),
            "thinking": settings.thinking,
            "stop": list(prompts[0].stop) if prompts else [],
        },
        "sampling": values,
        "max_len": settings.max_len,
        "seed": settings.seed,
        "block": BLOCK,
        "engine": dict(engine),
    }


def sample_key(facts: Mapping[str, Any]) -> str:
    """Folder name of a set of samples: ten hex digits of their facts."""
    return digest(facts)[:10]


def settings_text(facts: Mapping[str, Any], settings: Settings, rule: str) -> str:
    """The `settings` column: `3fa9c1d2e0-n160`, then `-first20` and the gsm8k mode if any."""
    parts = [digest([facts, rule])[:10], f"n{settings.n}"]
    if settings.limit is not None:
        parts.append(f"first{settings.limit}")
    if settings.mode is not None:
        parts.append(settings.mode)
    return "-".join(parts)


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def request_sampling(
    settings: Settings,
    *,
    n: int,
    max_tokens: int,
    seed: int,
    prompt: Prompt,
    stop_token_ids: tuple[int, ...],
) -> Sampling:
    """The sampling of one block; end tokens are the tokenizer's union (docs/judging.md 2)."""
    return Sampling(
        n=n,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=int(NEUTRAL["top_k"]),
        min_p=NEUTRAL["min_p"],
        max_tokens=max_tokens,
        seed=seed,
        stop=prompt.stop,
        stop_token_ids=stop_token_ids,
        logprobs=False,  # the store keeps none
    )
