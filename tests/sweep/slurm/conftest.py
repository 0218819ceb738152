from pathlib import Path

import pytest

from tests.sweep.slurm.programs import Programs


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Make a folder of pretended programs the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Programs(folder)
