"""What flows between the rooms: frozen, slotted, keyword-only dataclasses. Standard library only.

Shape letters: `P` problems of a step, `G` rollouts of a problem, `B` sequences, `L` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # annotations only: this module imports nothing outside the standard library
    import numpy as np


class Finish(StrEnum):
    """How a completion ended. `Finish("stop")`: an end token or a stop string."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(StrEnum):
    """How judging a reply ended (judging rules: `docs/judging.md`). `Status("passed")`."""

    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    SYNTAX_ERROR = "syntax_error"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    CRASHED = "crashed"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a task.

    `Problem(id="mbpp/11", task="mbpp", split="train", prompt="Write a ...", answer="def ...",
    tests=("assert f(1) == 2",), entry_point="f")`
    """

    id: str
    task: str
    split: str
    prompt: str
    answer: str = ""
    tests: tuple[str, ...] = ()
    entry_point: str = ""
    # Private to the task: set-up code, inputs, tolerance.
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat prompt. `Message(role="user", text="Write ...")`"""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A problem as a model sees it, before tokenisation.

    Base style: `messages` is empty and `text` is the whole prompt. Chat style: `messages` go
    through the chat template and `text` opens the assistant's turn. `continues_code` says that
    the reply starts as code (the prompt opened a fence or is a completion prompt).

    `Prompt(format="mbpp-base-v1", text="You are ...[BEGIN]\\n", stop=("[DONE]",))`
    """

    format: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    stop: tuple[str, ...] = ()
    continues_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Every sampling value, always explicit.

    `logprobs`: whether log-probabilities are wanted; without, an engine may leave them empty.

    `Sampling(n=8, temperature=1.0, max_tokens=512, seed=7)`
    """

    n: int
    temperature: float
    max_tokens: int
    seed: int
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to sample from.

    `Request(id="3", prompt_ids=(1, 15, 9), sampling=Sampling(...))`
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation; stop-string and end tokens are in `token_ids`, not in `text`.

    `logprobs` are the behaviour policy's, one per token, at the sampling temperature (or none,
    where `Sampling.logprobs` is off).

    `Completion(token_ids=(5, 2), logprobs=(-0.1, -0.7), text="4", finish=Finish.STOP)`
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Finish
    policy_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the judge found. `Verdict(status=Status.PASSED, detail="", seconds=0.003)`

    `facts` carries what a task records beside the status: `{"base": "passed", "plus": "failed"}`.
    """

    status: Status
    detail: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        return self.status is Status.PASSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One judged sample. `reward` is None when it could not be scored (never 0 by silence).

    `Rollout(problem_id="mbpp/11", index=0, prompt_ids=(1, 2), completion=..., reward=1.0, ...)`
    """

    problem_id: str
    index: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    verdict: Verdict
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one (step, slot). Never formed by prompt text.

    `Group(problem_id="mbpp/11", step=0, slot=3, rollouts=(...))`
    """

    problem_id: str
    step: int
    slot: int
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one optimiser step, right-padded, as numpy arrays.

    ids_BL int64; mask_BL bool (True on trained completion tokens); behavior_logp_BL,
    old_logp_BL, reference_logp_BL float32 (the last two may be None); advantage_B, weight_B
    float64; successes_B int64 (k of the row's group, -1 for replay); group_B int64 (the group's
    number within the step, -1 for replay); source_B int8 (0 fresh, 1 replay). A token's
    log-probability stands at the token's own position.
    """

    ids_BL: np.ndarray
    mask_BL: np.ndarray
    behavior_logp_BL: np.ndarray
    advantage_B: np.ndarray
    weight_B: np.ndarray
    successes_B: np.ndarray
    group_B: np.ndarray
    source_B: np.ndarray
    old_logp_BL: np.ndarray | None = None
    reference_logp_BL: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl. `StepRecord(step=1, version=1, behavior_version=0, metrics={...})`

    `seconds` holds wall time by phase, `speed` what follows from it; they are kept apart from
    `metrics`, which are reproducible.
    """

    step: int
    version: int
    behavior_version: int
    metrics: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)
    speed: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellName:
    """A cell of an experiment; its text form is the folder name (`rlfe.naming`).

    `CellName(model="qwen3_1p7b_base", task="mbpp", arm="hardcd_lam0p1", lr=6e-6, seed=None)`
    """

    model: str
    task: str
    arm: str
    lr: float
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """Where a checkpoint lies. `CheckpointRef(root="runs", subfolder="cell/global_step_30")`

    `root` is a local folder or, with `revision` set or a `hf://` prefix, a repository.
    """

    root: str
    subfolder: str
    revision: str | None = None

    @property
    def cell(self) -> str:
        return self.subfolder.split("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One judged evaluation sample; counts are derived from these.

    `EvalRecord(cell="tiny_mbpp_nobuf_lr1e3", step=30, task="mbpp_plus", problem_id="mbpp_plus/2",
    sample=0, answer_hash="9f..", status="passed", finish="stop", tokens=41, settings="3fa9...")`
    """

    cell: str
    step: int
    task: str
    problem_id: str
    sample: int
    answer_hash: str
    status: str
    finish: str
    tokens: int
    settings: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One file of a push. `state` is new, changed, same or remote_only."""

    local: str
    remote: str
    size_bytes: int
    sha256: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """What a push would do. `commits`: titles in order; `skipped`: folder -> reason."""

    repo_id: str
    files: tuple[PlannedFile, ...]
    card: str
    commits: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
