"""What may leave a run folder, what is remembered, and what a plan makes of it. No network."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfe.errors import RequestError
from rlfe.hub.cache import Cache, hash_file
from rlfe.hub.contents import Kind, kind_of
from rlfe.hub.discover import discover, select_steps
from rlfe.hub.packing import pack
from rlfe.hub.paths import repo_id_problem, subfolder
from rlfe.hub.plan import RemoteFile, State, batches, make_plan
from rlfe.hub.secrets import first_secret_in
from rlfe.records import read_jsonl_zst
from tests.hub_runs import make_checkpoint, make_run, safetensors_bytes


def looked_at(run, **options):
    return discover(run, Cache(run), **options)


def plan_of(run, remote=None):
    cache = Cache(run)
    return make_plan("org/x", [discover(run, cache)], remote=remote, caches={run.name: cache})


def left_home(run):
    found = looked_at(run)
    return {name.rpartition("/")[2]: why for name, why in found.left_home.items()}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("global_step_30/config.json", Kind.CHECKPOINT),
        ("global_step_30/model-00001-of-00002.safetensors", Kind.CHECKPOINT),
        ("global_step_30/chat_templates/tool.jinja", Kind.CHECKPOINT),
        ("global_step_30/adapter/adapter_model.safetensors", Kind.CHECKPOINT),
        ("global_step_30/tokenizer.json", Kind.CHECKPOINT),
        ("config.toml", Kind.CELL),
        ("logs/deep/train.log", Kind.RECORDS),
        ("evals/gsm8k/samples.jsonl.zst", Kind.RECORDS),
        ("global_step_30/README.md", None),
        ("global_step_30/optimizer.pt", None),
        ("global_step_30/tokenizer.json.tmp", None),
        ("global_step_30/adapter_model.safetensors", None),
        ("global_step_30/actor/config.json", None),
        ("global_step_30/.cache/huggingface/x.json", None),
        ("state/model.safetensors", None),
        ("logs/wandb/run.log", None),
        ("logs/hf_token.txt", None),
        ("logs/.env", None),
        ("logs/id_rsa.log", None),
        ("logs/aws_credentials.json", None),
        ("README.md", None),
        ("global_step_30_old/config.json", None),
    ],
)
def test_only_listed_files_may_go_up(path, kind):
    assert kind_of(tuple(path.split("/"))) is kind


@given(st.lists(st.text(min_size=1, max_size=12).filter(lambda t: "/" not in t), min_size=1))
def test_nothing_below_a_dot_folder_ever_goes_up(parts):
    assert kind_of(("global_step_1", ".cache", *parts)) is None


def test_checkpoints_are_found_in_numeric_order(tmp_path):
    run = make_run(tmp_path, steps=(100, 30, 9))
    assert [checkpoint.step for checkpoint in looked_at(run).checkpoints] == [9, 30, 100]


def test_every_fault_keeps_a_checkpoint_home_and_says_why(tmp_path):
    run = make_run(tmp_path, steps=(10, 20, 30, 40, 50, 60, 70), shards=2)

    def step(number):
        return run / f"global_step_{number}"

    (step(10) / "model-00002-of-00002.safetensors").unlink()
    shard = step(20) / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (step(30) / "extra.safetensors").write_bytes(safetensors_bytes({"x": [1.0]}))
    config = json.loads((step(40) / "config.json").read_text())
    (step(40) / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (step(50) / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    (step(60) / "model.safetensors.tmp").write_bytes(b"")
    (step(70) / "adapter_config.json").write_text("{}")
    found = left_home(run)
    assert "model-00002-of-00002.safetensors is missing" in found["global_step_10"]
    assert "its header needs" in found["global_step_20"]
    assert "extra.safetensors" in found["global_step_30"]
    assert "weights are F32" in found["global_step_40"]
    assert "tie_word_embeddings = true" in found["global_step_50"]
    assert "model.safetensors.tmp" in found["global_step_60"]
    assert "adapter_config.json" in found["global_step_70"]


def test_sharded_state_needs_a_merge_only_without_whole_weights(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    (run / "global_step_30" / "optimizer.pt").write_bytes(b"x")
    other = run / "global_step_60" / "actor"
    other.mkdir(parents=True)
    (other / "model_world_size_8_rank_0.pt").write_bytes(b"x")
    found = looked_at(run)
    assert [checkpoint.step for checkpoint in found.checkpoints] == [30]
    assert "needs a merge" in found.left_home[f"{run.name}/global_step_60"]


def test_a_link_out_of_the_run_keeps_a_checkpoint_home(tmp_path):
    run = make_run(tmp_path / "runs", steps=(30, 60))
    weights = run / "global_step_30" / "model.safetensors"
    outside = tmp_path / "outside.safetensors"
    weights.rename(outside)
    weights.symlink_to(outside)
    inside = run / "global_step_60" / "model.safetensors"
    inside.rename(run / "kept.safetensors")
    inside.symlink_to(run / "kept.safetensors")
    assert "outside the run" in left_home(run)["global_step_30"]
    assert [checkpoint.step for checkpoint in looked_at(run).checkpoints] == [60]


def test_a_verdict_is_forgotten_when_any_file_of_the_checkpoint_changes(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    cache = Cache(run)
    discover(run, cache)
    cache.save()
    (run / "global_step_30" / "model.safetensors.tmp").write_bytes(b"")
    assert discover(run, Cache(run)).checkpoints == ()


def test_a_second_look_reads_no_file_of_a_checkpoint(tmp_path, monkeypatch):
    run = make_run(tmp_path, shards=2)
    cache = Cache(run)
    remote = {item.remote: item for item in plan_of(run).units[0].items}
    there = {
        path: RemoteFile(item.size, *reversed(hash_file(item.packed.sources[0].path, item.size)))
        for path, item in remote.items()
    }
    make_plan("org/x", [discover(run, cache)], remote=there, caches={run.name: cache})
    cache.save()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was read")

    cache = Cache(run)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    plan = make_plan("org/x", [discover(run, cache)], remote=there, caches={run.name: cache})
    assert {item.state for item in plan.units[0].items} == {State.SAME}


def test_a_damaged_cache_is_started_anew(tmp_path):
    run = make_run(tmp_path)
    (run / ".rlfe").mkdir()
    (run / ".rlfe" / "hashes.json").write_text('{"schema": 2, "files": [')
    assert len(looked_at(run).checkpoints) == 2


def test_a_file_is_new_changed_same_or_only_remote(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    prefix = f"{run.name}/global_step_30"
    config = run / "global_step_30" / "config.json"
    weights = run / "global_step_30" / "model.safetensors"
    sha256, sha1 = hash_file(config, config.stat().st_size)
    remote = {
        f"{prefix}/config.json": RemoteFile(config.stat().st_size, sha1),
        f"{prefix}/model.safetensors": RemoteFile(weights.stat().st_size, "p", "0" * 64),
        f"{prefix}/tokenizer.json": RemoteFile(1, "x"),
        f"{prefix}/gone.json": RemoteFile(5, "x"),
        "other/file": RemoteFile(5, "x"),
    }
    plan = plan_of(run, remote)
    states = {item.remote.rpartition("/")[2]: item.state for item in plan.units[0].items}
    assert states["config.json"] is State.SAME
    assert states["model.safetensors"] is State.CHANGED
    assert states["tokenizer.json"] is State.CHANGED
    assert states["tokenizer_config.json"] is State.NEW
    assert [file.remote for file in plan.remote_only] == [f"{prefix}/gone.json"]
    assert len(sha256) == 64


def test_records_travel_with_the_last_checkpoint_or_alone(tmp_path):
    run = make_run(tmp_path)
    plan = plan_of(run)
    assert [len(unit.to_send) for unit in plan.units] == [5, 5 + 3 + 1 + 2]
    items = [item for unit in plan.units for item in unit.items if "/global_step_" in item.remote]
    there = {
        item.remote: RemoteFile(item.size, hash_file(item.packed.sources[0].path, item.size)[1])
        for item in items
    }
    again = plan_of(run, there)
    assert [unit.title.partition(": ")[2] for unit in again.to_send] == [
        "configuration, logs and rollouts"
    ]


def test_rollouts_are_packed_by_a_hundred_steps_and_read_back(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    packed = {item.name: item for item in looked_at(run).records}
    first = packed["rollouts/steps_000001-000100.jsonl.zst"]
    place = tmp_path / "packed.zst"
    place.write_bytes(b"".join(first.chunks()))
    assert [source.name for source in first.sources] == [
        "rollouts/step_000001.jsonl.zst", "rollouts/step_000002.jsonl.zst",
    ]  # fmt: skip
    assert place.stat().st_size == first.size_bound
    assert "rollouts/steps_000101-000200.jsonl.zst" in packed
    frames = [read_jsonl_zst(source.path) for source in first.sources]
    assert [line["step"] for frame in frames for line in frame] == [1, 2]


def test_plain_rollouts_are_compressed_to_the_same_bytes_every_time(tmp_path):
    run = make_run(tmp_path, steps=(30,))
    for path in (run / "rollouts").iterdir():
        path.unlink()
    (run / "rollouts" / "1.jsonl").write_text('{"step": 1}\n')
    (packed,) = [p for p in looked_at(run).records if p.name.startswith("rollouts/")]
    assert packed.name == "rollouts/steps_000001-000100.jsonl.zst"
    assert b"".join(packed.chunks()) == b"".join(packed.chunks())
    assert pack(packed.sources) == [packed]


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("token=hf_" + "a1B2c3D4e5" * 3, "Hugging Face token"),
        ("WANDB_API_KEY=" + "0123456789abcdef" * 2 + "01234567", "wandb key"),
        ("key: sk-proj-" + "a1b2c3d4e5" * 3, "sk- key"),
        ("ghp_" + "a1b2c3d4e5" * 4, "GitHub token"),
    ],
)
def test_token_shapes_are_found(line, shape):
    assert first_secret_in([b"harmless", line.encode()]) == (2, shape)


@pytest.mark.parametrize(
    "line",
    [
        "commit 0123456789abcdef0123456789abcdef01234567",
        "from huggingface_hub import hf_hub_download",
        '"wandb": "0.19.1", "git_commit": "0123456789abcdef0123456789abcdef01234567"',
        "a task-oriented-and-risk-averse-approach to sk-learn",
        "hf_short",
    ],
)
def test_harmless_text_is_no_secret(line):
    assert first_secret_in([line.encode()]) is None


def test_a_secret_is_found_in_compressed_records_too(tmp_path):
    from rlfe.records import write_jsonl_zst

    run = make_run(tmp_path, steps=(30,))
    write_jsonl_zst(run / "rollouts" / "step_000003.jsonl.zst", [{"text": "hf_" + "a1" * 17}])
    with pytest.raises(RequestError, match=r"step_000003.jsonl.zst:1 holds .* Hugging Face token"):
        looked_at(run)
    assert looked_at(run, exclude=("rollouts",)).records


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("30:90:30,last", [30, 60, 90, 100]),
        ("last", [100]),
        ("45", [45]),
        ("30:60", [30, 45, 60]),
        ("1,2", []),
    ],
)
def test_steps_are_selected_by_ranges_and_the_endpoint(text, steps):
    assert select_steps(text, [100, 30, 45, 60, 90]) == steps


@pytest.mark.parametrize("text", ["", "a", "30:", "1:2:3:4", "-5", "٣"])
def test_unreadable_steps_are_refused(text):
    with pytest.raises(RequestError, match="--steps"):
        select_steps(text, [30])


def test_commits_are_grouped_in_order():
    assert batches(["a", "b", "c"], 2) == [("a", "b"), ("c",)]  # type: ignore[list-item]


def test_a_path_is_the_runs_own_name_whatever_was_typed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs", steps=(30,))
    link = tmp_path / "short"
    link.symlink_to(run)
    monkeypatch.chdir(run / "global_step_30")
    expected = f"{run.name}/global_step_30"
    for typed in (
        str(link / "global_step_30"),
        ".",
        "../global_step_30/",
        f"{run}//global_step_30",
    ):
        assert subfolder(typed) == expected
    assert subfolder(f"C:\\runs\\{run.name}\\global_step_30", windows=True) == expected
    assert subfolder(f"runs\\{run.name}\\global_step_30") == expected


@pytest.mark.parametrize("typed", ["/", "..", "runs/x/global_step_", "runs/x/global_step_3a", ""])
def test_what_is_no_checkpoint_has_no_path(typed):
    with pytest.raises(RequestError, match="not a checkpoint"):
        subfolder(typed)


@given(st.text(alphabet="aB3-_./", max_size=12))
def test_our_repository_rule_is_never_laxer_than_the_clients(name):
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id_problem(name) is None:
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise AssertionError(name) from error


def test_planning_leaves_only_the_cache_behind(tmp_path):
    run = make_run(tmp_path)
    before = set(run.rglob("*"))
    cache = Cache(run)
    discover(run, cache)
    cache.save()
    added = set(run.rglob("*")) - before
    assert {path.name for path in added} == {".rlfe", "hashes.json"}
    assert os.access(run / ".rlfe" / "hashes.json", os.R_OK)
    assert make_checkpoint(run / "global_step_90").is_dir()
