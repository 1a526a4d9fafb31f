"""Adapters of the evaluation room: case input -> real code -> case output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlfe.engines.tokenizer import end_token_ids
from rlfe.errors import PartialError, RequestError
from rlfe.eval import merge
from rlfe.eval.passk import benchmark_pass_at_k, pass_at_k
from rlfe.eval.settings import budget, effective_sampling


def one_problem(given: dict[str, Any]) -> dict[str, Any]:
    n, c, k = given["n"], given["c"], given["k"]
    try:
        return {"value": pass_at_k(n, c, k)}
    except RequestError as error:
        return {"undefined": True} if error.what.startswith("k=") else {"error": True}


def benchmark(given: dict[str, Any]) -> dict[str, Any]:
    counts = [(n, c) for n, c in given["counts"]]
    try:
        return {"value": benchmark_pass_at_k(counts, problems=given["problems"], k=given["k"])}
    except PartialError:
        return {"incomplete": True}


def csv_resume(given: dict[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in given["settings"].items() if name != "benchmark"}
    layout = merge.Layout(cell="run", task="benchmark", score="value", settings=tuple(settings))
    try:
        rows = merge.read_rows(given["csv"] or "", layout)
    except RequestError:
        return {"error": True}
    task = {"benchmark": given["settings"]["benchmark"], **settings}
    asked = {
        merge.point_of({"run": run, "step": str(step), **task}, layout): [run, step]
        for run, step in given["want"]
    }
    todo = asked.keys() - merge.done_points(rows, layout, given["ks"])
    kept = merge.usable_rows(rows, todo, layout)
    return {
        "todo": [want for point, want in asked.items() if point in todo],
        "rows_after_todo_dropped": len(kept),
    }


def eval_seeds(given: dict[str, Any]) -> dict[str, Any]:
    shared = max(0, given["n"] - abs(given["seed_a"] - given["seed_b"]))
    return {"shared": shared, "independent": shared == 0}


def prompt_budget(given: dict[str, Any]) -> dict[str, Any]:
    action, tokens = budget(given["prompt_tokens"], given["max_tokens"], given["max_model_len"])
    return {"action": action, "max_tokens": tokens}


def sampling_params(given: dict[str, Any]) -> dict[str, Any]:
    try:
        effective = effective_sampling(**given["flags"])
    except RequestError:
        return {"error": True}
    ends = end_token_ids(given["tokenizer_eos_id"], given["config"], given["generation_config"])
    return {"effective": effective, "stop_token_ids": list(ends)}


ADAPTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "pass_at_k": one_problem,
    "pass_at_k_dataset": benchmark,
    "csv_resume": csv_resume,
    "eval_seeds": eval_seeds,
    "prompt_budget": prompt_budget,
    "sampling_params": sampling_params,
}
