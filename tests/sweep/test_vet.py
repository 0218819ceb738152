"""What the constructors of models and data refuse is found before anything is submitted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradbench.cli import main
from gradbench.config import UserError
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand
from gradbench.sweep.vet import vet


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def vetted(composer, words):
    return vet(expand(composer, words.split(), multirun=True).cells)[0]


MISTAKES = [
    ("model.num_attention_heads=3", "model.hidden_size=64: must be a multiple of model.num_attention_heads=3"),
    ("model.dropout=2", "model.dropout=2: must be at least 0 and below 1"),
    ("model.patch_size=3", "data.image_size=8: must be a multiple of model.patch_size=3"),
    ("data.image_size=10", "data.image_size=10: the handwritten digits have 8"),
    ("+model.foo=1", "vit·adam·standard·s0: model: build() got an unexpected keyword argument 'foo'"),
    ("+data.foo=1", "vit·adam·standard·s0: data: images() got an unexpected keyword argument 'foo'"),
    (
        "model=llama data.sequence_length=2",
        "data.sequence_length=2: must be 3 or more, for a token between bos and eos",
    ),
    ("model=nanovlm data.sequence_length=2", "data.sequence_length=2: must be 3 or more, for a token"),
    ("model=llama data.vocab_size=20", "data.vocab_size=20: must be 261 or more, for every byte has a token"),
    ("model=modernbert data.mlm_probability=1.5", "data.mlm_probability=1.5: must lie between 0 and 1"),
    (
        "model=nanovlm model.language.num_key_value_heads=2",
        "model: num_attention_heads=3: must be a multiple of num_key_value_heads=2",
    ),
    ("model.dropout=0,0.5,1", "model.dropout=1: must be at least 0 and below 1"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_gets_one_line(composer, words, line):
    with pytest.raises(UserError) as caught:
        vetted(composer, words)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "model=glob(*) model.dropout=0.1",
        "model=glob(*) size=paper model.dropout=0.1",  # nothing is downloaded
        "size=paper model.pretrained=true model.dropout=0.1",
        "model=llama data.sequence_length=32",  # and no tokenizer trained
        "model.intermediate_size=1000000000000",  # what fits is for a device to tell
    ],
)
def test_what_makes_sense_passes(composer, words):
    assert all(cell.skip is None for cell in vetted(composer, words))


def test_a_mistake_is_exit_code_2_and_leaves_nothing_behind(capsys, tmp_path):
    assert main(["model.num_attention_heads=3", f"runs={tmp_path}/runs"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "gradbench: model.hidden_size=64: must be a multiple of model.num_attention_heads=3\n"
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_who_changes_no_model_does_not_wait_for_its_library():
    code = (
        "import sys; from gradbench.sweep.compose import Composer; from gradbench.sweep.grid import expand;"
        "from gradbench.sweep.vet import vet; vet(expand(Composer(), ['seed=1', 'model=llama'], multirun=False).cells);"
        "print({'transformers', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_a_model_of_the_users_making_is_tried_and_one_that_needs_a_device_is_not_blamed(tmp_path):
    (tmp_path / "model").mkdir()
    mine = "_target_: torch.nn.{}\nin_features: 4\nout_features: {}\n"
    for name, text in (
        ("good", mine.format("Linear", 3)),
        ("bad", mine.format("Linear", "many")),
        ("deep", "_target_: tests.sweep.test_vet.needs_a_device\n"),
    ):
        (tmp_path / "model" / f"{name}.yaml").write_text(text)
    composer = Composer([str(tmp_path)])
    assert len(vetted(composer, "model=good,deep")) == 2
    with pytest.raises(UserError, match=r"^bad·adam·standard·s0: model: "):
        vetted(composer, "model=bad")


def needs_a_device():
    """Look at a number that a tensor without a device does not have."""
    import torch

    return torch.zeros(1).item()
