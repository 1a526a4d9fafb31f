"""`lag-staleness` in its reduced form: a tiny model, 2 prompts x 2 rollouts, 8 steps, lag 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlfe.records import read_jsonl

NAME = "tiny_letters_maxrl_lag4_lr1e3"
TASK = '''
"""Right is a reply with a vowel in it: a coin that a random model wins now and then."""


def problems(split):
    return [{"id": f"letters/{i}", "prompt": "say " + "ab" * i} for i in range(4)]


def prompt(problem, style):
    return problem.prompt


def judge(problem, reply):
    return any(letter in "aeiou" for letter in reply)
'''
REDUCED = """
[model]
dtype = "float32"
max_len = 128

[task]
name = "letters"
module = "letters.py"

[prompt]
style = "base"

[train]
steps = 8
prompts_per_step = 2
group_size = 2
max_tokens = 12

[lag]
check_every = 2

[diagnostics]
k_buckets = ["1"]

[optim]
lr = 1e-3

[lora]
rank = 4

[save]
every = 4
state_every = 1
"""


def command(folder: Path, model: Path, *words: str, name: str = NAME) -> list[str]:
    """`train ...` for a folder that then holds the task and the reduced recipe."""
    (folder / "letters.py").write_text(TASK)
    (folder / "reduced.toml").write_text(REDUCED)
    arm = ("advantage.name=maxrl", "lag.steps=4", "run.seed=0", f"model.path={model}")
    return [
        *("train", "--recipe", "lag-staleness", "--recipe", "reduced.toml"),
        *(word for setting in arm for word in ("--set", setting)),
        *("--engine", "tinker", "--name", name, *words),
    ]


def lines(folder: Path, name: str = NAME) -> list[dict[str, Any]]:
    """The run's step records; none yet: empty."""
    file = folder / "runs" / name / "metrics.jsonl"
    return list(read_jsonl(file)) if file.is_file() else []


def check_run(found: list[dict[str, Any]], *, precision: float) -> None:
    """What the study reads off a run: the lags, ratio 1 at lag 0, metrics by success count."""
    assert [line["step"] for line in found] == list(range(1, 9))
    assert [line["lag"] for line in found] == [0, 1, 2, 3, 4, 4, 4, 4]
    assert [line["behavior_version"] for line in found] == [0, 0, 0, 0, 0, 1, 2, 3]
    assert {line["lag/fingerprint_ok"] for line in found} == {1}
    first = found[0]
    assert first["lag/fresh_mean_abs"] <= precision
    assert first["lag/fresh_ok"] == 1
    assert abs(first["ratio/p50"] - 1) <= precision
    assert first["clip/clip_raw"] == 0
    checked = [line["lag/fresh_mean_abs"] for line in found if line["lag/fresh_ok"] is not None]
    assert len(checked) > 1  # guard 4 as well: stored snapshots score what they sampled
    assert max(checked) <= precision
    assert {line["entropy"] for line in found} == {None}  # absent, never 0
    for key in ("clip/wclip_active/1", "clip/adv_share/1", "ratio/p95/1", "kl/k3/1"):
        assert any(line.get(key) is not None for line in found), key
