"""The arrays of one command: all at once where the site takes them, else in turn."""

import pytest

from gradbench.config import Resources
from gradbench.sweep.slurm import arrays, plan, queue
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.queue import Queue
from tests.sweep.slurm.fakes import FULL, make_jobs

NO_QOS = "sbatch: error: Batch job submission failed: Invalid qos specification"


@pytest.fixture
def line(slurm, conf, tmp_path, monkeypatch):
    """Return `line(cells, size, running, together)`: the queue of a sweep of arrays of that size."""
    monkeypatch.setattr(queue, "RETRY_S", 0.0)

    def made(cells, size, running=100, together=None):
        jobs = make_jobs(tmp_path, cells, Resources(cpus=1))
        numbers = {job.spec.id: 1 for job in jobs}
        chosen = plan.arrays(jobs, numbers, Array(0, (), {}), 1, size)
        return Queue(tmp_path, plan.planned(chosen, running, together), {job.spec.id: job for job in jobs}, conf)

    return made


def push(waiting, lives=lambda array: True):
    return [array.job for array in waiting.submit(gpus=False, lives=lives)]


def test_all_go_at_once_where_there_is_room(line, slurm):
    waiting = line(5, 2)
    assert push(waiting) == ["1", "2", "3"]
    assert waiting.waiting == []
    assert [given.options["job-name"] for given in slurm.submitted] == [
        "gradbench.vit.adam.standard.s0+1",
        "gradbench.vit.adam.standard.s2+1",
        "gradbench.vit.adam.standard.s4",
    ]
    assert push(waiting) == []


def test_what_finds_no_room_goes_later_in_its_order(line, slurm, tmp_path):
    slurm.has_room_for(4)
    waiting = line(6, 2)
    assert push(waiting) == ["1", "2"]
    assert waiting.full.startswith("AssocMaxSubmitJobLimit")
    assert len(waiting.waiting) == 1
    assert push(waiting) == []
    assert [array.number for array in arrays.of_sweep(tmp_path)] == [1, 2], "what was refused is not promised"
    slurm.has_room_for(2)
    assert push(waiting) == ["3"]
    assert (waiting.full, waiting.waiting, waiting.refused) == (None, [], [])


def test_a_site_without_room_is_not_asked_again_at_once(line, slurm, monkeypatch):
    waiting = line(6, 2)
    monkeypatch.setattr(queue, "RETRY_S", 60.0)
    slurm.refuses(FULL, after=1)
    push(waiting)
    for _ in range(5):
        assert push(waiting) == []
    assert len(slurm.programs.calls("sbatch")) == 2


def test_more_arrays_than_may_run_wait_for_those_before_them(line, slurm):
    push(line(4, 1, running=2))
    assert [given.options.get("dependency") for given in slurm.submitted] == [None, None, "afterany:1", "afterany:2"]


def test_nobody_waits_for_an_array_that_has_ended_for_slurm_soon_forgets_it(line, slurm):
    slurm.has_room_for(2)
    waiting = line(4, 1, running=2)
    push(waiting)
    slurm.has_room_for(2)
    push(waiting, lives=lambda array: array.job == "2")
    assert [given.options.get("dependency") for given in slurm.submitted][2:] == [None, "afterany:2"]


def test_an_array_that_is_refused_for_good_does_not_stop_the_others(line, slurm, tmp_path):
    waiting = line(4, 2)
    slurm.refuses(NO_QOS)
    assert push(waiting) == []
    assert [words for _, words in waiting.refused] == ["Batch job submission failed: Invalid qos specification"] * 2
    assert waiting.waiting == []
    assert list((tmp_path / arrays.FOLDER).iterdir()) == []


def test_what_is_given_up_is_not_submitted_any_more(line, slurm):
    waiting = line(4, 2)
    assert len(waiting.give_up()) == 2
    assert push(waiting) == []
    assert slurm.submitted == []
