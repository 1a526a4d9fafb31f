"""Ctrl-C beside working threads: the first ends what is being done, the second waits for none."""

import signal
import subprocess
import sys
import time

SCRIPT = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from rlfe.cli.interrupts import second_stops_at_once
def judge():
    print("judging", flush=True)
    time.sleep({seconds})
    print("judged", flush=True)
with second_stops_at_once("what is judged is kept"):
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(judge)  # in here, since the signal may come before it has returned
            time.sleep(60)
        except KeyboardInterrupt:
            print("first", flush=True)
            pool.shutdown(wait=True)
            raise SystemExit(130)
"""


def start(seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(seconds=seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdout is not None
    assert child.stdout.readline().strip() == word


def test_the_first_waits_for_what_is_being_judged() -> None:
    child = start(0.5)
    wait_for(child, "judging")
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out.split() == ["first", "judged"]
    assert "what is judged is kept (again: stop at once)" in errors


def test_the_second_stops_at_once_although_a_thread_works_on() -> None:
    child = start(50)
    wait_for(child, "judging")
    child.send_signal(signal.SIGINT)
    wait_for(child, "first")
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert time.monotonic() - began < 20  # the thread alone would take 50
