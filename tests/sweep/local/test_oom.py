import sys

import pytest

from gradbench.sweep.local.oom import oom_kills
from tests.sweep.cells import on_disk


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/step/memory.events"),
        ("0::/job/step", "sys/fs/cgroup/memory.events"),
        ("9:cpu:/\n4:memory:/slurm/job\n0::/", "sys/fs/cgroup/memory/slurm/job/memory.oom_control"),
        ("4:cpuset,memory:/docker/1", "sys/fs/cgroup/memory/memory.oom_control"),
        ("0::/", "proc/vmstat"),
    ],
)
def test_the_kernels_count_of_oom_kills_is_found(tmp_path, cgroup, file):
    files = {"proc/self/cgroup": cgroup, "proc/vmstat": "pgfault 5\noom_kill 1\n"}
    for name, text in (files | {file: "oom 9\noom_kill 7\noom_group_kill 3\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == 7


def test_without_a_counter_nothing_was_killed_for_memory(tmp_path):
    assert oom_kills(tmp_path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's killer is Linux's")
def test_a_cell_that_the_kernel_kills_for_memory_is_host_oom_and_its_neighbours_live(tmp_path, drive, cgroup):
    folder = cgroup("memory", "memory.limit_in_bytes", "memory.max", 250 * 2**20)
    join = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    driver = drive(["eat"], ["wait", "c00/1/result.json"], ["ok"], prefix=join)
    assert driver.wait() == 0
    assert on_disk(tmp_path) == {"c00": "host_oom", "c01": "ok", "c02": "ok"}
