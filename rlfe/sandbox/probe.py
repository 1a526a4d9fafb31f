"""What the isolation here really stops, found out by trying: for `rlfe doctor` and the record.

What: a loop, a memory bomb, a file write, a socket, a fork flood and a look at files run in the
jail, each bounded. What not: a proof; kernel bugs are outside of it. Try: `tried()["tried"]`.
"""

from __future__ import annotations

from typing import Any

from rlfe.sandbox.encoding import encode
from rlfe.sandbox.parts import Case, Outcome, Part
from rlfe.sandbox.pool import Judge
from rlfe.types import Status

# Each defines f(); f() is True where the program could do what it should not.
ATTEMPTS = {
    "endless loop": "def f():\n    while True:\n        pass\n",
    "memory bomb": "def f():\n    return len(bytearray(8 << 30)) > 0\n",
    "file write": (
        "import os\ndef f():\n    for place in ('/', '/var/tmp', os.path.dirname(os.getcwd())):\n"
        "        try:\n            path = os.path.join(place, 'rlfe-probe')\n"
        "            open(path, 'w').close()\n            os.unlink(path)\n"
        "            return True\n"
        "        except OSError:\n            pass\n    return False\n"
    ),
    "file read": "def f():\n    return bool(open('/etc/passwd').read())\n",
    "socket": "import socket\ndef f():\n    return bool(socket.socket())\n",
    "fork flood": (
        "import os, time\ndef f():\n    for _ in range(20):\n        if os.fork() == 0:\n"
        "            time.sleep(20)\n            os._exit(0)\n    return True\n"
    ),
}


def tried() -> dict[str, Any]:
    """The facts of the jail, and under `tried` how each attempt ended: stopped or open."""
    part = Part(
        name="probe", mode="expressions", inputs=("f()",), check=lambda i, d: d == encode(True)
    )
    with Judge(workers=1) as judge:
        cases = [Case(key=n, program=text, parts=(part,)) for n, text in ATTEMPTS.items()]
        ends = {case.key: _word(outcome) for case, outcome in judge.run(cases)}
        return {**judge.tier, "tried": {name: ends[name] for name in ATTEMPTS}}


def _word(outcome: Outcome) -> str:
    return "open" if outcome.status is Status.PASSED else "stopped"
