"""Cells that die in every way there is; none imports torch. `do` of the frozen config names one, `arg` tunes it."""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import yaml

from gradbench.record import Outcome, Result
from gradbench.tracking import disk

MARK = {"cells": 0}
MB = 2**20


def run(attempt: Path) -> None:
    config = yaml.safe_load((attempt / "config.yaml").read_text())
    globals()["do_" + config["do"]](attempt, config.get("arg"))


def save(attempt, outcome=Outcome.OK, reason=None, **facts):
    disk.save_result(attempt, Result(outcome, reason, 3, 3, time.time(), time.time(), socket.gethostname(), {}, facts))


def do_ok(attempt, arg):
    time.sleep(arg or 0)
    save(attempt)


def do_look(attempt, arg):
    """Tell what the cell sees of its surroundings."""
    MARK["cells"] += 1
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    print("printed by", attempt.parent.name)
    time.sleep(arg or 0)
    save(
        attempt,
        mark=MARK["cells"],
        pid=os.getpid(),
        session=os.getsid(0),
        alone=threading.active_count() == 1,
        descriptors=sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()),
        **{name: os.environ.get(name) for name in names},
    )


def do_raise(attempt, arg):
    raise ValueError("no such thing")


def do_memory_error(attempt, arg):
    raise MemoryError


def do_kill(attempt, arg):
    os.kill(os.getpid(), arg)
    time.sleep(60)


def do_segfault(attempt, arg):
    ctypes.string_at(0)


def do_exit(attempt, arg):
    sys.exit(arg)


def do_vanish(attempt, arg):
    os._exit(0)


def do_hang(attempt, arg):
    if arg == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (attempt / "hangs").touch()
    time.sleep(300)


def do_polite(attempt, arg):
    """Hang, and obey SIGTERM as a cell does: with a result of its own."""

    def end(*_):
        save(attempt, Outcome.CANCELLED, "asked to stop", polite=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    (attempt / "hangs").touch()
    time.sleep(300)


def do_hang_after_result(attempt, arg):
    save(attempt)
    time.sleep(300)


def do_die_after_result(attempt, arg):
    save(attempt)
    os.kill(os.getpid(), signal.SIGSEGV)


def do_hang_at_exit(attempt, arg):
    """Leave a thread and an exit handler, either of which would keep an ordinary process."""
    threading.Thread(target=time.sleep, args=(300,)).start()
    atexit.register(time.sleep, 300)
    save(attempt)


def do_eat(attempt, arg):
    """Take `arg` MB more and more, up to a bound that spares the machine."""
    hoard = []
    for _ in range(60):
        hoard.append(os.urandom(MB) * 10)
        time.sleep(0.02)
    time.sleep(60)


def do_eat_in_child(attempt, arg):
    """Let a child process take the memory."""
    subprocess.run([sys.executable, "-c", "import time; x = b'x' * (400 * 2**20); time.sleep(60)"], check=False)


def do_leave_children(attempt, arg):
    """Leave one process in the cell's group and one in a session of its own."""
    sleepers = [subprocess.Popen(["sleep", "300"], start_new_session=apart) for apart in (False, True)]
    (attempt / "children.json").write_text(json.dumps([process.pid for process in sleepers]))
    if arg == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    save(attempt)


def do_kill_zygote(attempt, arg):
    time.sleep(arg or 0)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(300)
