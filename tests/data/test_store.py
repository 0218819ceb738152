"""The cache, under everything that kills processes and damages files."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradbench.data import store
from gradbench.data.store import Arrays, NotMade, cached, key_of, keys_only, sha256_of_arrays

ARRAYS = {"a": np.arange(1000, dtype=np.int32), "b": np.zeros((3, 4), dtype=np.uint8)}

BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from gradbench.data.store import cached
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
def build():
    with (folder / "built").open("a") as log:
        print("x", file=log, flush=True)
    time.sleep(seconds)
    return {"a": np.arange(1000)}
print(cached(folder, "it", "key", build)["a"].sum())
"""


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return dict(ARRAYS)


@pytest.fixture
def build() -> Builder:
    return Builder()


@pytest.fixture
def ask(tmp_path: Path, build: Builder) -> Callable[[], Arrays]:
    """Return a function that asks for the arrays, and checks that they are the right ones."""

    def asked() -> Arrays:
        arrays = cached(tmp_path / "cache", "it", "key", build)
        assert sha256_of_arrays(arrays) == sha256_of_arrays(ARRAYS)
        return arrays

    return asked


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("it-*.npz")
    return path


def test_it_is_built_once(ask: Callable[[], Arrays], build: Builder) -> None:
    ask()
    ask()
    assert build.calls == 1


def test_without_a_cache_it_is_built_each_time(build: Builder) -> None:
    for _ in range(2):
        cached(None, "it", "key", build)
    assert build.calls == 2


def test_another_key_or_name_is_another_file(tmp_path: Path, build: Builder) -> None:
    for name, key in (("it", "key"), ("it", "other"), ("other", "key")):
        cached(tmp_path, name, key, build)
    assert build.calls == 3


def test_what_older_code_made_is_not_found(
    ask: Callable[[], Arrays], build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask()
    code = store._code()
    assert Path(store.__file__).read_bytes() in code
    monkeypatch.setattr(store, "_code", lambda: [*code[1:], code[0] + b"#"])
    ask()
    assert build.calls == 2


@pytest.mark.parametrize("left", [0, 1, 100, 0.5, 0.99])
def test_a_torn_file_is_built_again(left: float, tmp_path: Path, ask: Callable[[], Arrays], build: Builder) -> None:
    ask()
    path = the_file(tmp_path / "cache")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole)) if 0 < left < 1 else int(left)])
    ask()
    ask()
    assert build.calls == 2


def test_a_flipped_bit_is_noticed(tmp_path: Path, ask: Callable[[], Arrays], build: Builder) -> None:
    ask()
    path = the_file(tmp_path / "cache")
    damaged = bytearray(path.read_bytes())
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    ask()
    assert build.calls == 2


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, ask: Callable[[], Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            ask()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    ask()


def test_of_many_processes_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    processes = [start(tmp_path, 0.3) for _ in range(4)]
    assert {process.communicate()[0].strip() for process in processes} == {"499500"}
    assert (tmp_path / "built").read_text() == "x\n"


def test_a_builder_that_is_killed_holds_nobody_up(tmp_path: Path) -> None:
    victim = start(tmp_path, 60)
    wait_for(tmp_path / "built")
    heir = start(tmp_path, 0)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert heir.communicate(timeout=20)[0].strip() == "499500"
    assert (tmp_path / "built").read_text() == "x\nx\n"


def test_L9_a_builder_that_is_suspended_does_not_hold_others_up_for_ever(
    tmp_path: Path, ask: Callable[[], Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask()
    the_file(tmp_path / "cache").unlink()
    (lock,) = (tmp_path / "cache").glob("*.lock")
    monkeypatch.setattr(store, "PATIENCE_S", 0.3)
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = time.monotonic()
        ask()
        assert time.monotonic() - before >= 0.3
    the_file(tmp_path / "cache")


def test_a_file_system_without_locks_is_no_obstacle(ask: Callable[[], Arrays], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    ask()


@pytest.mark.parametrize("cache", [True, False])
def test_nothing_is_made_where_only_the_keys_are_to_be_checked(tmp_path: Path, cache: bool) -> None:
    folder = tmp_path / "cache" if cache else None
    with keys_only(), pytest.raises(NotMade):
        cached(folder, "name", "key", lambda: ARRAYS)
    assert not list(tmp_path.iterdir())
    assert cached(folder, "name", "key", lambda: ARRAYS).keys() == ARRAYS.keys()


def test_a_key_has_borders_and_types() -> None:
    keys = [
        key_of(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), (1,), ("1",), (b"1",), (1.0,), (None,), ())
    ]
    assert len(set(keys)) == len(keys)
    assert key_of("a", 1) == key_of("a", 1)


def test_the_hash_of_arrays_covers_names_types_shapes_and_values() -> None:
    ones = np.ones(6, dtype=np.int32)
    variants = [{"a": ones}, {"b": ones}, {"a": ones.reshape(2, 3)}, {"a": ones.astype(np.uint32)}, {"a": 2 * ones}]
    assert len({sha256_of_arrays(arrays) for arrays in variants}) == len(variants)
