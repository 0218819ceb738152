"""Sweep folders: unique, found again, never overwritten."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from gradbench.config import UserError
from gradbench.record import Outcome
from gradbench.sweep import folder
from gradbench.tracking import disk
from tests.tracking.folders import make_attempt, make_spec, make_sweep

ORDER = folder.Order(("python", "-m", "gradbench"), "local", {"uri": None, "experiment": "gradbench"})
MAKE = """
import sys
from pathlib import Path
from gradbench.sweep import folder
order = folder.Order(("x",), "local", {"uri": None, "experiment": "e"})
print(folder.create(Path(sys.argv[1]), order, [], {}).name)
"""


def test_a_sweep_records_its_recipe(tmp_path):
    spec = make_spec()
    content = folder.load(folder.create(tmp_path, ORDER, [spec], {}))
    assert content["command"] == ["python", "-m", "gradbench"]
    assert content["versions"]["torch"]
    assert content["driver"]["pid"] == os.getpid()
    assert [cell["id"] for cell in content["cells"]] == [spec.id]
    git = content["git"]
    assert git is None or (len(git["commit"]) == 40 and git["dirty"] == bool(git["diff"]))


def test_H3_sweeps_of_one_second_have_folders_of_their_own(tmp_path):
    command = [sys.executable, "-c", MAKE, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    names = {process.communicate()[0].strip() for process in processes}
    assert len(names) == 4
    assert {path.name for path in folder.all_sweeps(tmp_path)} == names


def test_sweeps_of_one_second_are_in_the_order_of_their_making(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.time, "strftime", lambda _format: "20261201-120000")
    made = [folder.create(tmp_path, ORDER, [], {}) for _ in range(11)]
    assert folder.all_sweeps(tmp_path) == made
    assert folder.find(tmp_path, None) == made[-1]


def test_sweeps_are_the_folders_with_their_file(tmp_path):
    sweep = make_sweep(tmp_path, [])
    (tmp_path / "artifacts").mkdir()
    assert folder.all_sweeps(tmp_path) == [sweep]


def test_H4_a_new_attempt_touches_no_older_one(tmp_path):
    specs = [make_spec(f"{n:012d}") for n in range(4)]
    sweep = make_sweep(tmp_path, specs)
    for n, spec in enumerate(specs):
        make_attempt(sweep, spec, outcome=Outcome.FAILED if n == 2 else Outcome.OK)

    def content():
        return {path: path.read_bytes() for path in sorted(sweep.rglob("*")) if path.is_file()}

    before = content()
    assert make_attempt(sweep, specs[2]).name == "2"
    after = content()
    assert {path: after[path] for path in before} == before
    assert {path.parent for path in set(after) - set(before)} == {sweep / specs[2].id / "2"}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_a_result_counts_as_finished(tmp_path, outcome):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    attempt = make_attempt(sweep, spec, outcome=outcome)
    assert folder.finished(tmp_path, [spec]) == ({spec.id: attempt} if outcome.final else {})


def test_an_attempt_that_still_runs_or_is_torn_is_not_finished(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    attempt = make_attempt(sweep, spec, outcome=None)
    (attempt / f".{disk.RESULT}.x").write_text('{"outcome": "ok"')  # a kill between writing and renaming
    assert folder.finished(tmp_path, [spec]) == {}


def test_a_failed_rerun_does_not_hide_an_older_result(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    first = make_attempt(sweep, spec)
    make_attempt(sweep, spec, outcome=Outcome.FAILED)
    assert folder.finished(tmp_path, [spec]) == {spec.id: first}


def test_the_newest_result_counts(tmp_path):
    spec = make_spec()
    attempts = [make_attempt(make_sweep(tmp_path, [spec], name=f"20261201-12000{n}"), spec) for n in (1, 0, 2)]
    assert folder.finished(tmp_path, [spec, make_spec("nobody")]) == {spec.id: attempts[2]}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_runs_folder_is_one_line(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"^runs=.*: cannot be written \(Permission denied\); name another folder$"):
        folder.create(tmp_path / "runs", ORDER, [], {})


def test_a_runs_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"^runs=.*: cannot be written \(File exists\); name another folder$"):
        folder.create(tmp_path / "runs", ORDER, [], {})


@pytest.mark.parametrize("small_disk", ["16k"], indirect=True)
def test_a_full_disk_leaves_no_sweep_behind(small_disk):
    (small_disk / "filler").write_bytes(b"x" * 8192)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); name another folder$"):
        folder.create(small_disk, ORDER, [make_spec(f"{n:012d}") for n in range(9)], {})
    assert folder.all_sweeps(small_disk) == []


def test_unknown_names_list_the_newest(tmp_path):
    make_sweep(tmp_path, [])
    with pytest.raises(UserError, match=r"^nope: no sweep of this name in .*; the newest are 20261201-120000$"):
        folder.find(tmp_path, "nope")
    with pytest.raises(UserError, match=r"no sweep here yet$"):
        folder.find(tmp_path / "empty", None)


def test_who_drives_is_not_replaced_while_it_lives(tmp_path):
    alive, dead = make_sweep(tmp_path, [], alive=True, name="a"), make_sweep(tmp_path, [], name="b")
    before = json.loads((alive / disk.SWEEP).read_text())["driver"]
    for sweep in (alive, dead):
        folder.take_over(sweep, {"some cell": 2})
    assert folder.load(alive)["driver"] == before
    assert folder.load(dead)["driver"]["pid"] == os.getpid()
    assert [folder.claimed(folder.load(sweep)) for sweep in (alive, dead)] == [{"some cell": 2}] * 2


def test_what_a_dead_process_was_going_to_rerun_is_free(tmp_path):
    sweep = make_sweep(tmp_path, [])
    folder.take_over(sweep, {"some cell": 2})
    content = folder.load(sweep)
    content["rerunning"]["driver"]["started_unix_s"] -= 60
    assert folder.claimed(content) == {}


FINAL = [Outcome.OK, Outcome.DIVERGED, Outcome.OOM]


def strict(spec, key):
    return dataclasses.replace(spec, config={**spec.config, key: {"enabled": True, "audit": True}})


@pytest.mark.parametrize("outcome", FINAL)
@pytest.mark.parametrize(("key", "fact"), [("gate", {}), ("probe", {"gate": {}})])
def test_what_ran_without_gate_or_audit_is_not_finished_for_who_asks_for_them(tmp_path, key, fact, outcome):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    attempt = make_attempt(sweep, spec, outcome=outcome, peak_bytes=7)  # what a GPU's allocator tells without an audit
    disk.save_result(attempt, dataclasses.replace(disk.load_result(attempt), facts=fact))
    assert folder.finished(tmp_path, [spec]) == {spec.id: attempt}
    assert folder.finished(tmp_path, [strict(spec, key)]) == {}


@pytest.mark.parametrize("key", ["gate", "probe"])
def test_what_died_of_memory_in_gate_or_audit_is_finished_for_who_asks_for_them(tmp_path, key):
    spec = strict(make_spec(), key)
    attempt = make_attempt(make_sweep(tmp_path, [spec]), spec, outcome=Outcome.OOM)
    assert folder.finished(tmp_path, [spec]) == {spec.id: attempt}


def test_what_went_through_gate_and_audit_is_finished(tmp_path):
    spec = make_spec()
    attempt = make_attempt(make_sweep(tmp_path, [spec]), spec, peak_activations_bytes=7)
    disk.save_result(attempt, dataclasses.replace(disk.load_result(attempt), facts={"gate": {}}))
    assert folder.finished(tmp_path, [strict(strict(spec, "gate"), "probe")]) == {spec.id: attempt}
