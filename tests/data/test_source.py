"""Data sets that others made, from small folders that are saved here."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradbench.data.source import Rows, Source, divide

datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")

TEXTS = [f"Paragraph number {number} tells a story." for number in range(40)]


@pytest.fixture(autouse=True)
def no_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` writes beside the folders that it reads."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")


def picture(shade: int) -> Image.Image:
    return Image.fromarray(np.full((6, 8, 3), shade, dtype=np.uint8))


def texts(rows: Rows) -> list[str]:
    return rows.column("text_column", "text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a train split, whose every tenth text is blank, and a validation split."""
    train = [" " if number % 10 == 9 else text for number, text in enumerate(TEXTS)]
    held_out = ["", "A new one.", TEXTS[3], "Another new one.", "A third."]
    parts = {"train": train, "validation": held_out}
    sides = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in parts.items()}
    datasets.DatasetDict(sides).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def source(folder: Path, **how: object) -> Source:
    return Source("some/name", folder=str(folder), **{"held_out": 4, **how})


def test_blank_rows_are_left_out_and_no_text_is_on_both_sides(folder: Path) -> None:
    train, held_out = divide(source(folder, held_out_split="validation"), "text_column", "text")
    assert len(train) == len(texts(train)) == 36
    assert texts(held_out) == ["A new one.", "Another new one.", "A third."]


def test_held_out_rows_of_another_split_are_evenly_spaced(folder: Path) -> None:
    _, held_out = divide(source(folder, held_out_split="validation", held_out=2), "text_column", "text")
    assert texts(held_out) == ["A new one.", "Another new one."]


def test_without_another_split_rows_are_chosen_by_content(folder: Path, tmp_path: Path) -> None:
    train, held_out = divide(source(folder), "text_column", "text")
    assert len(held_out) == 4
    assert sorted(texts(train) + texts(held_out)) == sorted(
        text for number, text in enumerate(TEXTS) if number % 10 != 9
    )
    datasets.Dataset.from_dict({"text": texts(train)[::-1] + texts(held_out)}).save_to_disk(tmp_path / "other")
    _, again = divide(source(tmp_path / "other"), "text_column", "text")
    assert sorted(texts(again)) == sorted(texts(held_out))


def test_the_hash_is_that_of_the_content_however_it_is_kept(folder: Path, tmp_path: Path) -> None:
    saved, _ = divide(source(folder, held_out_split="validation"), "text_column", "text")
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_dict({"text": texts(saved)}).to_parquet(tmp_path / "files" / "train.parquet")
    datasets.Dataset.from_dict({"text": ["new"]}).to_parquet(tmp_path / "files" / "validation.parquet")
    files, held_out = divide(source(tmp_path / "files", held_out_split="validation"), "text_column", "text")
    assert files.sha256 == saved.sha256
    assert texts(held_out) == ["new"]
    assert files.select(range(35)).sha256 != files.sha256


def test_pictures_are_known_by_their_bytes(tmp_path: Path) -> None:
    pictures = [[picture(1)], [picture(2)], [picture(1), picture(2)], [], [picture(1)], [picture(3)]]
    columns = {"images": datasets.List(datasets.Image()), "row": datasets.Value("int64")}
    rows = datasets.Dataset.from_dict({"images": pictures, "row": list(range(6))}, datasets.Features(columns))
    rows.save_to_disk(tmp_path / "saved")
    train, held_out = divide(source(tmp_path / "saved", held_out=1), "image_column", "images")
    sides = [sorted(side.column("key", "row")) for side in (train, held_out)]
    assert sorted(sides[0] + sides[1]) == [0, 1, 4, 5]  # those with just one picture
    assert [0, 4] in [[row for row in side if row in (0, 4)] for side in sides]  # both have the same
    for side in (train, held_out):
        shades = [np.asarray(Image.open(BytesIO(side.content(row))))[0, 0, 0] for row in range(len(side))]
        assert shades == [{0: 1, 1: 2, 4: 1, 5: 3}[row] for row in side.column("key", "row")]


def test_files_in_folders(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / "train" / name).mkdir(parents=True)
        for shade in range(4):
            picture(10 * shade + len(name) + (name == "dog")).save(tmp_path / "pets" / "train" / name / f"{shade}.png")
    train, held_out = divide(source(tmp_path / "pets", held_out=2), "image_column", "image")
    assert (len(train), len(held_out)) == (6, 2)
    assert sorted(train.column("label_column", "label") + held_out.column("label_column", "label")) == [0] * 4 + [1] * 4
    assert Image.open(BytesIO(train.content(0))).size == (8, 6)


def refusal(source: Source, column: str = "text") -> str:
    with pytest.raises(ValueError) as caught:
        divide(source, "text_column", column)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    assert refusal(source(tmp_path / "no")) == f"data.folder={tmp_path / 'no'}: no such folder"
    assert refusal(source(folder), "txt") == "data.text_column=txt: no such column; the data set has text"
    line = refusal(source(folder, train_split="training"))
    assert line == "data.train_split=training: no such split; the data set has train, validation"
    assert refusal(source(folder, held_out_split="test")).startswith("data.held_out_split=test: no such split")
    assert refusal(source(folder, held_out=0)) == "data.held_out=0: must be 1 or more"
    assert refusal(source(folder, held_out=99)).startswith("data.held_out=99: none of the 36 samples")
    line = refusal(source(folder, held_out_split="train"))
    assert line == "data.held_out_split=train: all of it is in the train split too"


def test_a_folder_without_data(tmp_path: Path) -> None:
    assert refusal(source(tmp_path)).startswith(f"data.folder={tmp_path}: ")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and nothing more")
    assert refusal(source(tmp_path)).startswith(f"data.folder={tmp_path}: ")


def test_a_column_of_something_else(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": [1, 2, 3]}).save_to_disk(tmp_path / "saved")
    assert refusal(source(tmp_path / "saved")) == "data.text_column=text: there is no text and no picture in it"


def test_L9_without_a_network_the_data_set_and_the_remedy_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    line = refusal(Source("nobody/nothing"))
    assert line.startswith("data.name=nobody/nothing: ")
    assert line.endswith("; data.folder=... reads a local copy")


def test_without_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal(source(folder)) == "data.name=some/name: needs `datasets`; pip install 'gradbench[hub]'"
