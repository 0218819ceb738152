import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    """Build `nvml.c` and return the folder of the libnvidia-ml.so.1 that it makes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    require("cc", compiler is not None, "a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source, library = Path(__file__).with_name("nvml.c"), folder / "libnvidia-ml.so.1"
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-stringop-truncation", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-Wl,-soname,libnvidia-ml.so.1", "-o", library, source], check=True)
    return folder


@pytest.fixture
def run_with_nvml(nvml_library):
    """Return a function that runs Python code where the library answers for `gpus`, and gives its standard output."""

    def run(code: str, gpus: str, visible: str | None = None) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        environment |= {"LD_LIBRARY_PATH": str(nvml_library), "FAKE_NVML": gpus}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def gpus(nvml_library, tmp_path, monkeypatch):
    """Return a function that sets, for samplers started from here, which GPUs there are and what they read."""
    file = tmp_path / "readings"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("FAKE_NVML_READINGS", str(file))

    def tell(readings: str, names: str | None = None) -> None:
        if names is not None:
            monkeypatch.setenv("FAKE_NVML", names)
        temporary = tmp_path / "new"
        temporary.write_text(readings)
        temporary.replace(file)

    return tell
