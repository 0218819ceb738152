from gradbench.tracking import disk
from gradbench.tracking.process import Uploader
from tests.tracking.folders import make_attempt, make_spec, make_sweep


def test_leaving_the_context_sends_the_rest(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    with Uploader(sweep) as uploader:
        make_attempt(sweep, spec)
        assert "1 runs are not in MLflow yet" in uploader.summary()
    assert "not in MLflow" not in uploader.summary()
    assert disk.read_json(sweep / "mlflow.json")["status"] == "FINISHED"
