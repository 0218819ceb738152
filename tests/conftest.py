"""What all tests share: no network, no hub, one thread, and parts that must be there when CI says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.pop("GRADBENCH_RUNS", None)


def require(name: str, found: bool, what: str) -> None:
    """Skip the test where a part is missing; fail it where CI says that the part must be there."""
    if found:
        return
    if name in os.environ.get("GRADBENCH_REQUIRE", "").split(","):
        pytest.fail(f"{what} is missing, and GRADBENCH_REQUIRE asks for it")
    pytest.skip(f"{what} is missing")


@pytest.fixture
def chromium() -> str:
    """The path of a real headless browser's driver."""
    require("browser", bool(shutil.which("chromium") and shutil.which("chromedriver")), "chromium with its driver")
    return str(shutil.which("chromium"))


@pytest.fixture
def small_disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of its own, of a megabyte or what the test asks for."""
    folder = Path(tempfile.mkdtemp(prefix="gradbench-disk-"))  # pytest could not tidy up a mount of a killed test
    mount = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '1m')}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode == 0
    if mounted:
        yield folder
        subprocess.run(["umount", "--lazy", folder], check=True)
    folder.rmdir()
    require("mount", bool(mounted), "the right to mount a small disk")


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Any]]:
    """Return `accelerator(precision="no")`; the library keeps one state per process, which is reset around it."""
    from accelerate import Accelerator  # seconds, which tests without torch do not wait for
    from accelerate.state import AcceleratorState

    def made(precision: str = "no") -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, mixed_precision=precision)

    yield made
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs folder of a module's tests, which share its cache."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def composer() -> Any:
    """What makes configs of overrides."""
    from gradbench.sweep.compose import Composer

    return Composer()


@pytest.fixture
def attempt_of(composer: Any, runs: Path) -> Iterator[Callable[..., Path]]:
    """Return `attempt_of(*overrides)`: a new attempt folder of that cell, whose training is short."""
    from accelerate.state import AcceleratorState

    from gradbench.tracking import disk

    short = ("train.updates=4", "train.eval_every=2", "train.warmup=1", "train.batch_size=8")

    def made(*overrides: str) -> Path:
        AcceleratorState._reset_state(reset_partial_state=True)  # one cell has one process, elsewhere
        config, _choices = composer.cell([f"runs={runs}", *short, *overrides])
        attempt = disk.new_attempt(runs / "sweep" / "cell")
        disk.save_config(attempt, config)
        return attempt

    yield made
    AcceleratorState._reset_state(reset_partial_state=True)
