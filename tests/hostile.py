"""Hostile programs, one bounded specimen or more per class of `docs/judging.md` 6.6.

Every program claims to solve `add(a, b)` and solves nothing, or tries to harm the judge. They are
only ever run inside a jail. `REFUSED` must not pass. `CONTAINED` may end as they like (those
that answer right may pass) but must leave nothing behind and disturb nobody.
"""

# ruff: noqa: E501 - a program in one piece reads better than one that fits the line

from __future__ import annotations

_EQUAL = """
class Any{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 5
    def __len__(self): return 1
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 5.0
    def __int__(self): return 5
    def __index__(self): return 5
    def __bool__(self): return True
"""
_ADD = "def add(a, b):\n    return a + b\n"


def _lying(base: str, made: str = "Any()") -> str:
    return _EQUAL.format(base=f"({base})" if base else "") + f"def add(a, b):\n    return {made}\n"


REFUSED: dict[str, str] = {
    # ending the process well
    "exit at import": "import sys\nsys.exit(0)\n",
    "os._exit at import": "import os\nos._exit(0)\n",
    "exit in the call": "def add(a, b):\n    raise SystemExit(0)\n",
    "os._exit in the call": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b):\n    return 0\n",
    "quit": "def add(a, b):\n    quit()\n",
    "signal to itself": "import os, signal\ndef add(a, b):\n    os.kill(os.getpid(), 15)\n",
    "keyboard interrupt": "def add(a, b):\n    raise KeyboardInterrupt\n",
    "generator exit": "def add(a, b):\n    raise GeneratorExit\n",
    "bare base exception": "def add(a, b):\n    raise BaseException\n",
    # lying values
    "equal to everything": _lying(""),
    "lying int": _lying("int"),
    "lying float": _lying("float"),
    "lying str": _lying("str"),
    "lying list": _lying("list"),
    "lying tuple": _lying("tuple"),
    "lying dict": _lying("dict"),
    "lying set": _lying("set"),
    "lying element": _lying("", "[Any()]"),
    "lying metaclass": (
        "class M(type):\n    def __eq__(cls, other): return True\n    __hash__ = type.__hash__\n"
        "class A(metaclass=M): pass\ndef add(a, b):\n    return A\n"
    ),
    "changing reads": (
        "class L(list):\n    n = 0\n    def __iter__(self):\n        L.n += 1\n"
        "        return iter([L.n])\n    def __len__(self): return 1\n"
        "def add(a, b):\n    return L([0])\n"
    ),
    "changing property": (
        "class I(int):\n    def bit_length(self): return 3\n    def to_bytes(self, *a, **k):\n"
        "        return b'\\x05'\n    def __add__(self, other): return 5\n"
        "def add(a, b):\n    return I(0)\n"
    ),
    "class says it is int": (
        "class A:\n    @property\n    def __class__(self): return int\n    def __eq__(self, o):\n"
        "        return True\ndef add(a, b):\n    return A()\n"
    ),
    # replacing what the harness uses
    "builtins replaced": (
        "import builtins\nbuiltins.len = lambda x: 0\nbuiltins.type = lambda x: int\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.issubclass = lambda *a: True\n"
        "def add(a, b):\n    return None\n"
    ),
    "operator replaced": "import operator\noperator.eq = lambda a, b: True\ndef add(a, b): return 0\n",
    "encoder replaced": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if 'wire' in name or 'harness' in name:\n"
        "        module.encode = module.result = lambda *a, **k: b'T'\n"
        "def add(a, b):\n    return None\n"
    ),
    "numpy replaced": (
        "import sys, types\nsys.modules['numpy'] = types.SimpleNamespace(\n"
        "    generic=object, ndarray=object, allclose=lambda *a, **k: True)\n"
        "def add(a, b):\n    return object()\n"
    ),
    "sender patched": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    sender = frame.f_locals.get('sender')\n"
        "    if sender is not None:\n        sender.failed = lambda *a: None\n"
        "    frame = frame.f_back\ndef add(a, b):\n    raise ValueError\n"
    ),
    # reading what is expected
    "frames": (
        "import sys\ndef add(a, b):\n    frame, seen = sys._getframe(), []\n"
        "    while frame:\n        seen.append(frame.f_locals.get('expected'))\n"
        "        frame = frame.f_back\n    return next((s for s in seen if s), None)\n"
    ),
    "garbage collector": (
        "import gc\ndef add(a, b):\n    for thing in gc.get_objects():\n"
        "        if isinstance(thing, dict) and 'expected' in thing:\n"
        "            return thing['expected'][0]\n"
    ),
    "files": (
        "import glob\ndef add(a, b):\n    for name in glob.glob('/**/*expected*', recursive=True):\n"
        "        return open(name).read()\n"
    ),
    "environment": "import os\ndef add(a, b):\n    return os.environ.get('EXPECTED', '')\n",
    "memory of the parent": (
        "import os\ndef add(a, b):\n    return open(f'/proc/{os.getppid()}/mem', 'rb').read(8)\n"
    ),
    # forged results
    "verdict on stdout": (
        "import os\nfor fd in range(3):\n    try:\n        os.write(fd, b'passed\\nOK\\n5\\n10\\n')\n"
        "    except OSError:\n        pass\ndef add(a, b):\n    os._exit(0)\n"
    ),
    "every descriptor": (
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'V\\0\\0\\0\\1T' * 9)\n"
        "    except OSError:\n        pass\nos._exit(0)\n"
    ),
    "forged end": (
        "import os\nos.write(3, b'L\\0\\0\\0\\0' + b'E\\0\\0\\0\\0')\nos._exit(0)\n"
    ),
    "garbage on the pipe": "import os\nos.write(3, os.urandom(5000))\nos._exit(0)\n",
    "huge length on the pipe": "import os\nos.write(3, b'V\\xff\\xff\\xff\\xff')\nos._exit(0)\n",
    "too many answers": (
        "import os\nos.write(3, b'V\\0\\0\\0\\1N' * 500 + b'E\\0\\0\\0\\0')\nos._exit(0)\n"
    ),
    # tracing
    "trace": (
        "import sys\ndef spy(frame, event, arg):\n    frame.f_locals['answer'] = b'T'\n"
        "    return spy\nsys.settrace(spy)\ndef add(a, b):\n    return None\n"
    ),
    "profile": (
        "import sys\nsys.setprofile(lambda *a: (_ for _ in ()).throw(SystemExit(0)))\n"
        "def add(a, b):\n    return None\n"
    ),
    "import hook": (
        "import sys\nclass F:\n    def find_spec(self, *a): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, F())\ndef add(a, b):\n    import nothing\n"
    ),
}  # fmt: skip

CONTAINED: dict[str, str] = {
    "loop at import": "while True:\n    pass\n",
    "loop in the call": "def add(a, b):\n    while True:\n        pass\n",
    "loop in C": "def add(a, b):\n    return sum(iter(int, 1))\n",
    "signals masked": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "def add(a, b):\n    while True:\n        pass\n"
    ),
    "handlers replaced": (
        "import signal\nfor number in range(1, 65):\n    try:\n"
        "        signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError):\n"
        "        pass\ndef add(a, b):\n    while True:\n        pass\n"
    ),
    "exceptions swallowed": (
        "def add(a, b):\n    while True:\n        try:\n            while True:\n"
        "                pass\n        except BaseException:\n            pass\n"
    ),
    "sleep": "import time\ndef add(a, b):\n    time.sleep(3600)\n",
    "threads": (
        "import threading, time\nfor _ in range(500):\n    try:\n"
        "        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
        "    except RuntimeError:\n        break\n" + _ADD
    ),
    "busy threads": (
        "import threading\ndef spin():\n    while True:\n        pass\nfor _ in range(8):\n"
        "    threading.Thread(target=spin).start()\ndef add(a, b):\n    while True:\n        pass\n"
    ),
    "detached process": (
        "import os, time\ntry:\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0:\n            time.sleep(3600)\n        os._exit(0)\n"
        "except OSError:\n    pass\n" + _ADD
    ),
    "fork flood": (
        "import os\nfor _ in range(300):\n    try:\n        if os.fork() == 0:\n"
        "            import time\n            time.sleep(3600)\n    except OSError:\n        break\n"
        + _ADD
    ),
    "fork without wrapper": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor number in (57, 58, 56, 435):\n"
        "    if libc.syscall(number, 17, 0, 0, 0, 0) == 0:\n        while True:\n            pass\n"
        + _ADD
    ),
    "subprocess": (
        "import subprocess, sys\ntry:\n    subprocess.Popen([sys.executable, '-c', 'while 1: 0'])\n"
        "except OSError:\n    pass\n" + _ADD
    ),
    "memory flood": "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))\n",
    "huge int": "def add(a, b):\n    return 1 << (1 << 40)\n",
    "huge power": "def add(a, b):\n    return 7 ** 7 ** 9\n",
    "huge text": "def add(a, b):\n    return 'x' * (1 << 40)\n",
    "huge product": (
        "import itertools\ndef add(a, b):\n    return list(itertools.product(range(99), repeat=9))\n"
    ),
    "huge answer": "def add(a, b):\n    return [list(range(1000))] * 20000\n",
    "recursion": "def add(a, b):\n    return add(a, b)\n",
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(1 << 30)\nclass A:\n    def __repr__(self):\n"
        "        return repr(self)\ndef add(a, b):\n    return repr(A())\n"
    ),
    "deep nesting": (
        "def add(a, b):\n    x = []\n    for _ in range(200000):\n        x = [x]\n    return x\n"
    ),
    "nested source": "x = " + "(" * 5000 + ")" * 5000 + "\n" + _ADD,
    "unary source": "x = " + "-" * 50000 + "1\n" + _ADD,
    "cycle": "def add(a, b):\n    x = []\n    x.append(x)\n    return x\n",
    "nul": "x = 1\0\n" + _ADD,
    "long line": "x = '" + "y" * 500000 + "'\n" + _ADD,
    "gigabytes to stdout": (
        "import os, sys\nfor _ in range(200):\n    os.write(1, b'x' * (1 << 20))\n"
        "    os.write(2, b'x' * (1 << 20))\n" + _ADD
    ),
    "gigabytes to the pipe": "import os\nwhile True:\n    os.write(3, b'x' * (1 << 20))\n",
    "full disk": (
        "try:\n    for number in range(100):\n        with open(f'f{number}', 'wb') as file:\n"
        "            for _ in range(64):\n                file.write(b'x' * (1 << 20))\n"
        "except OSError:\n    pass\n" + _ADD
    ),
    "many files": (
        "try:\n    for number in range(20000):\n        open(f'n{number}', 'w').close()\n"
        "except OSError:\n    pass\n" + _ADD
    ),
    "deep folders": (
        "import os\ntry:\n    for number in range(3000):\n        os.mkdir('d')\n"
        "        os.chdir('d')\nexcept OSError:\n    pass\n" + _ADD
    ),
    "many descriptors": (
        "import os\nkept = []\ntry:\n    while True:\n        kept.append(os.dup(1))\n"
        "except OSError:\n    pass\n" + _ADD
    ),
    "locked folder": "import os\nos.mkdir('x')\nopen('x/y', 'w').close()\nos.chmod('x', 0)\n"
    "os.chmod('.', 0)\n" + _ADD,
    "write outside": (
        "import os\nfor place in ('/', '/usr', '/etc', '/home', '/var/tmp', '/dev/shm', '..'):\n"
        "    try:\n        open(os.path.join(place, 'rlfe-left-over'), 'w').write('x')\n"
        "    except OSError:\n        pass\n" + _ADD
    ),
    "links outside": (
        "import os\nos.symlink('/etc/passwd', 'link')\ntry:\n    os.link('/etc/passwd', 'hard')\n"
        "except OSError:\n    pass\n" + _ADD
    ),
    "network": (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 22), 1)\nexcept OSError:\n"
        "    pass\ntry:\n    socket.socket(socket.AF_UNIX).bind('s')\nexcept OSError:\n    pass\n"
        + _ADD
    ),
    "kill the parent": (
        "import os, signal\nfor pid in (os.getppid(), -1, 0, 1):\n    try:\n"
        "        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\n" + _ADD
    ),
    "kill the group": (
        "import os, signal\ntry:\n    os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)\n"
        "except OSError:\n    pass\n" + _ADD
    ),
    "stop itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n" + _ADD,
    "segfault": "import ctypes\nctypes.string_at(0)\n",
    "abort": "import os\nos.abort()\n",
    "stdin": "def add(a, b):\n    return a + b + len(input())\n",
    "limits changed": (
        "import os, resource\nfor kind in range(16):\n    try:\n"
        "        resource.setrlimit(kind, (-1, -1))\n    except (OSError, ValueError):\n        pass\n"
        "try:\n    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\nexcept OSError:\n"
        "    pass\ntry:\n    os.nice(19)\nexcept OSError:\n    pass\nos.umask(0)\nos.chdir('/')\n"
        + _ADD
    ),
    "descriptors closed": "import os\nos.closerange(0, 64)\n" + _ADD,
    "pipe closed, still running": "import os\nos.close(3)\nwhile True:\n    pass\n",
    "timeout caught": (
        "import signal\ndef add(a, b):\n    signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "    try:\n        while True:\n            pass\n    except BaseException:\n"
        "        return a + b\n"
    ),
    "state for the next": (
        "import builtins, sys\nbuiltins.sum = None\nsys.modules['math'] = None\n"
        "open('left', 'w').write('x')\n" + _ADD
    ),
    "colliding hashes": (
        "def add(a, b):\n    return None\nimport os, struct\nn = 40000\nbody = b''.join(\n"
        "    b'i' + struct.pack('>I', len(k)) + k for k in (\n"
        "        ((i * ((1 << 61) - 1)).to_bytes((i * ((1 << 61) - 1)).bit_length() // 8 + 1,\n"
        "         'big', signed=True)) for i in range(1, n + 1)))\n"
        "data = b'S' + struct.pack('>I', n) + body\n"
        "os.write(3, b'L\\0\\0\\0\\0V' + struct.pack('>I', len(data)) + data)\n"
    ),
    "shared memory": (
        "import mmap\ntry:\n    for _ in range(64):\n        mmap.mmap(-1, 1 << 28)\n"
        "except (OSError, ValueError):\n    pass\n" + _ADD
    ),
    "chmod through a link": "import os\nos.symlink('/dev/null', 'n')\n" + _ADD,
}  # fmt: skip
SHORT_CPU = 0.3
