"""What the Hub takes of no one, however it is sent, is told in the plan."""

from __future__ import annotations

import json
import os
import struct

import pytest

from rlfe.hub.cache import Cache
from rlfe.hub.discover import discover
from rlfe.hub.plan import RemoteFile, make_plan, plan_warnings
from tests.hub_runs import make_run


def plan_of(run, remote=None):
    cache = Cache(run)
    return make_plan("org/x", [discover(run, cache)], remote=remote, caches={run.name: cache})


def test_a_file_of_more_than_500_gb_is_named_in_the_plan(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    weights = run / "global_step_30" / "model.safetensors"
    size = 600_000_000_000
    header = {"lm_head.weight": [size // 4], "model.embed_tokens.weight": [1]}
    tensors = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * shape[0]]}
        for (name, shape), at in zip(header.items(), (0, size), strict=True)
    }
    text = json.dumps(tensors).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text)
    try:
        os.truncate(weights, 8 + len(text) + size + 4)  # sparse: takes no space
    except OSError:
        pytest.skip("this file system has no sparse files of 600 GB")
    warnings = plan_warnings(plan_of(run), commits=1, private=False)
    name = f"{run.name}/global_step_30/model.safetensors"
    assert f"{name} has 600 GB; the Hub takes files of at most 500 GB" in warnings


def test_a_folder_of_more_than_10_000_entries_is_named_in_the_plan(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    full = {f"{run.name}/evals/{at}.parquet": RemoteFile(1, "x") for at in range(9_999)}
    assert not [w for w in plan_warnings(plan_of(run, full), commits=1, private=False) if "en" in w]
    (run / "evals" / "x").mkdir(parents=True)
    for at in range(2):
        (run / "evals" / f"new_{at}.csv").write_text("a\n")
    warnings = plan_warnings(plan_of(run, full), commits=1, private=False)
    told = f"{run.name}/evals/ would have 10,001 entries; the Hub takes at most 10,000"
    assert told in warnings
