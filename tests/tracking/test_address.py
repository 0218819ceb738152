import subprocess
import sys

import pytest

from gradbench.tracking.address import resolve


def test_null_is_the_store_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = resolve(None, tmp_path.relative_to(tmp_path) / "runs")
    assert address.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert address.artifacts == tmp_path / "runs" / "artifacts"
    assert address.key == "embedded"  # the runs folder may move


def test_a_named_database_keeps_its_artifacts_beside_it(tmp_path):
    address = resolve(f"sqlite:///{tmp_path}/team.db", tmp_path / "runs")
    assert (address.database, address.artifacts) == (tmp_path / "team.db", tmp_path / "artifacts")


def test_a_password_is_not_part_of_the_name(tmp_path):
    address = resolve("https://me:secret@mlflow.example:8443/base/", tmp_path)
    assert address.key == "https://mlflow.example:8443/base"
    assert "secret" in address.uri


@pytest.mark.parametrize(
    "uri", ["file:/tmp/x", "file:///tmp/x", "./mlruns", "mlruns", "sqlite:///", "ftp://x", "", "http://"]
)
def test_M1_anything_else_gets_one_line(tmp_path, uri):
    with pytest.raises(ValueError) as caught:
        resolve(uri, tmp_path)
    assert str(caught.value).startswith(f"tracking.uri={uri}: ")
    assert "sqlite:///FILE.db" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_driver_imports_is_free_of_mlflow():
    code = "import sys, gradbench.tracking.process, gradbench.tracking.ui; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
