"""Ten thousand programs in a row, a twentieth of them hostile: nothing grows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlfe.sandbox.encoding import encode
from rlfe.sandbox.parts import Case, Part
from rlfe.sandbox.pool import Judge

COUNT = 10_000
BAD = (
    "while True:\n    pass\n",
    "import os\nos.abort()\n",
    "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))\n",
    "import os\nfor _ in range(50):\n    os.fork()\n",
    "open('x', 'wb').write(bytes(1 << 24))\nimport os\nos._exit(0)\n",
    "import ctypes\nctypes.string_at(0)\n",
    "import os\nwhile True:\n    os.write(3, b'V\\0\\0\\0\\1N')\n",
)
RIGHT = "def add(a, b):\n    return a + b\n"


def resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def processes() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc"))


def measured(judge: Judge) -> dict[str, int]:
    pids = [worker._process.pid for worker in judge._workers]
    return {
        "own_kib": resident_kib(os.getpid()),
        "workers_kib": sum(map(resident_kib, pids)),
        "own_descriptors": descriptors(os.getpid()),
        "worker_descriptors": sum(map(descriptors, pids)),
    }


def run(judge: Judge, first: int, count: int) -> dict[str, int]:
    part = Part(
        name="asserts",
        mode="expressions",
        inputs=("add(2, 3)",),
        check=lambda i, data: data == encode(5),
        cpu_seconds=0.2,
        call_seconds=0.2,
        memory_bytes=256 << 20,
    )
    cases = (
        Case(key=n, program=BAD[n // 20 % len(BAD)] if n % 20 == 0 else RIGHT, parts=(part,))
        for n in range(first, first + count)
    )
    ends: dict[str, int] = {}
    for case, outcome in judge.run(cases):
        assert (outcome.status == "passed") == (case.key % 20 != 0), (case.key, outcome)
        ends[str(outcome.status)] = ends.get(str(outcome.status), 0) + 1
    return ends


@pytest.mark.slow
def test_ten_thousand_programs_leave_memory_descriptors_and_processes_as_they_were() -> None:
    with Judge(workers=2) as judge:
        run(judge, 0, 1000)
        before, there = measured(judge), processes()
        pids = [worker._process.pid for worker in judge._workers]
        ends = {}
        for part in range(10):
            ends = run(judge, 1000 + part * (COUNT // 10), COUNT // 10)
        after, left = measured(judge), processes()
        assert [worker._process.pid for worker in judge._workers] == pids  # none was replaced
    print(f"{before=} {after=} processes {there} -> {left}, last thousand {ends}")
    assert after["own_kib"] - before["own_kib"] < 20_000
    assert after["workers_kib"] - before["workers_kib"] < 8_000
    assert after["own_descriptors"] == before["own_descriptors"]
    assert after["worker_descriptors"] == before["worker_descriptors"]
    assert left <= there + 20  # others may start processes meanwhile; ours would be hundreds
