"""What a sweep has submitted, as it is kept on disk."""

import threading
from dataclasses import replace

import pytest

from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.arrays import Array, Promise

ONE, TWO = Promise("a", 1), Promise("b", 1)
ASKED = {"gpus": 1, "mem_gb": 2.5}
ARRAY = Array(0, ((ONE,), (TWO,)), ASKED, {"resources": {"mem_gb": 2.5}}, resumes=True, code="c0de")


def test_an_array_is_read_as_it_was_written(tmp_path):
    made = arrays.create(tmp_path, ARRAY)
    arrays.save(tmp_path, replace(made, job="7", submitted_unix_s=1.5))
    (read,) = arrays.of_sweep(tmp_path)
    assert read == replace(made, job="7", submitted_unix_s=1.5)
    assert (read.number, read.tasks, read.changes) == (1, ARRAY.tasks, ARRAY.changes)


def test_before_the_answer_it_is_not_known_to_be_submitted(tmp_path):
    arrays.create(tmp_path, ARRAY)
    assert arrays.last_jobs(arrays.of_sweep(tmp_path)) == {"a": (1, None), "b": (1, None)}


def test_the_tasks_of_an_array_have_numbers_and_a_single_job_has_none():
    assert list(replace(ARRAY, job="7").jobs()) == [(ONE, "7_0"), (TWO, "7_1")]
    assert list(replace(ARRAY, job="7", tasks=((ONE, TWO),)).jobs()) == [(ONE, "7"), (TWO, "7")]


def test_the_newest_attempt_of_a_cell_is_the_one_that_counts():
    first, rerun = replace(ARRAY, job="7"), replace(ARRAY, job="8", tasks=((Promise("b", 2),),))
    for order in ([first, rerun], [rerun, first]):
        assert arrays.last_jobs(order) == {"a": (1, "7_0"), "b": (2, "8")}


def test_arrays_come_in_the_order_of_their_numbers(tmp_path):
    for _ in range(11):
        arrays.create(tmp_path, ARRAY)
    assert [array.number for array in arrays.of_sweep(tmp_path)] == list(range(1, 12))


def test_two_commands_at_once_get_different_numbers(tmp_path):
    made = []
    threads = [
        threading.Thread(target=lambda: made.extend(arrays.create(tmp_path, ARRAY).number for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(1, 81))


def test_an_array_that_was_refused_is_forgotten_with_all_that_it_had(tmp_path):
    made = arrays.create(tmp_path, ARRAY)
    arrays.folder_of(tmp_path, made).mkdir()
    (arrays.folder_of(tmp_path, made) / "x.pkl").touch()
    arrays.delete(tmp_path, made)
    assert list((tmp_path / arrays.FOLDER).iterdir()) == []


def test_a_sweep_that_submitted_nothing_has_no_arrays(tmp_path):
    assert arrays.of_sweep(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        arrays.load(arrays.path_of(tmp_path, 1))


def test_the_log_of_a_job_is_found_by_its_id(tmp_path):
    folder = arrays.folder_of(tmp_path, arrays.create(tmp_path, ARRAY))
    folder.mkdir()
    for job in ("7_1", "7_10"):
        (folder / f"{job}_0_log.out").touch()
    assert arrays.log_of(tmp_path, "7_1") == folder / "7_1_0_log.out"
    assert arrays.log_of(tmp_path, "7_0") is None
