"""Several processes for one cell: who they are, and that the end of one is the end of all. None imports torch."""

import dataclasses
import os

import psutil
import pytest

from gradbench.config import Resources, UserError
from gradbench.record import Outcome
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended, Started
from gradbench.tracking import disk
from tests.sweep.cells import launcher, make_job, make_jobs, results, wait_for

pytestmark = pytest.mark.usefixtures("no_orphans")

TWO = Resources(processes=2)


def run(sweep, *cells, **options):
    return results(launcher(**options).run(make_jobs(sweep, *cells)))


def told(attempt):
    """Return what each rank was told."""
    return [disk.read_json(path) for path in sorted(attempt.glob("told*.json"))]


def test_each_process_is_told_who_it_is(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE"):  # of the srun or torchrun around us
        monkeypatch.setenv(name, "7")
    ended = run(tmp_path, ["tell", None, Resources(processes=3, cpus=7)], ["tell"], workers=1)
    assert {result.outcome for result in ended.values()} == {Outcome.OK}
    ranks, (alone,) = told(tmp_path / "c00" / "1"), told(tmp_path / "c01" / "1")
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {rank["WORLD_SIZE"] + rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"33"}
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"2"}, "seven cores among three"
    (place,) = {(rank["MASTER_ADDR"], int(rank["MASTER_PORT"])) for rank in ranks}
    assert [rank["there"] and tuple(rank["there"]) for rank in ranks] == [place, None, None]
    assert [len(rank["descriptors"]) for rank in ranks] == [4, 3, 3], "only the first one listens"
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} & set(alone) == set()
    assert not any("PMI_SIZE" in process for process in (*ranks, alone))


def test_the_first_rank_stands_for_the_cell_and_each_has_its_log(tmp_path):
    job = make_job(tmp_path, "c", "tell", None, TWO)
    started, ended = launcher().run([job])
    assert isinstance(started, Started)
    assert isinstance(ended, Ended)
    ranks = told(ended.attempt)
    assert disk.read_json(ended.attempt / disk.STATE)["pid"] == started.pid == ranks[0]["pid"]
    logs = [(ended.attempt / disk.log_of_rank(rank)).read_text() for rank in range(2)]
    assert [log.split()[-1] for log in logs] == [str(rank["pid"]) for rank in ranks]


def test_one_process_for_each_gpu_that_it_gets(tmp_path):
    cells = [["tell", None, Resources(gpus=2)], ["tell", None, Resources(gpus=2, processes=1)], ["tell"]]
    run(tmp_path, *cells, gpus=("GPU-a", "GPU-b"), workers=1)
    seen = [told(tmp_path / f"c{n:02d}" / "1") for n in range(3)]
    assert [len(ranks) for ranks in seen] == [2, 1, 1]
    assert [len({rank["CUDA_VISIBLE_DEVICES"] for rank in ranks}) for ranks in seen] == [1, 1, 1]
    assert set(seen[0][0]["CUDA_VISIBLE_DEVICES"].split(",")) == {"GPU-a", "GPU-b"}
    run(tmp_path / "none", ["tell", None, Resources(gpus=2)])
    assert len(told(tmp_path / "none" / "c00" / "1")) == 1, "a machine without a GPU"


HANG = ["hang", "deaf"]
DEATHS = {
    "killed": ([HANG, ["kill", 9], HANG], "lost", "rank 1 killed by signal 9 (SIGKILL)"),
    "first_killed": ([["kill", 9], HANG, HANG], "lost", "killed by signal 9 (SIGKILL)"),
    "crashed": ([HANG, HANG, ["segfault", None]], "failed", "rank 2 crashed: segmentation fault (signal 11)"),
    "raised": ([HANG, HANG, ["raise", None]], "failed", "rank 2 exited with code 1: ValueError: no such thing"),
    "vanished": ([HANG, ["vanish", None], HANG], "lost", "rank 1 ended without a result (exit code 0)"),
    "said_so": ([HANG, ["ok", None], HANG], "ok", None),
}


@pytest.fixture(scope="module")
def deaths(targets, tmp_path_factory):
    """A cell of three processes for each way to die."""
    sweep = tmp_path_factory.mktemp("runs") / "deaths"
    cells = [make_job(sweep, name, "by_rank", do, Resources(processes=3)) for name, (do, *_) in DEATHS.items()]
    return results(launcher(workers=3).run(cells))


@pytest.mark.parametrize("name", DEATHS)
def test_the_end_of_one_is_the_end_of_all_and_has_its_reason(deaths, name):
    assert (deaths[name].outcome, deaths[name].reason) == DEATHS[name][1:]


def test_a_limit_is_for_all_together(tmp_path):
    some = ["by_rank", [["hold", 150], ["hold", 150]], dataclasses.replace(TWO, mem_gb=0.25)]
    late = ["by_rank", [HANG, HANG], dataclasses.replace(TWO, time_min=0.5 / 60)]
    ended = run(tmp_path, some, late)
    assert [ended[name].outcome for name in ("c00", "c01")] == [Outcome.HOST_OOM, Outcome.TIMEOUT]
    assert "GB of the 0.25 GB it asked for (resources.mem_gb)" in ended["c00"].reason


def test_what_they_share_is_counted_once(tmp_path):
    enough = ["by_rank", [["hold", 60], ["hold", 60]], dataclasses.replace(TWO, mem_gb=0.25, time_min=1 / 60)]
    assert run(tmp_path, enough)["c00"].outcome is Outcome.TIMEOUT


def test_a_stop_reaches_every_rank(tmp_path):
    stop = Stop()
    events = launcher().run([make_job(tmp_path, "c", "note_stop", None, TWO)], stop)
    attempt = next(events).attempt
    wait_for(lambda: len(list(attempt.glob("here*"))) == 2)
    stop.request(2)
    (ended,) = events
    assert (ended.result.outcome, ended.result.reason) == (Outcome.CANCELLED, "the user stopped it")
    assert len(list(attempt.glob("told*"))) == 2


def test_the_processes_die_with_their_zygote(tmp_path):
    events = launcher().run([make_job(tmp_path, "c", "by_rank", [HANG, HANG], TWO)])
    first = psutil.Process(next(events).pid)
    ranks = first.parent().children()
    assert len(ranks) == 2
    first.parent().kill()
    (ended,) = events
    assert ended.result.outcome is Outcome.LOST
    wait_for(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))


def test_there_is_room_for_the_processes_of_a_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    jobs = [make_job(tmp_path, "c", "tell", None, Resources(processes=4))]
    slots = launcher(workers=None, threads=None).slots(jobs)
    assert (slots.workers, slots.threads) == (2, 4)


def test_several_nodes_need_slurm(tmp_path):
    jobs = [make_job(tmp_path, "c", "tell", None, Resources(nodes=2))]
    with pytest.raises(UserError, match=r"^resources.nodes=2: needs SLURM"):
        launcher().begin(jobs)
