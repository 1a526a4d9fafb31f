"""`rlfe push`, `pull` and `card` with the real client against a Hub on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.hub_driver import Driver
from tests.hub_runs import make_checkpoint, make_run
from tests.hub_stand_in import Hub, serve

TOKEN = "hf_" + "abcdefghij" * 3


@pytest.fixture(scope="module", params=["lfs", "xet"])
def world(request, tmp_path_factory):
    """(hub, client process), once for LFS and once for xet."""
    root = tmp_path_factory.mktemp(f"world_{request.param}")
    hub = serve(root / "hub", orgs=("my-org",), page_size=7)
    environment = hub.environment(xet=request.param == "xet")
    driver = Driver({**environment, "XDG_CACHE_HOME": str(root / "cache")}, root)
    yield hub, driver
    driver.close()
    hub.close()


@pytest.fixture(scope="module")
def lfs(tmp_path_factory):
    """The same over LFS only: for what does not depend on the way of the bytes."""
    root = tmp_path_factory.mktemp("lfs")
    hub = serve(root / "hub", orgs=("my-org",), page_size=7)
    driver = Driver({**hub.environment(xet=False), "XDG_CACHE_HOME": str(root / "cache")}, root)
    yield hub, driver
    driver.close()
    hub.close()


@pytest.fixture
def repo(request):
    """A repository name of this test's own."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[-60:].strip("-")
    return f"my-org/{name}"


def titles(hub: Hub, repo: str) -> list[str]:
    """Commit titles, oldest first, without the Hub's own first one."""
    return [commit.title for commit in hub.repos[repo].commits.values()][1:]


def commits(hub: Hub) -> int:
    return len(hub.requests("POST", r"/commit/"))


def test_two_runs_go_up_as_one_commit_a_checkpoint_and_one_for_the_card(world, tmp_path, repo):
    hub, driver = world
    one = make_run(tmp_path, steps=(100, 30, 60))
    two = make_run(tmp_path, lr=6e-6, replay=True, shards=2)
    done = driver.rlfe("push", one, two, "--repo", repo, "--no-verify", "--yes")
    assert done.code == 0, done.err
    assert [re.sub(r" \(sha256:[0-9a-f]{8}\)", "", title) for title in titles(hub, repo)] == [
        f"{one.name}: global_step_30",
        f"{one.name}: global_step_60",
        f"{one.name}: global_step_100",
        f"{two.name}: global_step_30",
        f"{two.name}: global_step_60",
        "Update README.md, manifest.json",
    ]
    tree = hub.tree(repo)
    for path in two.glob("global_step_*/*"):
        assert tree[f"{two.name}/{path.relative_to(two).as_posix()}"].size == path.stat().st_size
    assert f"{one.name}/rollouts/steps_000001-000100.jsonl.zst" in tree
    assert f"{one.name}/logs/train.log" in tree
    assert hub.repos[repo].private


def test_an_unchanged_push_makes_no_commit(world, tmp_path, repo):
    hub, driver = world
    run = make_run(tmp_path)
    assert driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes").code == 0
    before, head = commits(hub), hub.repos[repo].branches["main"]
    done = driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes")
    assert done.code == 0, done.err
    assert commits(hub) == before
    assert hub.repos[repo].branches["main"] == head


def test_only_a_changed_file_is_sent_again(world, tmp_path, repo):
    _hub, driver = world
    run = make_run(tmp_path)
    assert driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes").code == 0
    make_checkpoint(run / "global_step_30", seed=7)
    done = driver.rlfe("push", run, "--repo", repo, "--no-verify", "--json", "--yes")
    assert done.code == 0, done.err
    changed = [f for f in json.loads(done.out)["run"]["files"] if f["state"] == "changed"]
    assert [file["remote"] for file in changed] == [f"{run.name}/global_step_30/model.safetensors"]
    assert json.loads(done.out)["run"]["sent"][0]["files"] == 1


def test_a_dry_run_sends_nothing_and_prints_plan_card_and_command(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    for flags in ([], ["--dry-run", "--yes"]):
        done = driver.rlfe("push", run, "--repo", repo, *flags)
        assert done.code == 0
        assert "global_step_<N>/" in done.out
        assert f"rlfe push {run} --repo {repo} --yes" in done.err
    assert repo not in hub.repos


def test_what_lies_beside_the_runs_is_no_run(lfs, tmp_path, repo):
    runs = tmp_path / "runs"
    run = make_run(runs, steps=(30,))
    (runs / "_tables").mkdir()
    (runs / "_base" / "tiny").mkdir(parents=True)
    _, driver = lfs
    everything = [str(path) for path in sorted(runs.iterdir())]
    done = driver.rlfe("push", *everything, "--repo", repo, "--dry-run")
    assert done.code == 0, done.err
    assert run.name in done.out
    assert "_tables" not in done.out


def test_without_a_token_the_local_plan_is_shown_and_nothing_can_be_sent(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    before = len(hub.log)
    dry = driver.rlfe("push", run, "--repo", repo, HF_TOKEN="")
    assert dry.code == 0
    assert "remote state is unknown" in dry.err
    assert re.search(rf"{run.name} +30 +5 +0 +0 ", dry.out)
    real = driver.rlfe("push", run, "--repo", repo, "--yes", HF_TOKEN="")
    assert real.code == 4
    assert "hf auth login" in real.err
    assert len(hub.log) == before


@pytest.mark.parametrize(
    ("token", "code", "words"),
    [("hf_read_only", 4, "may read but not write"), ("hf_stranger", 4, "token is invalid")],
)
def test_a_token_without_the_right_is_refused_before_any_byte(lfs, tmp_path, token, code, words):
    hub, driver = lfs
    run = make_run(tmp_path)
    before = len(hub.requests("PUT", "/_lfs"))
    done = driver.rlfe("push", run, "--repo", "my-org/refused", "--yes", HF_TOKEN=token)
    assert done.code == code
    assert words in done.err
    assert token not in done.err + done.out
    assert len(hub.requests("PUT", "/_lfs")) == before


@pytest.mark.parametrize(
    "name", ["no-namespace", "a/b/c", "my-org/x.git", "my-org/a..b", "hf://a/b"]
)
def test_an_invalid_repository_name_is_refused_before_any_request(lfs, tmp_path, name):
    hub, driver = lfs
    run = make_run(tmp_path)
    before = len(hub.log)
    done = driver.rlfe("push", run, "--repo", name, "--yes")
    assert done.code == 2
    assert name in done.err
    assert len(hub.log) == before


def test_a_push_survives_a_failing_commit(world, tmp_path, repo):
    hub, driver = world
    run = make_run(tmp_path, steps=(30, 60, 90))
    before = commits(hub)
    hub.fail("POST", r"/commit/", 503, times=2)
    done = driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes")
    assert done.code == 0, done.err
    assert f"{run.name}/global_step_30/config.json" in hub.tree(repo)
    assert commits(hub) == before + 2 + 3  # two failures, three checkpoints


def test_a_rate_limit_is_waited_for_as_told(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    hub.fail("POST", r"/commit/", 429, headers={"RateLimit": '"api";r=0;t=1'})
    done = driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes")
    assert done.code == 0, done.err
    assert "trying again in 1 s" in done.err


def test_five_server_errors_in_a_row_end_with_exit_7_and_the_same_command_goes_on(
    lfs, tmp_path, repo
):
    hub, driver = lfs
    run = make_run(tmp_path)
    hub.fail("POST", rf"{repo}/commit/", 500, times=5)
    done = driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes")
    assert done.code == 7
    assert "500" in done.err
    assert "0 B of " in done.err
    assert f"To go on: rlfe push {run} --repo {repo} --no-card --no-verify --yes" in done.err
    assert driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes").code == 0
    assert len(titles(hub, repo)) == 2


COMMITS = "You have exceeded the rate limit for repository commits (128 per hour)."
STORAGE = "Private repository storage limit reached, please upgrade your plan."


@pytest.mark.parametrize(
    ("status", "pattern", "text", "words"),
    [
        (429, "/commit/", COMMITS, "error: the limit of 128 commits an hour is reached"),
        (403, "/commit/", STORAGE, f"error: storage quota: {STORAGE}"),
        (403, ".git/info/lfs/objects/batch", STORAGE, f"error: storage quota: {STORAGE}"),
    ],
    ids=["commits", "storage-commit", "storage-lfs"],
)
def test_a_quota_is_exit_6_and_says_what_is_there_and_what_is_left(
    lfs, tmp_path, repo, status, pattern, text, words
):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30, 60))
    hub.fail("POST", rf"{repo}\S*{re.escape(pattern)}", status, message=text, after=1, times=99)
    push = ("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes")
    done = driver.rlfe(*push)
    hub.faults.clear()
    assert done.code == 6, done.err
    assert words in done.err
    found = re.search(
        r"(\S+ k?B) of (\S+ k?B) are there, (\S+ k?B) are left; nothing is half", done.err
    )
    assert found is not None, done.err
    there, total, left = (_bytes(text) for text in found.groups())
    assert there > 500
    assert there + left == pytest.approx(total, abs=11)
    assert f"To go on: rlfe push {run} --repo {repo}" in done.err
    assert ("--wait" in done.err) == (status == 429)
    assert len(titles(hub, repo)) == 1
    assert f"{run.name}/global_step_30/model.safetensors" in hub.tree(repo)
    assert driver.rlfe(*push).code == 0
    assert len(titles(hub, repo)) == 2


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1000}[unit]


def test_a_store_whose_token_never_comes_ends_with_exit_7_in_bounded_time(tmp_path):
    run = make_run(tmp_path / "runs", steps=(30,))
    hub = serve(tmp_path / "hub")
    hub.fail("GET", "/xet-write-token/", 503, times=10**6)
    small = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms", "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2"}
    environment = {**os.environ, **hub.environment(xet=True), **small}
    push = [sys.executable, "-m", "rlfe", "push", run, "--repo", "my-org/x", "--no-card"]
    push += ["--no-verify", "--yes"]
    start = time.monotonic()
    done = subprocess.run(push, env=environment, capture_output=True, text=True)
    assert time.monotonic() - start < 45  # 7.5 s of waits of ours
    assert done.returncode == 7, done.stderr
    assert "503" in done.stderr
    assert "To go on: rlfe push" in done.stderr
    assert len(hub.requests("GET", "/xet-write-token/")) == 5 * 3
    hub.faults.clear()
    assert subprocess.run(push, env=environment, capture_output=True).returncode == 0
    assert f"{run.name}/global_step_30/model.safetensors" in hub.tree("my-org/x")
    hub.close()


def test_a_token_that_dies_in_the_middle_ends_with_exit_4_and_loses_nothing(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    hub.fail("POST", rf"{repo}/commit/", 401)
    done = driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes")
    assert done.code == 4
    assert driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes").code == 0
    assert f"{run.name}/global_step_60/model.safetensors" in hub.tree(repo)


def test_a_commit_by_somebody_else_is_merged_and_kept_parts_survive(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    assert driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes").code == 0
    text = hub.tree(repo)["README.md"].data.decode()
    by_hand = text.replace(
        "<!-- rlfe:keep:introduction -->\n", "<!-- rlfe:keep:introduction -->\nWritten by hand.\n"
    )
    put(hub, repo, "README.md", by_hand)
    make_checkpoint(run / "global_step_90", seed=3)
    hub.fail("POST", rf"{repo}/commit/", 412)
    done = driver.rlfe("push", run, "--repo", repo, "--card-only", "--no-verify", "--yes")
    assert done.code == 0, done.err
    merged = hub.tree(repo)["README.md"].data.decode()
    assert "Written by hand." in merged
    assert "30-90 step 30" in merged


def put(hub: Hub, repo: str, path: str, text: str) -> None:
    """Somebody else's commit."""
    from tests.hub_stand_in import regular_file

    old = hub.repos[repo].commit("main")
    tree = {**old.tree, path: regular_file(text.encode())}
    hub.repos[repo].branches["main"] = hub.repos[repo].add(tree, "by hand", old.oid).oid


def test_an_incomplete_checkpoint_stays_home_and_the_others_go_up(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    (run / "global_step_30" / "tokenizer_config.json").unlink()
    done = driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes")
    assert done.code == 3
    assert f"{run.name}/global_step_30 stays home: no tokenizer_config.json" in done.err
    assert not [path for path in hub.tree(repo) if "/global_step_30/" in path]
    assert f"{run.name}/global_step_60/config.json" in hub.tree(repo)
    assert "`tiny_mbpp_nobuf_lr1e6/global_step_30` is not here" in (
        hub.tree(repo)["README.md"].data.decode()
    )


def test_nothing_is_pushed_when_no_checkpoint_is_complete(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    (run / "global_step_30" / "config.json").unlink()
    done = driver.rlfe("push", run, "--repo", repo, "--yes")
    assert done.code == 3
    assert "nothing is pushed" in done.err
    assert repo not in hub.repos


def test_a_token_in_a_log_stops_the_push_and_is_not_printed(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    (run / "logs" / "train.log").write_text(f"start\nlogged in with {TOKEN}\n")
    done = driver.rlfe("push", run, "--repo", repo, "--yes")
    assert done.code == 2
    assert f"{run.name}/logs/train.log:2" in done.err
    assert TOKEN not in done.err + done.out
    assert repo not in hub.repos
    assert driver.rlfe("push", run, "--repo", repo, "--exclude", "logs").code == 0


def test_several_checkpoints_may_share_a_commit(world, tmp_path, repo):
    hub, driver = world
    run = make_run(tmp_path, steps=(30, 60, 90))
    arguments = ("push", run, "--repo", repo, "--checkpoints-per-commit", 2)
    done = driver.rlfe(*arguments, "--no-card", "--no-verify", "--yes")
    assert done.code == 0, done.err
    assert len(titles(hub, repo)) == 2
    assert len([p for p in hub.tree(repo) if p.endswith("model.safetensors")]) == 3


def test_chosen_steps_go_up_and_prune_removes_only_what_is_gone_here(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30, 60, 90))
    push = ("push", run, "--repo", repo, "--no-card", "--no-verify")
    assert driver.rlfe(*push, "--yes").code == 0
    put(hub, repo, f"{run.name}/global_step_10/old.json", "{}")
    put(hub, repo, "other/file.json", "{}")
    assert driver.rlfe(*push, "--steps", "30,last", "--yes").code == 0
    assert f"{run.name}/global_step_10/old.json" in hub.tree(repo)
    done = driver.rlfe(*push, "--steps", "30,last", "--prune", "--yes")
    assert done.code == 0, done.err
    tree = hub.tree(repo)
    assert f"{run.name}/global_step_10/old.json" not in tree
    assert f"{run.name}/global_step_60/config.json" in tree
    assert "other/file.json" in tree


def test_branch_tag_and_visibility_are_as_asked(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    push = ("push", run, "--repo", repo, "--no-verify", "--yes")
    done = driver.rlfe(*push, "--public", "--revision", "draft", "--tag", "v1")
    assert done.code == 0, done.err
    state = hub.repos[repo]
    assert not state.private
    assert f"{run.name}/global_step_30/config.json" in hub.tree(repo, "draft")
    assert f"{run.name}/global_step_30/config.json" not in hub.tree(repo, "main")
    assert state.tags["v1"] == state.branches["draft"]
    assert "exists and stays public" in driver.rlfe(*push, "--private").err


def test_journal_and_receipt_name_every_commit_and_no_token(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path)
    assert driver.rlfe("push", run, "--repo", repo, "--yes").code == 0
    lines = [json.loads(line) for line in (run / ".rlfe" / "push.jsonl").read_text().splitlines()]
    receipt = json.loads((run / ".rlfe" / "receipt.json").read_text())
    ids = [c.oid for c in hub.repos[repo].commits.values()][1:]
    assert [line["oid"] for line in lines] == ids[:2]
    assert [commit["oid"] for commit in receipt["commits"]] == ids
    assert receipt["verified"] is True
    assert receipt["head"] == ids[-1]
    assert "hf_test" not in json.dumps([lines, receipt])
    assert not [path for path in hub.tree(repo) if ".rlfe" in path]


def test_a_difference_after_the_upload_is_exit_3(lfs, tmp_path, repo):
    _hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    assert driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes").code == 0
    known = run / ".rlfe" / "hashes.json"
    text = json.loads(known.read_text())
    line = text["files"]["global_step_30/config.json"]
    line[3] = line[4] = "0" * 40  # a memory that lies: what was sent is not what is there
    known.write_text(json.dumps(text))
    done = driver.rlfe("push", run, "--repo", repo, "--no-card", "--yes")
    assert done.code == 3
    assert "global_step_30/config.json is not what was sent" in done.err


def test_a_gated_repository_is_told_apart_from_a_missing_one(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    assert driver.rlfe("push", run, "--repo", repo, "--public", "--no-verify", "--yes").code == 0
    hub.repos[repo].gated = True
    place = f"{repo}/{run.name}/global_step_30"
    gated = driver.rlfe("pull", place, HF_TOKEN="hf_read_only")
    assert gated.code == 4
    assert "gated" in gated.err
    missing = driver.rlfe("pull", "my-org/not-there/x/global_step_1")
    assert missing.code == 5
    assert "not found" in missing.err


def test_pull_prints_a_complete_folder_and_names_the_nearest_step(world, tmp_path, repo):
    _hub, driver = world
    run = make_run(tmp_path, shards=2)
    assert driver.rlfe("push", run, "--repo", repo, "--tag", "v1", "--yes").code == 0
    done = driver.rlfe("pull", f"hf://{repo}/{run.name}/global_step_60@v1")
    assert done.code == 0, done.err
    folder = Path(done.out.strip())
    for path in (run / "global_step_60").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    wrong = driver.rlfe("pull", f"{repo}/{run.name}/global_step_61")
    assert wrong.code == 5
    assert "global_step_60" in wrong.err
    revision = driver.rlfe("pull", f"{repo}/{run.name}/global_step_60", "--revision", "v2")
    assert revision.code == 5
    assert "v1" in revision.err


def test_pull_of_a_cell_brings_all_steps_in_order_and_its_records(lfs, tmp_path, repo):
    _hub, driver = lfs
    run = make_run(tmp_path / "runs", steps=(30, 100))
    assert driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes").code == 0
    place = tmp_path / "local"
    done = driver.rlfe("pull", f"{repo}/{run.name}", "--run", "--local-dir", place, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [row["subfolder"].rpartition("_")[2] for row in rows] == ["30", "100"]
    assert (place / run.name / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_the_card_in_the_repository_is_checked_for_staleness(lfs, tmp_path, repo):
    _hub, driver = lfs
    run = make_run(tmp_path)
    assert driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes").code == 0
    fresh = driver.rlfe("card", run, "--repo", repo, "--check")
    assert fresh.code == 0, fresh.err
    make_checkpoint(run / "global_step_90", seed=3)
    stale = driver.rlfe("card", run, "--repo", repo, "--check")
    assert stale.code == 3
    assert "30-90 step 30" in stale.err
    wrong = driver.rlfe("card", run, "--repo", repo, "--check", "--revision", "mian")
    assert wrong.code == 5
    assert "Branches and tags: main." in wrong.err


def test_the_license_comes_from_the_base_models_own_card(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, license=None)
    stopped = driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes")
    assert stopped.code == 2
    assert "--license" in stopped.err
    assert repo not in hub.repos
    stated = driver.rlfe("push", run, "--repo", repo, "--license", "mit")
    assert "license: mit\n" in stated.out
    from tests.hub_stand_in import Repo, regular_file

    base = hub.repos["tiny-org/tiny"] = Repo(repo_id="tiny-org/tiny")
    readme = regular_file(b"---\nlicense: other\nlicense_name: tiny-1\n---\n# Tiny\n")
    base.branches["main"] = base.add({"README.md": readme}, "first", "").oid
    done = driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes")
    del hub.repos["tiny-org/tiny"]
    assert done.code == 0, done.err
    card = hub.tree(repo)["README.md"].data.decode()
    assert "license: other\nlicense_name: tiny-1\n" in card


def test_a_folder_gets_the_same_tree_and_a_second_push_writes_nothing(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path / "runs", shards=2)
    out = tmp_path / "out"
    assert driver.rlfe("push", run, "--to-folder", out, "--license", "mit").code == 0
    assert not out.exists()
    done = driver.rlfe("push", run, "--to-folder", out, "--yes", HF_TOKEN="")
    assert done.code == 0, done.err
    assert driver.rlfe("push", run, "--repo", repo, "--no-verify", "--yes").code == 0
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == set(hub.tree(repo)) - {".gitattributes"}
    times = {path: path.stat().st_ino for path in out.rglob("*")}
    again = driver.rlfe("push", run, "--to-folder", out, "--yes")
    assert again.code == 0
    assert {path: path.stat().st_ino for path in out.rglob("*")} == times


@pytest.mark.parametrize(
    "arguments",
    [
        ["RUN"],
        ["RUN", "--repo", "my-org/x", "--to-folder", "out"],
        ["RUN", "--repo", "my-org/x", "--exclude", "state"],
        ["RUN", "--repo", "my-org/x", "--steps", "abc"],
        ["RUN", "--repo", "my-org/x", "--card-only", "--no-card"],
        ["RUN", "--repo", "my-org/x", "--license", "Apache 2.0"],
        ["RUN", "--repo", "my-org/x", "--license", "other"],
        ["nowhere", "--repo", "my-org/x"],
        ["RUN", "--to-folder", "RUN/out"],
    ],
    ids=" ".join,
)
def test_a_wrong_request_is_exit_2_with_a_hint(lfs, tmp_path, arguments):
    _, driver = lfs
    run = make_run(tmp_path)
    given = [text.replace("RUN", str(run)) for text in arguments]
    done = driver.rlfe("push", *given)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err


def test_offline_is_exit_7(tmp_path):
    run = make_run(tmp_path)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "hf_x",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "rlfe", "push", run, "--repo", "my-org/x", "--yes"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 7
    assert "HF_HUB_OFFLINE" in done.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connection_that_breaks_in_the_middle_of_a_commit_is_tried_again(
    lfs, tmp_path, repo, monkeypatch
):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    answer, breaks = hub.answer, [1]

    def broken(request):
        reply = answer(request)
        if breaks and request.path.endswith(f"{repo}/commit/main"):
            breaks.pop()
            raise SystemExit  # the commit has landed, the connection closes without an answer
        return reply

    monkeypatch.setattr(hub, "answer", broken)
    done = driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes")
    assert done.code == 0, done.err
    assert breaks == []
    assert len(titles(hub, repo)) == 1
    assert len((run / ".rlfe" / "push.jsonl").read_text().splitlines()) == 1


def test_a_push_needs_neither_torch_nor_transformers(lfs, tmp_path, repo):
    hub, _driver = lfs
    run = make_run(tmp_path, steps=(30,))
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'pandas'));"
        "from rlfe.cli.main import main; main(sys.argv[1:])"
    )
    for flags in (["--dry-run"], ["--yes"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "push", run, "--repo", repo, *flags],
            env={**os.environ, **hub.environment(xet=False)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert f"{run.name}/global_step_30/config.json" in hub.tree(repo)


def test_ctrl_c_names_the_command_to_go_on_with(lfs, tmp_path, repo, monkeypatch):
    hub, _ = lfs
    run = make_run(tmp_path, steps=(30,))
    answer, held = hub.answer, threading.Event()

    def slow(request):
        if request.path.endswith(f"{repo}/commit/main"):
            held.set()
            time.sleep(1.5)
        return answer(request)

    monkeypatch.setattr(hub, "answer", slow)
    push = [sys.executable, "-m", "rlfe", "push", run, "--repo", repo, "--no-card", "--yes"]
    process = subprocess.Popen(
        push, env={**os.environ, **hub.environment(xet=False)}, stderr=subprocess.PIPE, text=True
    )
    assert held.wait(30)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"To go on: rlfe push {run} --repo {repo} --no-card --yes" in words
    assert "Traceback" not in words


def test_a_token_in_a_hand_written_part_of_the_card_stops_the_push(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    push = ("push", run, "--repo", repo, "--no-verify")
    assert driver.rlfe(*push, "--yes").code == 0
    part = f"<!-- rlfe:keep:introduction -->\nkey {TOKEN}\n<!-- /rlfe:keep -->"
    put(hub, repo, "README.md", "---\nlicense: mit\n---\n<!-- rlfe:card -->\n" + part)
    done = driver.rlfe(*push)
    assert done.code == 2
    assert "README.md:" in done.err
    assert TOKEN not in done.err + done.out


def test_a_run_that_cannot_be_written_to_is_pushed_without_journal_and_receipt(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    (run / ".rlfe").write_text("no folder")
    done = driver.rlfe("push", run, "--repo", repo, "--no-card", "--no-verify", "--yes")
    assert done.code == 0, done.err
    assert "no journal is kept" in done.err
    assert "no receipt is kept" in done.err
    assert f"{run.name}/global_step_30/config.json" in hub.tree(repo)


def test_a_card_only_push_keeps_the_commits_in_the_card(lfs, tmp_path, repo):
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30,))
    push = ("push", run, "--repo", repo, "--no-verify", "--yes")
    assert driver.rlfe(*push).code == 0
    before = commits(hub)
    assert "Hub commits of" in hub.tree(repo)["README.md"].data.decode()
    done = driver.rlfe(*push, "--card-only")
    assert done.code == 0, done.err
    assert commits(hub) == before


def test_a_subfolder_that_does_not_load_is_exit_3_and_is_named(lfs, tmp_path, repo):
    pytest.importorskip("transformers")
    hub, driver = lfs
    run = make_run(tmp_path, steps=(30, 60))
    good = (run / "global_step_30" / "tokenizer.json").read_text()
    for step in (30, 60):
        (run / f"global_step_{step}" / "tokenizer.json").write_text("{}")
    push = ("push", run, "--repo", repo, "--no-card", "--tag", "v1", "--yes")
    for _ in range(2):  # a second try does not forget it
        done = driver.rlfe(*push)
        assert done.code == 3, done.err
        assert f"{run.name}/global_step_30 does not load" in done.err
        assert f"{run.name}/global_step_60 does not load" in done.err
        assert "not verified" in done.out
    receipt = json.loads((run / ".rlfe" / "receipt.json").read_text())
    assert receipt["verified"] is False
    assert len(receipt["unloadable"]) == 2
    assert hub.repos[repo].tags == {}
    assert driver.rlfe(*push[:-1], "--no-verify", "--yes").code == 0
    for step in (30, 60):
        (run / f"global_step_{step}" / "tokenizer.json").write_text(good)
    done = driver.rlfe(*push)
    assert done.code == 0, done.err
    assert json.loads((run / ".rlfe" / "receipt.json").read_text())["verified"] is True
