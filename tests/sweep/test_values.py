"""Wrong values of a model's and a data set's keys, found before torch is imported, and one line for each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradbench.config import UserError
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


MISTAKES = [
    ("model.num_hidden_layers=four", "model.num_hidden_layers=four: must be a whole number"),
    ("model.hidden_size=0", "model.hidden_size=0: must be a whole number, 1 or more"),
    ("model.hidden_size=64.5", "model.hidden_size=64.5: must be a whole number, 1 or more"),
    ("model.hidden_size=null", "model.hidden_size=null: must be a whole number"),
    ("model.hidden_size=true", "model.hidden_size=True: must be a whole number"),
    ("model.hidden_size=[64]", "model.hidden_size=[64]: must be a whole number"),
    ("model.dropout=some", "model.dropout=some: must be a number"),
    ("model.dropout=-0.1", "model.dropout=-0.1: must be 0 or more"),
    ("model.initializer_range=0", "model.initializer_range=0: must be positive"),
    ("model.initializer_range=nan", "model.initializer_range=nan: must be a finite number"),
    ("model.pretrained=maybe", "model.pretrained=maybe: must be true or false"),
    ("data.held_out=-1", "data.held_out=-1: must be a whole number, 1 or more"),
    ("data.image_size=big", "data.image_size=big: must be a whole number"),
    ("model=llama data.sequence_length=-1", "data.sequence_length=-1: must be a whole number, 1 or more"),
    ("model=llama data.pad_token_id=-1", "data.pad_token_id=-1: must be a whole number, 0 or more"),
    ("model=llama model.rope_parameters.rope_type=1", "model.rope_parameters.rope_type=1: must be text"),
    (
        "model=nanovlm model.vision.num_hidden_layers=no",
        "model.vision.num_hidden_layers=no: must be a whole number",
    ),
    ("model=nanovlm model.vision=3", "model.vision=3: must have keys of its own, such as model.vision.hidden_size"),
    (
        "model.pretrained=true",
        "model.checkpoint=null: pretrained=true needs a hub id or a local folder",
    ),
    (
        "model.pretrained=true model.checkpoint=/nowhere",
        "model.checkpoint=/nowhere: there is no such folder",
    ),
    (
        "model=nanovlm size=paper model.pretrained=true model.vision_checkpoint=./nowhere",
        "model.vision_checkpoint=./nowhere: there is no such folder",
    ),
    ("size=paper data.folder=/nowhere", "data.folder=/nowhere: there is no such folder"),
    ("data=captions model=vit", "data=captions does not go with model=vit, which takes images"),
    ("data=captions", "data=captions does not go with model=vit, which takes images"),
    ("model=llama data=masked_text", "data=masked_text does not go with model=llama, which takes causal_text"),
    ("model=vit data=captions data.sequence_length=9", "data=captions does not go with model=vit, which takes images"),
    ("model=modernbert,llama data=images", "data=images does not go with model=modernbert, which takes masked_text"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_gets_one_line(composer, words, line):
    with pytest.raises(UserError) as caught:
        expand(composer, words.split(), multirun=True)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "words",
    [
        "model.dropout=0 model.initializer_range=1 model.hidden_size=128",
        "model.checkpoint=some/where",  # without pretrained=true nobody reads it
        "size=paper model.pretrained=true",  # a hub id
        "size=paper data.folder=. data.held_out_split=null",
        "model=llama model.pad_token_id=null data.eos_token_id=0",
        "model=nanovlm model.language={hidden_size:96}",
        "model=vit data=images",
    ],
)
def test_what_makes_sense_passes(composer, words):
    (cell,) = expand(composer, words.split(), multirun=False).cells
    assert cell.skip is None


def test_H6_data_that_some_models_do_not_take_skips_these(composer):
    cells = expand(composer, ["model=glob(*)", "data=captions"], multirun=True).cells
    assert {cell.axes["model"]: cell.skip for cell in cells} == {
        "vit": "data=captions does not go with model=vit, which takes images",
        "modernbert": "data=captions does not go with model=modernbert, which takes masked_text",
        "llama": "data=captions does not go with model=llama, which takes causal_text",
        "nanovlm": None,
    }
    assert len({cell.id for cell in cells}) == 4


@pytest.fixture
def theirs(tmp_path):
    """A model and data of somebody else's making, of whose keys nothing is known."""
    for room, text in (
        ("model", "_target_: torch.nn.Linear\nin_features: 4\nout_features: 3\nwindow: 16\n"),
        ("data", "_target_: my.captions\nfolder: /anywhere\n"),
    ):
        (tmp_path / room).mkdir()
        (tmp_path / room / "mine.yaml").write_text(text)
    return Composer([str(tmp_path)])


def test_what_is_not_ours_is_not_judged(theirs):
    words = ["model=mine", "data=mine", "model.window=auto", "model.out_features=-1"]
    assert expand(theirs, words, multirun=False).cells[0].science["model"]["window"] == "auto"
    assert expand(theirs, ["model=mine", "data=captions"], multirun=False).cells[0].skip is None
    sizes = ("+data.num_labels=3", "+data.image_size=8", "+data.num_channels=1")
    assert expand(theirs, ["data=mine", "model=vit", *sizes], multirun=False).cells[0].skip is None


@pytest.mark.parametrize("words", [["model.num_hidden_layers=four"], ["plan", "data=captions", "model=vit"]])
def test_the_line_comes_without_torch_and_with_exit_code_2(words, tmp_path):
    code = (
        f"import sys; from gradbench.cli import main; code = main([*{words!r}, 'runs={tmp_path}/runs']);"
        "sys.exit(100 if {'torch', 'transformers'} & set(sys.modules) else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gradbench: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"
