"""Scores samples with evalplus 0.3.1 itself, for comparison: parity tests, `--scorer evalplus`.

What: a script for an interpreter that has evalplus (it imports nothing of rlfe); base and plus
verdicts as evalplus gives them, with its own ground truth. What not: a judge to rely on: it runs
programs without a jail. Data paths come by evalplus' MBPP_OVERRIDE_PATH, HUMANEVAL_OVERRIDE_PATH.
Try: `python evalplus_peer.py mbpp samples.jsonl verdicts.jsonl 1`.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def load(dataset: str) -> tuple[dict[str, Any], list[str]]:
    """Problems, and the tasks that ask only for a result."""
    from evalplus.data import get_human_eval_plus, get_mbpp_plus
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS

    if dataset == "mbpp":
        return get_mbpp_plus(), MBPP_OUTPUT_NOT_NONE_TASKS
    return get_human_eval_plus(), []


def main() -> None:
    """Judge all samples; the last line of the output file holds the times."""
    from evalplus.evaluate import check_correctness, get_groundtruth

    dataset, source, target, workers = sys.argv[1:5]
    started = time.monotonic()
    every, presence_only = load(dataset)
    with open(source) as file:
        samples = [json.loads(line) for line in file if line.strip()]
    problems = {s["task_id"]: every[s["task_id"]] for s in samples}
    truth = get_groundtruth(problems, f"peer-{time.time_ns()}", presence_only)
    prepared = time.monotonic()
    with ProcessPoolExecutor(max_workers=int(workers)) as pool, open(target, "w") as out:
        waiting = [
            pool.submit(
                check_correctness, dataset, number, problems[s["task_id"]], _program(s, problems),
                truth[s["task_id"]], False, True, number,
            )
            for number, s in enumerate(samples)
        ]  # fmt: skip
        for number, future in enumerate(waiting):
            found = future.result()
            row = {"sample": number, "base": found["base"][0], "plus": found["plus"][0]}
            out.write(json.dumps(row) + "\n")
        times = {"prepare": prepared - started, "judge": time.monotonic() - prepared}
        out.write(json.dumps({"seconds": times}) + "\n")


def _program(sample: dict[str, Any], problems: dict[str, Any]) -> str:
    if "solution" in sample:
        return str(sample["solution"])
    return str(problems[sample["task_id"]]["prompt"] + sample["completion"])


if __name__ == "__main__":
    main()
