"""A plan is kept under all that it depends on, and found again."""

import dataclasses
import json

import pytest

from gradbench.sweep import imagined
from gradbench.sweep.imagined import Imagined, NoPlan, known, planned

MODEL = {
    "_target_": "gradbench.model.vit.build",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
    "image_size": 8,
    "num_channels": 1,
    "num_labels": 10,
}
SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "momentum": 0.0}
STANDARD = {"_target_": "gradbench.strategy.standard.Standard"}
BATCH = {"pixel_values": ((4, 1, 8, 8), "float32"), "labels": ((4,), "int64")}
UPDATE = Imagined({"model": MODEL, "optimizer": SGD, "strategy": STANDARD, "precision": "fp32"}, 4, BATCH)


def changed(room, **values):
    return dataclasses.replace(UPDATE, config={**UPDATE.config, room: {**UPDATE.config[room], **values}})


@pytest.mark.parametrize(
    "other",
    [
        changed("model", hidden_size=32),
        changed("optimizer", momentum=0.9),
        changed("strategy", _target_="gradbench.strategy.checkpointing.Checkpointing"),
        dataclasses.replace(UPDATE, config={**UPDATE.config, "precision": "bf16"}),
        dataclasses.replace(UPDATE, batch={**BATCH, "pixel_values": ((4, 1, 8, 8), "float64")}),
        UPDATE.resized(5),
    ],
)
def test_what_changes_the_plan_changes_the_key(other):
    assert other.key != UPDATE.key


def test_a_learning_rate_changes_no_shape():
    assert changed("optimizer", lr=0.3).key == UPDATE.key


@pytest.mark.parametrize("name", ["_our_code", "version"])
def test_other_code_and_other_versions_change_the_key(monkeypatch, name):
    before = UPDATE.key
    monkeypatch.setattr(imagined, name, lambda *_: "another")
    assert UPDATE.key != before


def test_the_users_own_module_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_vit.py").write_text("from gradbench.model.vit import build\n")
    mine = changed("model", _target_="my_vit.build")
    before = mine.key
    (tmp_path / "my_vit.py").write_text("from gradbench.model.vit import build  # another\n")
    assert mine.key != before


def test_resizing_keeps_the_window_of_the_strategy():
    larger = UPDATE.resized(12)
    assert (larger.samples, larger.batch_size) == (12, 12)
    assert larger.batch["pixel_values"] == ((12, 1, 8, 8), "float32")
    assert dataclasses.replace(UPDATE, batch_size=1).resized(12).batch_size == 3  # four micro-batches of the baseline's


def test_a_plan_is_made_once(tmp_path, monkeypatch):
    assert known(UPDATE, tmp_path) is None
    record = planned(UPDATE, tmp_path)
    assert record.memory.params_bytes > 0
    assert known(UPDATE, tmp_path) == record
    monkeypatch.setattr(imagined, "_make", None)
    assert planned(UPDATE, tmp_path) == record


def test_a_damaged_file_is_made_again(tmp_path):
    record = planned(UPDATE, tmp_path)
    (file,) = tmp_path.iterdir()
    for text in ("", "{", "{}", "[]", '{"plan": {}}', '{"plan": {"memory": {}}}'):
        file.write_text(text)
        assert known(UPDATE, tmp_path) is None
    assert planned(UPDATE, tmp_path) == record == known(UPDATE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_the_file_tells_of_what_it_is(tmp_path):
    planned(UPDATE, tmp_path)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["of"]["config"] == UPDATE.config


def test_that_there_can_be_no_plan_is_kept_too(tmp_path, monkeypatch):
    searching = changed("optimizer", _target_="gradbench.optimizer.cg.CG", line_search="armijo")
    del searching.config["optimizer"]["momentum"]
    for _ in range(2):
        with pytest.raises(NoPlan, match="depends on numbers"):
            planned(searching, tmp_path)
        monkeypatch.setattr(imagined, "_make", None)
    with pytest.raises(NoPlan):
        known(searching, tmp_path)


def test_what_raises_is_no_plan_and_is_tried_again(tmp_path):
    with pytest.raises(NoPlan, match=r"^TypeError: build\(\) got an unexpected keyword argument 'num_heads'$"):
        planned(changed("model", num_heads=3), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("")
    assert planned(UPDATE, tmp_path / "file").micro_batches == 1
