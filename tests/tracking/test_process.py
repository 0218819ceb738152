from gradbench.tracking import disk
from gradbench.tracking.process import Uploader, summary
from tests.tracking.folders import make_attempt, make_spec, make_sweep


def test_leaving_the_context_sends_the_rest(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    with Uploader(sweep):
        make_attempt(sweep, spec)
        assert "1 runs are not in MLflow yet" in summary(sweep)
    assert "not in MLflow" not in summary(sweep)
    assert disk.read_json(sweep / "mlflow.json")["status"] == "FINISHED"
