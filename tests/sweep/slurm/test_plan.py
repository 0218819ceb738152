"""S11: how cells become arrays, and how a total of running tasks is shared among them."""

import dataclasses
import itertools
import random

import pytest

from gradbench.config import Resources, UserError
from gradbench.sweep.slurm import plan
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.sweep.slurm.plan import WAVES, Limits, throttles, time_limit_min, warning_s
from tests.sweep.slurm.fakes import make_jobs

SMALL, LARGE = Resources(mem_gb=4), Resources(mem_gb=80, gpus=2)


def made(jobs, pack=1, size=1000, template=None):
    numbers = {job.spec.id: 1 for job in jobs}
    return plan.arrays(jobs, numbers, template or Array(0, (), {}), pack, size)


def cells(arrays):
    return [promise.cell for array in arrays for task in array.tasks for promise in task]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return make_jobs(tmp_path_factory.mktemp("sweep"), 60)


def test_S11_an_array_is_never_larger_than_the_site_takes_and_every_cell_is_in_one(jobs):
    arrays = made(jobs, size=25)
    assert [len(array.tasks) for array in arrays] == [25, 25, 10]
    assert cells(arrays) == [job.spec.id for job in jobs]


def test_cells_that_ask_for_different_things_are_in_different_arrays(jobs):
    asked = [dataclasses.replace(job, resources=(SMALL, LARGE)[n % 2]) for n, job in enumerate(jobs)]
    first, second = made(asked)
    assert (first.resources["mem_gb"], second.resources["mem_gb"]) == (4, 80)
    assert cells([first]) == [job.spec.id for job in asked[::2]]


def test_packed_cells_are_counted_as_jobs(jobs):
    arrays = made(jobs, pack=7, size=5)
    assert [len(array.tasks) for array in arrays] == [5, 4]
    assert [len(task) for task in arrays[-1].tasks] == [7, 7, 7, 4]
    assert cells(arrays) == [job.spec.id for job in jobs]


def test_what_else_an_array_holds_is_the_templates(jobs):
    template = Array(0, (), {}, {"launch": {"wait": True}}, uploads=True, resumes=True, code="c0de")
    (array,) = plan.arrays(jobs[:1], {jobs[0].spec.id: 3}, template, 1, 10)
    assert array == dataclasses.replace(template, tasks=((Promise(jobs[0].spec.id, 3),),), resources=array.resources)


@pytest.mark.parametrize("max_submit", [None, 1500, 2000])
def test_S11_where_all_may_be_queued_only_the_array_size_counts(max_submit):
    assert Limits.of(1500, 1000, max_submit) == Limits(1000, None)


@pytest.mark.parametrize(("max_submit", "array"), [(400, 100), (10_000, 1000), (3, 1), (1, 1)])
def test_arrays_that_must_take_turns_are_a_part_of_what_may_be_queued(max_submit, array):
    limits = Limits.of(100_000, 1000, max_submit)
    assert limits.array == array
    assert limits.array * limits.together <= max_submit
    assert limits.together >= min(WAVES, max_submit)


def test_S11_the_total_throttle_is_that_of_one_array():
    assert throttles([1000, 500], 256, None) == ([171, 85], [None, None])
    assert throttles([1000], 256, None) == ([256], [None])
    assert throttles([3, 2], 256, None) == ([3, 2], [None, None])


@pytest.mark.parametrize("together", [None, 1, 2, 5])
def test_S11_arrays_that_may_run_together_never_have_more_than_the_total(together):
    draw = random.Random(0)
    for _ in range(500):
        sizes = [draw.choice((1, 7, draw.randint(1, 1000))) for _ in range(draw.randint(1, 12))]
        running = draw.choice((draw.randint(1, 12), draw.randint(1, 300)))
        shares, after = throttles(sizes, running, together)
        assert all(1 <= share <= size for share, size in zip(shares, sizes, strict=True))
        rows = {}
        for at, first in enumerate(after):  # arrays behind one another are one row
            rows[at] = at if first is None else rows[first]
        tallest = [max(shares[at] for at in rows if rows[at] == row) for row in set(rows.values())]
        assert sum(tallest) <= running
        assert together is None or len(tallest) <= together
        assert len(tallest) < len(sizes) or sum(tallest) == min(running, sum(sizes)), "no share is wasted"


@pytest.mark.parametrize("sizes", [[5, 1, 1], [1, 5, 1], [1, 1, 5]])
def test_what_small_arrays_can_not_use_goes_to_large_ones(sizes):
    shares, _ = throttles(sizes, 6, None)
    assert sum(shares) == 6


def test_more_arrays_than_may_run_wait_for_one_another():
    assert throttles([10] * 5, 2, None) == ([1] * 5, [None, None, 0, 1, 2])
    assert throttles([10] * 4, 7, 3) == ([3, 2, 2, 3], [None, None, None, 0])


@pytest.mark.parametrize(
    ("time_min", "packed", "limit"), [(None, 5, 60), (10, 1, 10), (10, 5, 50), (0.5, 1, 1), (1.5, 1, 2)]
)
def test_a_time_limit_is_in_whole_minutes_and_for_all_cells_of_a_job(time_min, packed, limit):
    assert time_limit_min({"time_min": time_min}, packed, 60) == limit


@pytest.mark.parametrize(("limit_min", "asked_s"), [*itertools.product((3, 5, 60), (30, 120, 3600))])
def test_a_warning_never_comes_as_the_job_starts(limit_min, asked_s):
    assert 0 < warning_s(limit_min, asked_s) <= limit_min * 20


def test_a_time_limit_that_its_own_warning_would_use_up_is_refused():
    with pytest.raises(UserError, match=r"^resources\.time_min=2: too short for launch\.resume_on_timeout=true; .* 3$"):
        plan.check(Resources(time_min=2), resumes=True)
    for time_min, resumes in ((3, True), (None, True), (1, False)):
        plan.check(Resources(time_min=time_min), resumes=resumes)
