"""The jail itself: which tier is in force, what it refuses, what it hides, what it cleans up."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlfe.sandbox
from rlfe.sandbox import bubblewrap
from rlfe.sandbox.inside import kernel, leftovers, lockdown, places, seccomp

LINUX = pytest.mark.skipif(not kernel.SUPPORTED, reason="needs Linux on x86_64 or aarch64")


def in_process(program: str, tmp_path: Path) -> Any:
    """Run a program in its own process, because a jail cannot be left; its last line as JSON."""
    head = "import json, os, sys\nsys.path.insert(0, sys.argv[1])\nfolder = sys.argv[2]\n"
    root = str(Path(__file__).resolve().parent.parent)
    ended = subprocess.run(
        [sys.executable, "-c", head + program, root, str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_tier_in_force_is_found_by_trying() -> None:
    found = rlfe.sandbox.tier()
    assert set(found["tried"]) == {
        "endless loop", "memory bomb", "file write", "file read", "socket", "fork flood",
    }  # fmt: skip
    assert found["tried"]["endless loop"] == found["tried"]["memory bomb"] == "stopped"
    if found["tier"] != "limits":
        assert set(found["tried"].values()) == {"stopped"}
        assert found["seccomp"]


@LINUX
def test_the_filter_is_a_valid_program_for_this_machine() -> None:
    code = seccomp.program(77)
    assert len(code) % 8 == 0
    assert 100 < len(code) // 8 < 4096
    for place in range(0, len(code) - 8, 8):
        _, yes, no, _ = struct.unpack_from("<HBBI", code, place)
        assert place // 8 + 1 + max(yes, no) < len(code) // 8


@LINUX
def test_the_filter_differs_between_processes_by_their_id_only() -> None:
    first, second = (struct.unpack(f"<{len(c) // 4}I", c) for c in map(seccomp.program, (77, 78)))
    differing = {pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]}
    assert differing == {(77, 78)}
    assert seccomp._ANY_PID not in first


def test_children_with_the_same_limits_and_descriptors_share_what_was_prepared() -> None:
    jail = lockdown.Jail("limits", "/scratch")
    job = {"memory_bytes": 1 << 30, "cpu_seconds": 2.5}
    first = jail.steps(job, 7, ())
    assert jail.steps({**job, "cpu_seconds": 2.9}, 7, ()) is first  # whole seconds
    others = (
        jail.steps({**job, "cpu_seconds": 3.0}, 7, ()),
        jail.steps({**job, "memory_bytes": 2 << 30}, 7, ()),
        jail.steps(job, 8, ()),
        jail.steps(job, 7, (5, 6)),
    )
    assert len({first, *others}) == 5


@LINUX
def test_the_two_filters_of_a_child_refuse_what_the_whole_one_does() -> None:
    def tested(code: bytes) -> set[int]:
        rows = struct.iter_unpack("<HBBI", code)
        return {value for kind, _, _, value in rows if kind == seccomp._JEQ}

    server, child = seccomp.server_program(), seccomp._child_program()
    assert tested(server) | tested(child) == tested(seccomp.program(seccomp._ANY_PID))
    assert len(child) < len(server)


@LINUX
def test_a_tier_that_is_not_possible_says_why_and_the_next_is_taken(tmp_path: Path) -> None:
    program = """
from rlfe.sandbox.inside import lockdown, namespaces
def refuse(root, packages):
    raise PermissionError(1, "Operation not permitted")
namespaces.enter = refuse
jail = lockdown.enter({"jail": "auto", "scratch": folder, "packages": {}})
print(json.dumps([jail.tier, jail.facts()["refused"]]))
"""
    tier, refused = in_process(program, tmp_path)
    assert tier in ("filters", "limits")
    assert refused["namespaces"] == "[Errno 1] Operation not permitted"


@LINUX
@pytest.mark.parametrize("in_two_steps", [False, True])
def test_the_filter_refuses_processes_sockets_and_foreign_signals(
    tmp_path: Path, in_two_steps: bool
) -> None:
    """At once, or as in the pool: what the server does without, then the rest in its child."""
    install = """
seccomp.install(seccomp.program(os.getpid()))
"""
    if in_two_steps:
        install = """
seccomp.install(seccomp.server_program())
lockdown.take(seccomp.install_steps(None))
"""
    program = f"""
import socket, threading
from rlfe.sandbox.inside import kernel, lockdown, seccomp
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
{install}"""
    program += """
tries = {
    "fork": os.fork, "socket": socket.socket, "kill": lambda: os.kill(os.getppid(), 0),
    "exec": lambda: os.execv("/bin/true", ["true"]), "own": lambda: os.kill(os.getpid(), 0),
    "thread": lambda: threading.Thread(target=str).start(), "pair": socket.socketpair,
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 5),
    "user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "memory": lambda: os.memfd_create("x"),
    "mount": lambda: kernel.mount("none", folder, "tmpfs", 0),
}
ends = {}
for name, attempt in tries.items():
    try:
        attempt()
        ends[name] = True
    except OSError:
        ends[name] = False
print(json.dumps(ends))
"""
    assert in_process(program, tmp_path) == {
        "fork": False, "socket": False, "kill": False, "exec": False, "own": True,
        "thread": True, "pair": True, "nice": False, "user": False, "memory": False,
        "mount": False,
    }  # fmt: skip


@LINUX
def test_without_a_filter_orphans_are_found_and_ended(tmp_path: Path) -> None:
    program = """
import time
from rlfe.sandbox.inside import lockdown
def missing():
    raise OSError("no filter")
lockdown._filter_this_process = missing
jail = lockdown.enter({"jail": "limits", "scratch": folder, "packages": {}})
pid = jail.fork()
if pid == 0:
    os.setsid()
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
    os._exit(0)
time.sleep(0.3)
jail.kill(pid)
os.wait4(pid, 0)
def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()
before = len(children())
jail.after_child()
print(json.dumps([jail.facts()["seccomp"], before, len(children())]))
"""
    has_filter, before, after = in_process(program, tmp_path)
    assert (has_filter, after) == (False, 0)
    assert before >= 4


def test_package_folders_are_hidden_and_libraries_shown() -> None:
    hidden = places.hidden_folders()
    assert all(path.endswith(("site-packages", "dist-packages")) for path in hidden)
    readable = places.readable_entries()
    assert not any(path.endswith(("site-packages", "dist-packages")) for path in readable)
    assert f"{places.STDLIB}/json" in readable
    data = str(Path(rlfe.sandbox.__file__).parent.parent / "data")
    inside = [p for p in readable if p != "/" and data.startswith(p.rstrip("/") + "/")]
    assert inside == []


def test_emptying_a_folder_takes_any_depth_links_and_locked_folders(tmp_path: Path) -> None:
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    scratch.mkdir()
    outside.write_text("stays")
    here = os.getcwd()
    try:
        os.chdir(scratch)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
            Path("f").write_text("x")
    finally:
        os.chdir(here)
    (scratch / "link").symlink_to(outside)
    (scratch / "folder").symlink_to(tmp_path)
    (scratch / "locked").mkdir()
    (scratch / "locked" / "file").write_text("x")
    (scratch / "locked").chmod(0)
    leftovers.empty(str(scratch))
    assert os.listdir(scratch) == []
    assert outside.read_text() == "stays"


def test_the_command_line_of_bubblewrap_shares_nothing() -> None:
    line = bubblewrap.command("/usr/bin/bwrap", {})
    for word in ("--unshare-all", "--die-with-parent", "--new-session", "--clearenv"):
        assert word in line
    assert line[line.index("--cap-drop") + 1] == "ALL"
    shown = [line[i + 1] for i, word in enumerate(line) if word == "--ro-bind"]
    data = str(Path(rlfe.sandbox.__file__).parent.parent / "data")
    assert not any(data.startswith(path.rstrip("/") + "/") or path == data for path in shown)
