"""Cells that die in every way there is; none imports torch. `do` of the frozen config names one, `arg` tunes it."""

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import yaml

from gradbench.record import Outcome, Result
from gradbench.tracking import disk

MARK = {"cells": 0}
MB = 2**20
FOREVER_S = 300


def run(attempt: Path) -> None:
    config = yaml.safe_load((attempt / "config.yaml").read_text())
    globals()["do_" + config["do"]](attempt, config.get("arg"))


def save(attempt, outcome=Outcome.OK, reason=None, **facts):
    disk.save_result(attempt, Result(outcome, reason, 3, 3, time.time(), time.time(), socket.gethostname(), {}, facts))


def wait_for(condition):
    end = time.monotonic() + FOREVER_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def do_ok(attempt, arg):
    save(attempt)


def do_wait(attempt, arg):
    """Run until the sweep's folder holds a file of that name."""
    (attempt / "here").touch()
    wait_for((attempt.parent.parent / arg).exists)
    save(attempt)


def do_meet(attempt, arg):
    """Run until so many cells do, and tell what they see."""
    (attempt / "here").touch()
    wait_for(lambda: len(list(attempt.parent.parent.glob("*/1/here"))) >= arg)
    do_look(attempt, arg)


def do_look(attempt, arg):
    """Tell what the cell sees of its surroundings."""
    MARK["cells"] += 1
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    print("printed by", attempt.parent.name)
    save(
        attempt,
        mark=MARK["cells"],
        pid=os.getpid(),
        session=os.getsid(0),
        alone=threading.active_count() == 1,
        descriptors=sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()),
        **{name: os.environ.get(name) for name in names},
    )


def do_by_rank(attempt, arg):
    """Let each rank do something else."""
    do, arg = arg[int(os.environ["RANK"])]
    globals()["do_" + do](attempt, arg)


def do_tell(attempt, arg):
    """Tell what each rank is told, once all have; the first ends the cell."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_SIZE",
             "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GRADBENCH_LISTENER")  # fmt: skip
    told = {name: os.environ[name] for name in names if name in os.environ}
    descriptors = sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists())
    listens = told.get("GRADBENCH_LISTENER")
    there = listens and socket.socket(fileno=int(listens)).getsockname()
    told |= {"pid": os.getpid(), "descriptors": descriptors, "there": there}
    disk.write_json(attempt / f"told{told.get('RANK', 0)}.json", told)
    wait_for(lambda: len(list(attempt.glob("told*"))) == int(told.get("WORLD_SIZE", 1)))
    if told.get("RANK", "0") == "0":
        save(attempt)
    wait_for((attempt / disk.RESULT).exists)


def do_raise(attempt, arg):
    raise ValueError("no such thing")


def do_memory_error(attempt, arg):
    bytearray(2**60)


def do_kill(attempt, arg):
    print("last words")
    os.kill(os.getpid(), arg)
    time.sleep(FOREVER_S)


def do_segfault(attempt, arg):
    ctypes.string_at(0)


def do_exit(attempt, arg):
    sys.exit(arg)


def do_vanish(attempt, arg):
    os._exit(0)


def do_hang(attempt, arg):
    if arg == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (attempt / "here").touch()
    time.sleep(FOREVER_S)


def do_stop_itself(attempt, arg):
    os.kill(os.getpid(), signal.SIGSTOP)


def do_polite(attempt, arg):
    """Hang, and obey SIGTERM as a cell does: with a result of its own, once there is a file of that name."""

    def end(*_):
        if arg:
            wait_for((attempt.parent.parent / arg).exists)
        save(attempt, Outcome.CANCELLED, "asked to stop", polite=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    (attempt / "here").touch()
    time.sleep(FOREVER_S)


def do_swallow(attempt, arg):
    """Go on whatever is raised, until SIGTERM has set a flag between two steps."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    while not stopped.is_set():
        try:
            time.sleep(0.05)
            (attempt / "here").touch()
        except Exception:
            print("swallowed")
    save(attempt, Outcome.CANCELLED, "asked to stop")


def do_warned(attempt, arg):
    """Let the scheduler's warning come to the job when this cell is as good as done."""
    job = psutil.Process().parent().parent()
    os.kill(job.pid, signal.SIGUSR2)
    save(attempt)


def do_hang_after_result(attempt, arg):
    save(attempt)
    time.sleep(FOREVER_S)


def do_die_after_result(attempt, arg):
    save(attempt)
    os.kill(os.getpid(), signal.SIGSEGV)


def do_hang_at_exit(attempt, arg):
    """Leave a thread and an exit handler, either of which would keep an ordinary process."""
    threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()
    atexit.register(time.sleep, FOREVER_S)
    save(attempt)


def do_eat(attempt, arg):
    """Take more and more memory, up to a bound that spares the machine."""
    hoard = []
    for _ in range(60):
        hoard.append(os.urandom(MB) * 10)
        time.sleep(0.02)
    time.sleep(FOREVER_S)


def do_hold(attempt, arg):
    """Hold so many megabytes."""
    hoard = os.urandom(MB) * arg
    time.sleep(FOREVER_S)
    del hoard


def do_note_stop(attempt, arg):
    """Leave a file for each rank when it is told to stop, and go on."""
    rank = os.environ["RANK"]
    signal.signal(signal.SIGTERM, lambda *_: (attempt / f"told{rank}").touch())
    (attempt / f"here{rank}").touch()
    wait_for(lambda: False)


def do_eat_in_child(attempt, arg):
    """Let a child process take the memory."""
    script = f"import time; x = b'x' * {400 * MB}; time.sleep({FOREVER_S})"
    subprocess.run([sys.executable, "-c", script], check=False)


def do_leave_children(attempt, arg):
    """Leave a process in the cell's group, one in a session of its own, and a family with sessions of their own."""
    family = f"setsid sleep {FOREVER_S} & touch {attempt}/family; wait"
    subprocess.Popen(["sleep", str(FOREVER_S)])
    subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    subprocess.Popen(["sh", "-c", family], start_new_session=True)
    wait_for((attempt / "family").exists)
    if arg == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    save(attempt)


def do_scribble(attempt, arg):
    """Leave rubbish for a result."""
    (attempt / disk.RESULT).write_text(arg)
    sys.exit(3)


def do_remove(attempt, arg):
    shutil.rmtree(attempt)


def do_fill(attempt, arg):
    """Fill the disk to the last byte; `ballast` is there when it is full."""
    ballast = attempt.parent.parent / "ballast"
    with ballast.with_suffix(".part").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    ballast.with_suffix(".part").rename(ballast)
    raise ValueError("what now")


def do_kill_zygote(attempt, arg):
    """Kill the worker process once so many cells run."""
    (attempt / "here").touch()
    wait_for(lambda: len(list(attempt.parent.parent.glob("*/1/here"))) >= (arg or 1))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER_S)
