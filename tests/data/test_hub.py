"""The data of `size=paper`, from small folders that are saved here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from PIL import Image
from torch import Tensor

from gradbench.data.base import Data
from gradbench.data.hub import Pictures
from gradbench.data.order import batches, held_out_batches
from gradbench.data.source import Rows
from gradbench.data.tokenizer import Vocabulary, train

datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")

DATA = ["images", "masked_text", "causal_text", "captions"]
WORDS = ["the", "optimizer", "takes", "a", "step", "and", "then", "the", "loss", "of", "the", "model", "falls", "again"]
SMALL = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

Load = Callable[..., Data]


def picture(number: int) -> Image.Image:
    """Return a picture of 20 x 10, dark on the left and bright on the right, in a mode of its own."""
    ramp = np.tile(np.linspace(number, 200 + number, 20, dtype=np.uint8), (10, 1))
    return Image.fromarray(ramp).convert(("L", "RGB", "RGBA", "P")[number % 4])


def sentences(first: int, count: int) -> list[str]:
    return [" ".join([*WORDS[: 3 + number % 11], str(number)]) for number in range(first, first + count)]


def turns(number: int) -> list[dict[str, str]]:
    answers = [f"It is number {number}.", f"{number} of them"]
    return [{"user": "What is it?", "assistant": text, "source": "x"} for text in answers[: 1 + number % 2]]


PARTS = {
    "images": lambda first, n: {
        "img": [picture(i) for i in range(first, first + n)],
        "label": [i % 10 for i in range(n)],
    },
    "masked_text": lambda first, n: {"text": sentences(first, n)},
    "causal_text": lambda first, n: {"text": sentences(first, n)},
    "captions": lambda first, n: {
        "images": [[picture(i)] for i in range(first, first + n)],
        "texts": [turns(i) for i in range(n)],
    },
}
KEYS = {
    "images": {"image_size": 8},
    "masked_text": SMALL | {"mask_token_id": 4, "sequence_length": 24},
    "causal_text": SMALL | {"sequence_length": 24},
    "captions": SMALL | {"image_size": 8, "sequence_length": 64},
}


def features(name: str, columns: dict[str, list[object]]) -> object:
    """Return what tells `datasets` that a column holds pictures, None where it sees that by itself."""
    if name != "captions":
        return None
    said = {key: datasets.Value("string") for key in ("user", "assistant", "source")}
    return datasets.Features({"images": datasets.List(datasets.Image()), "texts": datasets.List(said)})


def save(name: str, folder: Path, shift: int = 0) -> Path:
    """Save a data set as the hub's of this name has it: 40 rows to train on and 12 others."""
    parts = {"train": PARTS[name](shift, 40), "test": PARTS[name](40, 12), "validation": PARTS[name](40, 12)}
    sides = {side: datasets.Dataset.from_dict(part, features(name, part)) for side, part in parts.items()}
    datasets.DatasetDict(sides).save_to_disk(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train(sentences(0, 200), Vocabulary(**SMALL)).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def load(config: Callable[..., DictConfig], tokenizer: Path, tmp_path: Path) -> Load:
    """Return `load(name, folder, **keys)`: the data set of `size=paper`, with small numbers."""

    def loaded(name: str, folder: Path, **keys: object) -> Data:
        node = config(name, "size=paper")
        small = {"folder": str(folder), "held_out": 8, **KEYS[name], **keys}
        if name != "images":
            small = {"tokenizer": str(tokenizer), **small}
        with open_dict(node):
            node.update(small)
        return instantiate(node, cache=tmp_path / "cache")

    return loaded


def flat(batch: dict[str, Tensor]) -> set[bytes]:
    key = "pixel_values" if "pixel_values" in batch else "input_ids"
    return {row.numpy().tobytes() for row in batch[key]}


@pytest.mark.parametrize("name", DATA)
def test_it_is_read_from_a_folder(name: str, load: Load, tmp_path: Path) -> None:
    data = load(name, save(name, tmp_path / "saved"))
    assert len(data.train) >= 10
    batch, held_out = next(batches(data, [10], seed=0)), next(held_out_batches(data, 4))
    for part, size in ((batch, 10), (held_out, 4)):
        assert {tensor.shape[0] for tensor in part.values()} == {size}
        assert (part["labels"] != -100).view(size, -1).any(1).all()
        if "pixel_values" in part:
            assert part["pixel_values"].shape == (size, 3, 8, 8)
        if "attention_mask" in part:
            assert part["input_ids"].shape == part["attention_mask"].shape == part["labels"].shape
            assert set(part["labels"][part["attention_mask"] == 0].tolist()) <= {-100}
            assert part["input_ids"].shape[1] <= KEYS[name]["sequence_length"]
    assert flat(batch).isdisjoint(flat(held_out))


@pytest.mark.parametrize("name", DATA)
def test_the_hash_follows_the_content(name: str, load: Load, tmp_path: Path) -> None:
    one, same, other = (save(name, tmp_path / str(number), shift) for number, shift in enumerate((0, 0, 80)))
    assert load(name, one).sha256 == load(name, one).sha256 == load(name, same).sha256 != load(name, other).sha256


def test_a_picture_keeps_its_label_and_its_orientation(load: Load, tmp_path: Path) -> None:
    data = load("images", save("images", tmp_path / "saved"))
    assert [data.train.sample(index, 0)["labels"].item() for index in range(12)] == [*range(10), 0, 1]
    for index in range(4):  # one of each mode
        pixels = data.train.sample(index, 0)["pixel_values"].int()
        assert (pixels.shape, pixels.dtype) == ((3, 8, 8), torch.int32)
        assert (pixels.diff(dim=2) > 0).all()
        assert pixels.diff(dim=1).abs().max() == 0


def test_pictures_may_be_grey_but_not_of_two_channels(load: Load, tmp_path: Path) -> None:
    folder = save("images", tmp_path / "saved")
    assert load("images", folder, num_channels=1).train.sample(1, 0)["pixel_values"].shape == (1, 8, 8)
    with pytest.raises(InstantiationException) as caught:
        load("images", folder, num_channels=2)
    assert str(caught.value.__cause__) == "data.num_channels=2: must be 1 (grey) or 3 (RGB)"


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    picture(1).save(tmp_path / "turned.png", exif=exif)
    rows = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": str(tmp_path / "turned.png")}]})
    pixels = Pictures(Rows(rows, "image", [b""]), 8, 3)[0].int()
    assert (pixels.diff(dim=2) < 0).all()


def test_both_tasks_have_the_same_blocks(load: Load, tmp_path: Path) -> None:
    folder = save("causal_text", tmp_path / "saved")
    masked, causal = load("masked_text", folder), load("causal_text", folder)
    assert masked.sha256 == causal.sha256
    sample, whole = masked.train.sample(2, draw=5), causal.train.sample(2, draw=5)["input_ids"]
    assert torch.equal(torch.where(sample["labels"] == -100, sample["input_ids"], sample["labels"]), whole)


def test_labels_are_live_on_the_answer_only(load: Load, tmp_path: Path) -> None:
    data = load("captions", save("captions", tmp_path / "saved"))
    reader = train(sentences(0, 200), Vocabulary(**SMALL))
    said = set()
    for index in range(len(data.train)):
        labels = data.train.sample(index, 0)["labels"]
        said.add(reader.decode(labels[labels != -100].tolist(), skip_special_tokens=False))
    assert said <= {f" {turn['assistant']}<eos>" for number in range(40) for turn in turns(number)}
    assert len(said) > 40


@pytest.mark.parametrize(
    ("name", "keys", "line"),
    [
        ("images", {"image_column": "image"}, "data.image_column=image: no such column; the data set has img, label"),
        ("images", {"label_column": "fine"}, "data.label_column=fine: no such column; the data set has img, label"),
        ("images", {"num_labels": 5}, "data.num_labels=5: data.label_column=label holds 5"),
        ("causal_text", {"text_column": "story"}, "data.text_column=story: no such column; the data set has text"),
        ("causal_text", {"vocab_size": 200}, "data.vocab_size=200: data.tokenizer={tokenizer} has 300 tokens"),
        ("masked_text", {"sequence_length": 2}, "data.sequence_length=2: must be 3 or more"),
        ("masked_text", {"tokenizer": "/no/such"}, "data.tokenizer=/no/such: neither a readable tokenizer.json nor"),
        ("captions", {"text_column": "images"}, "data.text_column=images: must hold lists of texts named user and"),
        ("captions", {"sequence_length": 5}, "data.sequence_length=5: too short for every question"),
        (
            "captions",
            {"sequence_lenght": 5},
            "Vocabulary.__init__() got an unexpected keyword argument 'sequence_lenght'",
        ),
    ],
)
def test_a_mistake_is_one_line(
    name: str, keys: dict[str, object], line: str, load: Load, tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(InstantiationException) as caught:
        load(name, save(name, tmp_path / "saved"), **keys)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError | TypeError)
    assert str(cause).startswith(line.format(tokenizer=tokenizer))
    assert "\n" not in str(cause)
