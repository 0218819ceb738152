"""L9 on a real SLURM: a grid of pretrained cells is one download, which its driver makes."""

import subprocess
import sys

import pytest

from gradbench.sweep.folder import all_sweeps
from gradbench.tracking import disk
from tests.integration.cluster import running
from tests.sweep.standin import serving

pytestmark = pytest.mark.slurm

SHAPE = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
SHORT = ("train.updates=2", "train.eval_every=2", "train.warmup=1", "train.batch_size=4")


def test_L9_the_jobs_of_a_pretrained_grid_ask_the_hub_for_nothing(tmp_path, tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds

    shape = LlamaConfig(**SHAPE, intermediate_size=64, vocab_size=1024, max_position_embeddings=512, rms_norm_eps=1e-5)
    shape.tie_word_embeddings = True
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "served" / "some" / "llama")
    words = ("-m", "model=llama", "model.pretrained=true", "model.checkpoint=some/llama", "optimizer=sgd,adam", *SHORT)
    with running(tmp_path_factory.mktemp("slurm")) as cluster, serving(tmp_path / "served") as hub:
        theirs = {name: value for name, value in cluster.env.items() if not name.endswith("_OFFLINE")}
        ours = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "GRADBENCH_RUNS": str(tmp_path / "runs")}
        command = [sys.executable, "-m", "gradbench", *words]
        done = subprocess.run(command, env=theirs | ours, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "2 cells: 2 ok" in done.stdout
    assert done.stdout.count("fetching model.checkpoint=some/llama from the hub") == 1
    assert hub.downloads("model.safetensors") == 1
    assert [line for line in hub.requests if "/resolve/main/" in line] == [], "as transformers would ask"
    hashes = {
        disk.load_result(attempt).facts["initial_weights_sha256"]
        for cell in disk.cells(all_sweeps(tmp_path / "runs")[0])
        for attempt in disk.attempts(cell)
    }
    assert len(hashes) == 1
