"""Hostile programs in the jail: none accepted, nothing left behind, no neighbour disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlfe.sandbox import bubblewrap
from rlfe.sandbox.encoding import encode
from rlfe.sandbox.inside import kernel
from rlfe.sandbox.parts import Case, Part
from rlfe.sandbox.pool import Judge
from rlfe.types import Status
from tests import hostile

RIGHT = "def add(a, b):\n    return a + b\n"
WANTED = [encode(5), encode(10), encode(0.5)]
NOBODY = 65534


def part(cpu_seconds: float = hostile.SHORT_CPU) -> Part:
    return Part(
        name="asserts",
        mode="expressions",
        inputs=("add(2, 3)", "add(4, 6)", "add(0.25, 0.25)"),
        check=lambda i, data: data == WANTED[i],
        cpu_seconds=cpu_seconds,
        call_seconds=cpu_seconds,
        memory_bytes=256 << 20,
    )


def cases(programs: dict[str, str]) -> Iterator[Case]:
    """Every hostile program with a right neighbour behind it."""
    for name, program in programs.items():
        yield Case(key=name, program=program, parts=(part(),))
        yield Case(key=("neighbour", name), program=RIGHT, parts=(part(2.0),))


def processes() -> set[int]:
    """Processes of this user that descend from this one, or were left without a parent."""
    mine, found = os.getpid(), set()
    for name in os.listdir("/proc"):
        try:
            status = Path(f"/proc/{name}/stat").read_text() if name.isdigit() else ""
        except OSError:
            continue
        if status and int(status.rpartition(")")[2].split()[1]) == mine:
            found.add(int(name))
    return found


def attack(jail: str, programs: dict[str, str]) -> dict[Any, str]:
    with Judge(workers=2, jail=jail) as judge:
        return {
            case.key: f"{outcome.status} {outcome.detail}"
            for case, outcome in judge.run(cases(programs))
        }


def check_all(jail: str) -> None:
    """The whole suite in one tier; used by the tests and by the run as an ordinary user."""
    before = processes()
    for programs, may_pass in ((hostile.REFUSED, False), (hostile.CONTAINED, True)):
        ends = attack(jail, programs)
        disturbed = {key: end for key, end in ends.items() if type(key) is tuple}
        assert set(disturbed.values()) == {"passed "}, disturbed
        accepted = [name for name in programs if ends[name].startswith("passed")]
        assert may_pass or not accepted, accepted
        broken = {n: e for n, e in ends.items() if e.startswith(str(Status.INFRASTRUCTURE))}
        assert not broken
    time.sleep(0.2)
    assert processes() <= before
    left = [p for p in ("/", "/usr", "/etc", "/home", "/var/tmp", "/dev/shm")
            if Path(p, "rlfe-left-over").exists()]  # fmt: skip
    assert left == []


def possible(jail: str) -> bool:
    if jail == "bubblewrap" and not bubblewrap.find():
        return False
    try:
        with Judge(workers=1, jail=jail):
            return True
    except Exception:
        return False


@pytest.mark.parametrize("jail", ["namespaces", pytest.param("filters", marks=pytest.mark.slow)])
def test_no_hostile_program_is_accepted_or_leaves_anything_behind(jail: str) -> None:
    if not possible(jail):
        pytest.skip(f"the tier {jail} is not possible on this system")
    check_all(jail)


def test_without_isolation_no_hostile_program_is_accepted_either() -> None:
    ends = attack("limits", hostile.REFUSED)
    assert [name for name in hostile.REFUSED if ends[name].startswith("passed")] == []


def open_the_way(project: str) -> None:
    """As root: let an ordinary user reach interpreter and project, in a mount namespace of our own.

    A folder on the way that is closed to others (such as /root) is covered by an empty one, and
    what is needed is shown in it again at its old path.
    """
    needed = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, project)}
    closed = [
        str(folder)
        for path in needed
        for folder in reversed(Path(path).parents)
        if not folder.stat().st_mode & 0o001
    ]
    if not closed:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    aside = {path: tempfile.mkdtemp() for path in needed if path.startswith(tuple(closed))}
    for path, kept in aside.items():
        kernel.mount(path, kept, "", kernel.MS_BIND | kernel.MS_REC)
    for folder in closed:
        if os.path.isdir(folder) and not os.stat(folder).st_mode & 0o001:
            kernel.mount("tmpfs", folder, "tmpfs", 0, "mode=0755,size=1m")
    for path, kept in aside.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount(kept, path, "", kernel.MS_BIND | kernel.MS_REC)
        kernel.unmount(kept)
        os.rmdir(kept)


AS_NOBODY = f"""
from tests.test_hostile import open_the_way
open_the_way(sys.argv[1])
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""
AS_MAPPED = """
from rlfe.sandbox.inside import kernel
kernel.unshare(kernel.CLONE_NEWUSER)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("1000 0 1")
open("/proc/self/gid_map", "w").write("1000 0 1")
"""
BECOME = """
import os, sys
sys.path.insert(0, sys.argv[1])
if len(sys.argv) == 3:
    {become}
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], *sys.argv[1:], "again"])
from tests import test_hostile as suite
assert os.geteuid() != 0
print("possible", suite.possible({jail!r}))
if suite.possible({jail!r}):
    suite.check_all({jail!r})
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("jail", "become"),
    [
        pytest.param("filters", AS_MAPPED, id="filters-mapped"),
        pytest.param("namespaces", AS_MAPPED, id="namespaces-mapped", marks=pytest.mark.slow),
        pytest.param("filters", AS_NOBODY, id="filters-nobody", marks=pytest.mark.slow),
        pytest.param("namespaces", AS_NOBODY, id="namespaces-nobody", marks=pytest.mark.slow),
    ],
)
def test_the_suite_holds_for_an_ordinary_user_too(jail: str, become: str) -> None:
    """uid 65534, or root mapped to an ordinary uid without capabilities."""
    root = str(Path(__file__).resolve().parent.parent)
    program = BECOME.format(become=become.strip().replace("\n", "\n    "), jail=jail)
    ended = subprocess.run(
        [sys.executable, "-c", program, root, program],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    if "possible False" in ended.stdout:
        pytest.skip("that user cannot start such a jail here")
    if "open_the_way" in ended.stderr:
        pytest.skip("this root may not mount, and that user cannot read this interpreter")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "possible True" in ended.stdout


def test_isolation_can_be_required() -> None:
    from rlfe.errors import RequestError

    with (
        pytest.raises(RequestError, match="only limits"),
        Judge(workers=1, jail="limits", require_isolation=True),
    ):
        pass


def test_a_look_up_table_of_visible_asserts_passes_and_only_plus_tests_expose_it() -> None:
    from rlfe.tasks import get

    task: Any = get("mbpp_plus")
    problem = next(p for p in task.problems("test") if p.id == "mbpp_plus/3")
    table = (
        "def is_not_prime(n):\n    return {1: True, 2: False, 10: True, 35: True, 37: False}[n]\n"
    )
    with Judge(workers=1) as judge:
        ((_, verdict),) = task.judge_programs([("k", problem, table)], judge)
    assert verdict.facts["base"] == "passed"
    assert verdict.facts["plus"] == "failed"
    assert json.dumps(dict(verdict.facts))
