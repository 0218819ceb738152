import os
import signal
import subprocess
import sys
import textwrap

import psutil

from gradbench.sweep.local.process import kill_and_wait, kill_group, kill_rest, memory_bytes


def test_memory_is_that_of_the_whole_tree():
    alone = memory_bytes(os.getpid())
    script = "x = b'x' * (64 * 2**20); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        together = memory_bytes(os.getpid())
        child.send_signal(signal.SIGKILL)
    assert together - alone > 60 * 2**20
    assert memory_bytes(child.pid) == 0


def run_apart(script):
    """Run Python code as a process that inherits orphans, and return what it prints."""
    head = (
        "import os, subprocess, sys, psutil; from gradbench.sweep.local import newborn, process\n"
        "newborn.inherit_orphans()\n"
    )
    done = subprocess.run([sys.executable, "-c", head + textwrap.dedent(script)], capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.strip()


def test_strangers_are_killed_with_their_families_and_acquaintances_are_not():
    script = """
        family = "setsid sh -c 'setsid sleep 300 & echo; wait' & wait"
        stranger, friend = (subprocess.Popen(["sh", "-c", family], stdout=subprocess.PIPE) for _ in range(2))
        for child in (stranger, friend):
            child.stdout.readline()
        before = psutil.Process().children(recursive=True)
        theirs = [psutil.Process(friend.pid), *psutil.Process(friend.pid).children(recursive=True)]
        process.kill_strangers({friend.pid})
        gone, alive = psutil.wait_procs(set(before) - set(theirs), timeout=10)
        print(len(gone), len(alive), sum(one.is_running() for one in theirs))
        for one in theirs:
            one.kill()
    """
    assert run_apart(script) == "3 0 3"


def test_a_group_is_killed_and_what_is_gone_is_no_matter():
    sleepers = "sleep 300 & sleep 300 & echo; wait"
    leader = subprocess.Popen(["sh", "-c", sleepers], stdout=subprocess.PIPE, start_new_session=True)
    with leader:
        leader.stdout.readline()
        children = psutil.Process(leader.pid).children()
        kill_group(leader.pid)
    assert leader.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    kill_group(leader.pid)
    kill_rest(leader.pid)
    kill_and_wait([leader.pid], 1)


def test_what_a_reaped_leader_left_in_its_group_is_killed():
    command = ["sh", "-c", "sleep 300 & echo $!"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        left = psutil.Process(int(leader.stdout.readline()))
    assert left.is_running()
    kill_rest(leader.pid)
    _, alive = psutil.wait_procs([left], timeout=10)
    assert not alive


def test_a_newborn_without_a_group_of_its_own_is_killed_all_the_same():
    with subprocess.Popen(["sleep", "300"]) as newborn:
        kill_group(newborn.pid)
    assert newborn.returncode == -signal.SIGKILL


def test_what_forks_share_is_counted_once():
    script = """
        import signal
        shared = os.urandom(100 * 2**20)
        pids = []
        for _ in range(2):
            if (pid := os.fork()) == 0:
                signal.pause()
                os._exit(0)
            pids.append(pid)
        print(process.memory_bytes(pids[0]) // 2**20, process.memory_bytes(*pids) // 2**20)
        for pid in pids:
            process.kill_group(pid)
    """
    one, both = map(int, run_apart(script).split())
    assert 100 < one <= both < 150
