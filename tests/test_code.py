"""Which code a result is of."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gradbench import code


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the files, to which the module looks instead."""
    for name, folder in (("PACKAGE", code.PACKAGE), ("CONF", code.CONF)):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(code, name, tmp_path / folder.name)
    code.fingerprint.cache_clear()
    yield tmp_path
    code.fingerprint.cache_clear()


def fresh():
    code.fingerprint.cache_clear()
    return code.fingerprint()


def commit(folder):
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@localhost")
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", folder, *words], check=True)


def test_the_same_files_have_the_same_hash_wherever_they_are(copy, monkeypatch):
    there = fresh()["sha256"]
    monkeypatch.undo()
    assert fresh()["sha256"] == there
    assert len(there) == 64


@pytest.mark.parametrize("name", ["gradbench/loop.py", "gradbench/strategy/new.py", "conf/optimizer/adam.yaml"])
def test_a_changed_or_new_file_changes_the_hash(copy, name):
    before = fresh()
    with (copy / name).open("a") as file:
        file.write("# a line\n")
    assert fresh()["sha256"] != before["sha256"]


def test_a_file_that_moved_changes_the_hash(copy):
    before = fresh()
    (copy / "gradbench" / "loop.py").rename(copy / "gradbench" / "hoop.py")
    assert fresh()["sha256"] != before["sha256"]


def test_other_files_do_not_count(copy):
    before = fresh()
    (copy / "gradbench" / "notes.txt").write_text("hello")
    assert fresh() == before


def test_a_process_keeps_what_it_was_told_first(copy):
    before = fresh()
    (copy / "gradbench" / "loop.py").write_text("")
    assert code.fingerprint() == before


def test_outside_a_checkout_there_is_no_commit(copy):
    assert set(fresh()) == {"sha256"}
    assert code.git_state() is None


def test_a_checkout_has_its_commit_and_says_whether_it_is_dirty(copy):
    commit(copy)
    clean = fresh()
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (copy / "gradbench" / "loop.py").write_text("")
    changed = fresh()
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)
    assert changed["sha256"] != clean["sha256"]
    assert "loop.py" in code.git_state()["diff"]


def test_without_git_there_is_no_commit(copy, monkeypatch):
    commit(copy)
    monkeypatch.setenv("PATH", "")
    assert set(fresh()) == {"sha256"}
