"""The pool: verdicts, limits, and that nothing is lost when workers die."""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlfe.sandbox.encoding import encode
from rlfe.sandbox.inside import harness, server
from rlfe.sandbox.parts import Case, Outcome, Part, value_record
from rlfe.sandbox.pool import Judge
from rlfe.types import Status

RIGHT = "def add(a, b):\n    return a + b\n"
SLOW = "import time\ndef add(a, b):\n    time.sleep(0.05)\n    return a + b\n"
WANTED = [encode(5), encode(10)]


def part(**changes: Any) -> Part:
    settings: dict[str, Any] = {"cpu_seconds": 0.4, "call_seconds": 0.4, **changes}
    return Part(
        name="asserts",
        mode="expressions",
        inputs=("add(2, 3)", "add(4, 6)"),
        check=lambda i, data: data == WANTED[i],
        **settings,
    )


def one(judge: Judge, program: str, **changes: Any) -> Outcome:
    ((_, outcome),) = judge.run([Case(key=0, program=program, parts=(part(**changes),))])
    return outcome


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(workers=2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        (RIGHT, Status.PASSED, ""),
        ("def add(a, b):\n    return a - b\n", Status.FAILED, "input 0: wrong value"),
        ("def add(a, b):\n    return 5\n", Status.FAILED, "input 1: wrong value"),
        ("def add(a, b):\n    return 1 / 0\n", Status.FAILED, "input 0: raised ZeroDivisionError"),
        ("x = 1 / 0\n", Status.FAILED, "load: raised ZeroDivisionError"),
        ("def add(a, b)\n", Status.SYNTAX_ERROR, "expected ':' (<program>, line 1)"),
        ("x = 1\n", Status.FAILED, "input 0: raised NameError"),
        ("import os\nos._exit(0)\n", Status.CRASHED, "load: ended early, exit status 0"),
        ("def add(a, b):\n    while True: pass\n", Status.TIMEOUT, "input 0: cpu limit"),
        ("def add(a, b):\n    return bytearray(9 << 30)\n", Status.CRASHED,
         "input 0: raised MemoryError"),
        ("import os\nwhile True: os.write(3, b'V\\0\\0\\0\\1N' * 5000)\n", Status.FAILED,
         "input 0: wrong value"),
    ],
)  # fmt: skip
def test_each_end_has_its_status(judge: Judge, program: str, status: Status, detail: str) -> None:
    outcome = one(judge, program)
    assert (outcome.status, outcome.detail) == (status, detail)


def test_a_sleeper_is_caught_by_the_wall_clock(judge: Judge) -> None:
    started = time.monotonic()
    outcome = one(judge, "import time\ntime.sleep(60)\n", cpu_seconds=0.1)
    assert outcome.status is Status.TIMEOUT
    assert 2.0 < time.monotonic() - started < 6.0


def test_a_right_program_that_starts_a_thread_passes(judge: Judge) -> None:
    program = (
        "import threading\ndef add(a, b):\n    found = []\n"
        "    thread = threading.Thread(target=lambda: found.append(a + b))\n"
        "    thread.start()\n    thread.join()\n    return found[0]\n"
    )
    assert one(judge, program).status is Status.PASSED


def test_the_program_sees_no_files_of_ours_and_no_environment(judge: Judge) -> None:
    if judge.tier["tier"] == "limits":
        pytest.skip("this system allows no isolation")
    here = str(Path(__file__).parent)
    for attempt in (
        f"import os; os.listdir({here!r})",
        "open('/etc/passwd').read()",
        "import rlfe",
        "import socket; socket.socket()",
        "import os; os.fork()",
    ):
        assert one(judge, f"{attempt}\n{RIGHT}").status is Status.FAILED, attempt
    assert one(judge, f"import os\nassert 'HOME' not in os.environ\n{RIGHT}").status == "passed"


def test_a_program_finds_an_empty_writable_folder_each_time(judge: Judge) -> None:
    program = "import os\nassert not os.listdir('.')\nopen('x', 'w').write('y')\n" + RIGHT
    assert [one(judge, program).status for _ in range(4)] == ["passed"] * 4


def test_plus_runs_only_after_base_passed_and_stops_at_the_first_wrong_value(judge: Judge) -> None:
    seen: list[int] = []

    def wrong(index: int, data: bytes) -> bool:
        seen.append(index)
        return False

    base, plus = part(), part(keep_going=False)
    checked = Part(name="plus", mode="expressions", inputs=plus.inputs * 9, check=wrong)
    ((_, outcome),) = judge.run([Case(key=0, program=RIGHT, parts=(base, checked))])
    assert [(p.name, str(p.status)) for p in outcome.parts] == [
        ("asserts", "passed"), ("plus", "failed"),
    ]  # fmt: skip
    assert seen == [0]
    ((_, skipped),) = judge.run([Case(key=0, program="x = 1\n", parts=(base, checked))])
    assert len(skipped.parts) == 1


def test_keep_going_counts_the_right_answers(judge: Judge) -> None:
    outcome = one(judge, "def add(a, b):\n    return 10\n", keep_going=True)
    assert (outcome.status, outcome.parts[0].right, outcome.parts[0].total) == ("failed", 1, 2)
    raising = "def add(a, b):\n    return {2: 1 / (a - 2) if a == 2 else 0, 4: 10}[a]\n"
    outcome = one(judge, raising, keep_going=True)
    assert (outcome.status, outcome.parts[0].right) == ("failed", 1)


def test_a_timeout_is_run_again_alone_and_both_times_are_kept(judge: Judge) -> None:
    loop = Case(key="loop", program="while True: pass\n", parts=(part(),), confirm=True)
    others = [Case(key=n, program=RIGHT, parts=(part(),)) for n in range(10)]
    ends = {case.key: outcome for case, outcome in judge.run([loop, *others])}
    assert {str(ends[n].status) for n in range(10)} == {"passed"}
    assert ends["loop"].status is Status.TIMEOUT
    result = ends["loop"].parts[0]
    assert result.first_cpu is not None
    assert 0.25 <= result.first_cpu < 1.0
    assert 0.4 <= result.cpu < 1.0


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_second_runs_have_no_first_run_beside_them(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    seen: list[tuple[bool, ...]] = []
    give = Judge._give

    def watched(self: Judge, worker: Any, ticket: Any, selector: Any) -> None:
        give(self, worker, ticket, selector)
        running = [w.run for w in self._workers if w.run is not None]
        seen.append(tuple(run.first_cpu is not None for run in running))

    with Judge(workers=2) as pool:
        monkeypatch.setattr(Judge, "_give", watched)
        pool._reruns = at_a_time
        loop = part(cpu_seconds=0.3, call_seconds=0.3, screen_seconds=0.05)
        texts = [f"while True: pass\n# {n}\n" for n in range(4)] + [RIGHT]
        cases = [Case(key=n, program=t, parts=(loop,), confirm=True) for n, t in enumerate(texts)]
        ends = {case.key: str(outcome.status) for case, outcome in pool.run(cases)}
    assert ends == {**dict.fromkeys(range(4), "timeout"), 4: "passed"}
    assert all(len(set(kinds)) == 1 for kinds in seen)  # first runs only, or second runs only
    assert max(len(kinds) for kinds in seen if kinds[0]) == min(at_a_time, pool.size)


def watched(cpu: float, total: float, sent: bytes) -> int:
    """Why the fork server stops a child that has used `cpu` seconds on a call of 0.5."""
    (requests, asking), (pipe, writer) = os.pipe(), os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    os.write(writer, sent)
    if sent:
        os.close(writer)
    child: Any = SimpleNamespace(pipe=pipe, cpu=lambda: cpu, started=time.monotonic())
    limits: dict[str, Any] = {
        "cpu_seconds": total, "wall_seconds": 60.0, "call_seconds": 0.5, "load_seconds": 0.5,
        "slow_calls": {},
    }  # fmt: skip
    jail: Any = SimpleNamespace(overfull=lambda: False)
    try:
        return server.Server(requests, null, jail)._watch(1, child, [limits])
    finally:
        for file in (requests, asking, pipe, null, *(() if sent else (writer,))):
            os.close(file)


def test_an_answer_that_waits_in_the_pipe_ends_its_call_in_time() -> None:
    assert watched(0.4, 9.0, b"answer") == server.EXITED
    assert watched(0.6, 9.0, b"answer") == server.EXITED  # the server looked late
    assert watched(0.6, 9.0, b"") == server.CPU
    assert watched(9.1, 9.0, b"answer") == server.CPU  # the time of all calls is up


def test_while_a_program_loads_the_server_looks_before_its_first_call_is_long_over() -> None:
    child: Any = SimpleNamespace(cpu=lambda: 0.0, started=time.monotonic())
    limits: dict[str, Any] = {
        "cpu_seconds": 9.0, "wall_seconds": 29.0, "call_seconds": 0.02, "load_seconds": 0.25,
        "slow_calls": {1: 4.0},
    }  # fmt: skip
    clock = server.Clock(child, [limits])
    assert clock.check(0, harness.LOADING) == (None, 0.02)
    assert clock.check(0, 0) == (None, 0.02)


def test_what_the_server_rehearses_before_its_first_fork_goes_well() -> None:
    reader, writer = os.pipe()
    harness.rehearse(writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        data, tags = pipe.read(), Counter[str]()
    while data:
        tags[chr(data[0])] += 1
        data = data[5 + int.from_bytes(data[1:5], "big") :]
    assert set(tags) == {"L", "V", "E"}
    assert tags["L"] == tags["E"] == 8  # two parts, four times
    assert tags["V"] > 100


def test_answers_that_are_known_to_be_right_need_no_check(judge: Judge) -> None:
    checked: list[int] = []

    def check(index: int, data: bytes) -> bool:
        checked.append(index)
        return False

    known = Part(
        name="asserts", mode="expressions", inputs=("add(2, 3)", "add(4, 6)", "add(1, 1)"),
        check=check, right_records=(value_record(WANTED[0]), b"", value_record(encode(2))),
    )  # fmt: skip
    ((_, outcome),) = judge.run([Case(key=0, program=RIGHT, parts=(known,))])
    assert checked == [1]  # the one without a record
    assert (outcome.parts[0].right, outcome.detail) == (1, "input 1: wrong value")
    every = replace(known, right_records=tuple(map(value_record, (*WANTED, encode(2)))))
    ((_, outcome),) = judge.run([Case(key=0, program=RIGHT, parts=(every,))])
    assert (outcome.status, outcome.parts[0].right) == (Status.PASSED, 3)
    forged = f"import os\nos.write(3, {every.right_records[0] * 4!r})\n" + RIGHT
    ((_, outcome),) = judge.run([Case(key=0, program=forged, parts=(every,))])
    assert outcome.status is Status.FAILED
    assert checked[0] == 1


def test_judging_starts_when_it_is_asked_not_when_it_is_read(judge: Judge) -> None:
    done = threading.Event()
    judge.submit(Case(key=0, program=RIGHT, parts=(part(),)), lambda case, outcome: done.set())
    assert done.wait(10)


def test_dead_workers_lose_no_sample() -> None:
    """Workers are killed again and again; every case has its verdict all the same."""
    with Judge(workers=2) as pool:
        results = pool.run([Case(key=n, program=SLOW, parts=(part(),)) for n in range(30)])
        stop = threading.Event()

        def kill() -> None:
            for _ in range(4):
                stop.wait(0.3)
                with contextlib.suppress(ProcessLookupError):  # it is being replaced
                    os.kill(pool._workers[0]._process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        ends = {case.key: str(outcome.status) for case, outcome in results}
        stop.set()
        killer.join()
    assert ends == dict.fromkeys(range(30), "passed")


def test_killing_the_whole_pool_in_the_middle_loses_no_sample() -> None:
    with Judge(workers=2) as pool:
        results = pool.run([Case(key=n, program=SLOW, parts=(part(),)) for n in range(12)])
        time.sleep(0.2)
        for worker in list(pool._workers):
            os.kill(worker._process.pid, signal.SIGKILL)
        ends = [str(outcome.status) for _, outcome in results]
    assert ends == ["passed"] * 12


def test_a_worker_that_stops_answering_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlfe.sandbox.pool.GRACE_SECONDS", 0.5)
    with Judge(workers=1) as pool:
        results = pool.run([Case(key=0, program=SLOW, parts=(part(cpu_seconds=0.1),))])
        os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
        assert [str(outcome.status) for _, outcome in results] == ["passed"]


def test_a_worker_lost_three_times_is_infrastructure_and_never_a_wrong_answer() -> None:
    with Judge(workers=1) as pool:
        done = threading.Event()

        def kill() -> None:
            while not done.wait(0.05):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pool._workers[0]._process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        slow = "import time\ntime.sleep(1)\n" + RIGHT
        outcome = one(pool, slow)
        done.set()
        killer.join()
    assert outcome.status is Status.INFRASTRUCTURE
    assert "lost 3 times" in outcome.detail


def test_nothing_is_left_when_the_pool_ends() -> None:
    before = set(os.listdir(f"/proc/{os.getpid()}/fd"))
    with Judge(workers=2) as pool:
        scratch = [worker.scratch.name for worker in pool._workers]
        assert one(pool, RIGHT).status is Status.PASSED
        pids = [worker._process.pid for worker in pool._workers]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(name).exists() for name in scratch)
    assert set(os.listdir(f"/proc/{os.getpid()}/fd")) <= before


def test_programs_with_numpy_run_where_it_is_installed(judge: Judge) -> None:
    program = "import numpy as np\ndef add(a, b):\n    return int(np.add(a, b))\n"
    assert one(judge, program, cpu_seconds=5.0, call_seconds=5.0).status is Status.PASSED


def test_work_that_a_closed_pool_did_not_finish_is_given_up_and_nobody_waits() -> None:
    with Judge(workers=1) as pool:
        results = pool.run([Case(key=n, program=SLOW, parts=(part(),)) for n in range(20)])
        next(results)
    ends = [str(outcome.status) for _, outcome in results]
    assert len(ends) == 19
    assert ends.count("infrastructure") >= 15


ORPHANED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from rlfe.sandbox.pool import Judge
from tests.test_sandbox_pool import Case, part
with Judge(workers=1, jail=sys.argv[2]) as pool:
    sleeper = "import time\\ntime.sleep(60)\\n"
    pool.submit(Case(key=0, program=sleeper, parts=(part(cpu_seconds=30.0),)), print)
    time.sleep(0.5)
    print(pool._workers[0]._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("jail", ["auto", "filters", "limits"])
def test_a_killed_trainer_leaves_no_worker_and_no_program(jail: str) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    ended = subprocess.run(
        [sys.executable, "-c", ORPHANED, root, jail], capture_output=True, text=True, check=False
    )
    if not ended.stdout:
        pytest.skip(f"the tier {jail} is not possible on this system")
    worker = int(ended.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    time.sleep(0.2)
    assert _sessions_of(worker) == []


def _sessions_of(worker: int) -> list[str]:
    """Processes whose parent was the worker: its child would now belong to init."""
    left = []
    for name in os.listdir("/proc"):
        try:
            line = Path(f"/proc/{name}/cmdline").read_text() if name.isdigit() else ""
        except OSError:
            continue
        if (
            "rlfe.sandbox.inside" in line
            and Path(f"/proc/{name}/stat").read_text().split()[3] == "1"
        ):
            left.append(name)
    return left


def test_more_inputs_than_a_worker_keeps_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlfe.sandbox.worker.CACHED_KEYS", 3)
    call = marshal.dumps((2, 3), 2)

    def asked(name: str) -> Part:
        return Part(
            name=name, mode="calls", entry="add", inputs=(call,), inputs_key=name,
            check=lambda i, data: data == encode(5),
        )  # fmt: skip

    cases = [
        Case(
            key=n,
            program=RIGHT,
            parts=(asked(f"{n % 5}/base"), asked(f"{n % 5}/plus")),
            shared=True,
        )
        for n in range(20)
    ]
    with Judge(workers=1) as pool:
        first = pool._workers[0]
        assert {str(outcome.status) for _, outcome in pool.run(cases)} == {"passed"}
        assert pool._workers[0] is first  # the worker was never lost on the way
