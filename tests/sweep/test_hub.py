"""L9: what cells want from the hub is fetched once, by the driver, from a stand-in that answers like the hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from gradbench.config import UserError
from gradbench.sweep import hub
from gradbench.sweep.compose import Composer
from gradbench.sweep.hub import DataSet, TokenizerFile, Weights
from tests.sweep.standin import COMMIT, Hub, serving

NOWHERE = "http://127.0.0.1:9"  # nobody listens
DRIVER = """
import json, sys
from gradbench.config import UserError
from gradbench.sweep import hub
for configs in json.loads(sys.argv[1]):
    try:
        hub.fetch(hub.missing(configs), print)
    except UserError as error:
        print(error)
"""
JOB = """
import sys
from gradbench.sweep.slurm import node
node._stay_offline()
from gradbench.data.source import Source, load
from gradbench.data.tokenizer import Vocabulary, load as load_tokenizer
print(*load(Source("some/texts", "long"))["train"]["text"])
print(load_tokenizer("some/texts-model", Vocabulary(300, 0, 1, 2)).get_vocab_size())
"""

Run = Callable[..., list[str]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hub]:
    with serving(tmp_path / "served") as standin:
        yield standin


@pytest.fixture
def run(server: Hub, tmp_path: Path) -> Run:
    """Return `run(code, ...)`: the lines that a process prints whose hub is the stand-in, or `endpoint`."""

    def ran(code: str, *words: str, endpoint: str = server.address, **more: str) -> list[str]:
        theirs = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        ours = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint, **more}
        done = subprocess.run([sys.executable, "-c", code, *words], env=theirs | ours, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.splitlines()

    return ran


@pytest.fixture
def drive(run: Run) -> Run:
    """Return `drive(configs, ...)`: what a driver says, who fetches for the cells of one sweep, and of the next, ..."""
    return lambda *sweeps, **options: run(DRIVER, json.dumps(sweeps), **options)


def serve(server: Hub, name: str, **files: str | bytes) -> None:
    """Put files, whose dots are written as two underscores, into a repository."""
    for file, content in files.items():
        path = server.folder / name / file.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def cell(checkpoint: str | None = None, tokenizer: str | None = None, **model: object) -> dict[str, Any]:
    """Return what a cell's config says of its model and data."""
    pretrained = {"_target_": "gradbench.model.llama.build", "pretrained": True, "checkpoint": checkpoint}
    data = {"_target_": "gradbench.data.hub.causal_text", "folder": "/some/folder", "tokenizer": tokenizer}
    room = {"_target_": "gradbench.data.manual.causal_text"}
    return {"model": {**(pretrained if checkpoint else {}), **model}, "data": data if tokenizer else room}


def test_L9_the_weights_that_many_cells_want_are_one_download_and_nothing_else(
    server: Hub, drive: Run, tmp_path: Path
) -> None:
    unwanted = {"pytorch_model__bin": "a pickle", "README__md": "words"}
    serve(server, "some/model", config__json="{}", model__safetensors=b"x" * 999, tokenizer__json="[]", **unwanted)
    said = drive([cell("some/model")] * 5 + [cell("some/model", "some/model")] * 5)
    assert said == [f"fetching model.checkpoint=some/model from the hub to {tmp_path / 'home'}"]
    sent = sorted(line.rpartition("/")[2] for line in server.requests if line.startswith("GET /some/model/resolve/"))
    assert sent == ["config.json", "model.safetensors", "tokenizer.json"]
    assert drive([cell("some/model", "some/model")], endpoint=NOWHERE) == []


def test_L9_what_is_in_the_cache_in_part_only_is_fetched(server: Hub, drive: Run, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    shards = {"one__safetensors": "x", "two__safetensors": "y"}
    serve(server, "some/model", config__json="{}", model__safetensors__index__json=index, **shards)
    assert len(drive([cell("some/model")])) == 1
    repository = tmp_path / "home" / "hub" / "models--some--model"
    (repository / "snapshots" / COMMIT / "two.safetensors").resolve().unlink()
    shutil.rmtree(repository / "trees")  # as when a library wrote it that keeps no list
    assert len(drive([cell("some/model")], [cell("some/model")])) == 1
    assert server.downloads("two.safetensors") == 2
    assert server.downloads("one.safetensors") == 1


def test_L9_what_cant_be_had_is_one_line_that_says_how_else(server: Hub, drive: Run) -> None:
    server.gated.add("some/gated")
    for name, weights in (("gated", "model__safetensors"), ("pickled", "pytorch_model__bin")):
        serve(server, f"some/{name}", config__json="{}", **{weights: "x"})
    names = ["some/gated", "some/unknown", "some/pickled", "no name"]
    lines = [
        line for line in drive(*([cell(name)] for name in names)) if not line.startswith("fetching model.checkpoint=")
    ]
    gated, unknown, pickled, no_name = lines
    command = (
        "hf download {0} --include '*.safetensors' --include '*.json' --local-dir FOLDER, then model.checkpoint=FOLDER"
    )
    assert gated == (
        f"model.checkpoint=some/gated: is gated; accept its licence at {server.address}/some/gated, and set HF_TOKEN "
        f"to a token of yours (or: hf auth login); elsewhere: {command.format('some/gated')}"
    )
    assert f"there is no {server.address}/some/unknown, or it is private and needs HF_TOKEN" in unknown
    assert pickled.endswith("none of it that can be read; needed: config.json and model.safetensors")
    assert no_name.startswith("model.checkpoint=no name: ")
    assert server.downloads("model.safetensors") == 0


def test_L9_a_hub_that_is_not_there_is_named(drive: Run) -> None:
    _, line = drive([cell(tokenizer="some/model")], endpoint=NOWHERE)
    assert line.startswith(f"data.tokenizer=some/model: {NOWHERE} did not send it (")
    assert line.endswith(
        "elsewhere: hf download some/model tokenizer.json --local-dir FOLDER, then data.tokenizer=FOLDER"
    )


def test_L9_a_driver_that_is_offline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert constants.HF_HUB_OFFLINE, "as for all tests"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"^model\.checkpoint=some/model: not in the cache, and HF_HUB_OFFLINE is set; "
    ):
        hub.fetch(hub.missing([cell("some/model")]), print)


@pytest.mark.slow  # four processes import `datasets`
def test_L9_a_job_reads_the_data_set_without_a_request(server: Hub, run: Run, drive: Run, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    from gradbench.data.tokenizer import Vocabulary, train

    parts = "".join(
        f"- config_name: {subset}\n  data_files:\n  - split: train\n    path: {subset}.parquet\n"
        for subset in ("long", "short")
    )
    serve(server, "datasets/some/texts", README__md=f"---\nconfigs:\n{parts}---\n")
    for subset in ("long", "short"):
        rows = datasets.Dataset.from_dict({"text": [f"a {subset} text"]})
        rows.to_parquet(server.folder / "datasets" / "some" / "texts" / f"{subset}.parquet")
    tokenizer = train(["the loss falls"] * 50, Vocabulary(266, 0, 1, 2)).to_str()
    serve(server, "some/texts-model", tokenizer__json=tokenizer)
    config = cell(tokenizer="some/texts-model")
    config["data"] |= {"folder": None, "name": "some/texts", "subset": "long"}
    said = drive([config] * 3)
    assert [line.split()[1] for line in said] == ["data.tokenizer=some/texts-model", "data.name=some/texts"]
    assert (server.downloads("long.parquet"), server.downloads("short.parquet")) == (1, 0)
    server.requests.clear()
    assert run(JOB) == ["a long text", "266"]
    assert server.requests == []
    server.gated.add("some/texts")
    config["data"]["subset"] = "short"
    _, line = drive([config])
    python = "import datasets; datasets.load_dataset('some/texts', 'short').save_to_disk('FOLDER')"
    assert line.startswith(
        f"data.name=some/texts: is gated; accept its licence at {server.address}/datasets/some/texts,"
    )
    assert line.endswith(f'elsewhere: python -c "{python}", then data.folder=FOLDER')


@pytest.mark.parametrize(
    ("model", "things"),
    [
        (
            "vit",
            [Weights("model.checkpoint", "google/vit-base-patch16-224"), DataSet("data.name", "uoft-cs/cifar10", None)],
        ),
        (
            "llama",
            [
                Weights("model.checkpoint", "meta-llama/Llama-3.2-1B"),
                TokenizerFile("data.tokenizer", "meta-llama/Llama-3.2-1B"),
                DataSet("data.name", "Salesforce/wikitext", "wikitext-103-raw-v1"),
            ],
        ),
        (
            "nanovlm",
            [
                Weights("model.vision_checkpoint", "google/siglip-base-patch16-224"),
                Weights("model.language_checkpoint", "HuggingFaceTB/SmolLM2-135M"),
                TokenizerFile("data.tokenizer", "HuggingFaceTB/SmolLM2-135M"),
                DataSet("data.name", "HuggingFaceM4/the_cauldron", "aokvqa"),
            ],
        ),
    ],
)
def test_L9_what_a_cell_of_paper_size_wants(composer: Composer, model: str, things: list[hub.Wanted]) -> None:
    words = [f"model={model}", "size=paper"]
    assert list(hub.wanted(composer.cell([*words, "model.pretrained=true"])[0])) == things
    assert not any(isinstance(thing, Weights) for thing in hub.wanted(composer.cell(words)[0]))
    assert list(hub.wanted(composer.cell([f"model={model}"])[0])) == []


def test_L9_a_local_copy_and_what_is_not_ours_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    local = cell(str(tmp_path), str(tmp_path / "tokenizer.json"))
    theirs = cell("some/model", _target_="my.models.build")
    assert [*hub.wanted(local), *hub.wanted(theirs)] == []
