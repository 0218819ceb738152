"""Expansion, identity and names of cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gradbench.config import UserError, cell_id
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand
from gradbench.sweep.vet import vet

PAPER = ["optimizer=glob(*)", "strategy=glob(*)"]


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def cells(composer: Composer, *overrides: str, multirun: bool = True):
    return expand(composer, overrides, multirun=multirun).cells


def test_the_two_globs_are_the_papers_grid(composer):
    found = {(cell.axes["optimizer"], cell.axes["strategy"]) for cell in cells(composer, *PAPER)}
    optimizers = ("sgd", "adam", "adagrad", "adadelta", "cg")
    assert found == {(o, s) for o in optimizers for s in ("standard", "checkpointing", "accumulation")}


def test_names_are_readable_and_distinct(composer):
    names = [cell.name for cell in cells(composer, *PAPER, "seed=0,1", "optimizer.lr=0.1,0.2")]
    assert len(set(names)) == len(names) == 60
    assert "vit·adam·checkpointing·lr=0.1·s0" in names


def test_id_ignores_how_and_where_it_runs(composer):
    (plain,) = cells(composer)
    (moved,) = cells(
        composer,
        "runs=/elsewhere",
        "tracking.uri=http://x",
        "resources.mem_gb=3",
        "launch.workers=1",
        "probe.audit=false",
    )
    assert plain.id == moved.id
    (other,) = cells(composer, "train.updates=61")
    assert other.id != plain.id


def test_id_is_the_same_in_another_process_with_another_hash_seed(composer):
    code = "from gradbench.sweep.compose import Composer as C; from gradbench.sweep.grid import expand as e; print(e(C(), [], multirun=False).cells[0].id)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == cells(composer)[0].id


def test_canonical_form_of_numbers():
    assert cell_id({"lr": 1}) == cell_id({"lr": 1.0}) != cell_id({"lr": 1.5})
    assert cell_id({"a": True}) != cell_id({"a": 1})
    assert cell_id({"a": 1, "b": 2}) == cell_id({"b": 2, "a": 1})


def test_H1_inapplicable_override_is_reported_per_cell(composer):
    found = {cell.axes["optimizer"]: cell for cell in cells(composer, "optimizer=glob(*)", "optimizer.momentum=0.9")}
    assert found["sgd"].skip is None
    assert found["sgd"].science["optimizer"]["momentum"] == 0.9
    assert found["cg"].skip == "cg: `optimizer.momentum` does not apply"
    assert [name for name, cell in found.items() if cell.skip] == ["adadelta", "adagrad", "adam", "cg"]


def test_H1_a_key_that_applies_nowhere_is_a_mistake(composer):
    with pytest.raises(UserError, match=r"^optimizer.momentun=0.9: no such key; did you mean optimizer.momentum\?$"):
        cells(composer, "optimizer=sgd,adam", "optimizer.momentun=0.9")


def test_H1_a_key_that_applies_nowhere_is_told_with_the_keys_of_all_choices(composer):
    with pytest.raises(UserError) as caught:
        cells(composer, "optimizer=sgd,adam", "optimizer.foo=1")
    line, _, keys = str(caught.value).partition("; allowed: ")
    assert line == "optimizer.foo=1: no such key"
    assert {"optimizer.lr", "optimizer.momentum", "optimizer.betas"} <= set(keys.split(", "))
    assert "_partial_" not in keys


def test_H1_keys_that_never_apply_together_are_skips_not_mistakes(composer):
    found = cells(composer, "strategy=glob(*)", "strategy.steps=2", "strategy.every_n_layers=2")
    assert all(cell.skip for cell in found)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.betas=foo", "vit·adam·standard·s0: optimizer: "),
        ("optimizer.eps=-1", "vit·adam·standard·s0: optimizer: Invalid epsilon value: -1"),
        ("strategy._target_=os.getcwd", "strategy._target_=os.getcwd: makes no Strategy"),
    ],
)
def test_what_a_constructor_refuses_is_a_mistake_before_anything_starts(composer, override, line):
    with pytest.raises(UserError) as caught:
        vet(cells(composer, override))
    assert str(caught.value).startswith(line)


def test_the_updates_of_a_cell_are_those_of_its_arm(composer):
    words = ("strategy=accumulation", "strategy.arm=same_micro_same_samples", "train.updates=150")
    (cell,), _remarks = vet(cells(composer, *words))
    assert cell.updates == 38


def test_H1_the_shared_key_reaches_every_optimizer(composer):
    assert {cell.science["optimizer"]["lr"] for cell in cells(composer, "optimizer=glob(*)", "optimizer.lr=0.25")} == {
        0.25
    }


def test_H2_auxiliary_files_are_no_cells_and_yml_is_reported(tmp_path):
    group = tmp_path / "optimizer"
    group.mkdir()
    (group / "_base.yaml").write_text("lr: 1\n")
    (group / "foo.yml").write_text("lr: 1\n")
    (group / "mine.yaml").write_text("_target_: torch.optim.SGD\n_partial_: true\nlr: 0.5\n")
    grid = expand(Composer([str(tmp_path)]), ["optimizer=glob(*)"], multirun=True)
    assert [cell.axes["optimizer"] for cell in grid.cells] == ["adadelta", "adagrad", "adam", "cg", "mine", "sgd"]
    assert grid.notes == (f"{group / 'foo.yml'} is not read: rename it to .yaml",)


def test_H6_impossible_cells_are_skipped_with_a_sentence(composer):
    vetted, _remarks = vet(cells(composer, "strategy=glob(*)", "train.batch_size=2"))
    skipped = [cell for cell in vetted if cell.skip]
    assert [cell.axes["strategy"] for cell in skipped] == ["accumulation"]
    assert "train.batch_size=2" in skipped[0].skip


def test_a_batch_that_does_not_divide_is_remarked_upon_once(composer):
    _cells, remarks = vet(cells(composer, *PAPER, "train.batch_size=10"))
    assert remarks == [
        "strategy.steps=4 does not divide train.batch_size=10: 2 micro-batches of 3 samples and 2 of 2, "
        "weighted by their tokens, so the update is the same"
    ]
    assert vet(cells(composer, *PAPER))[1] == []


def test_H7_duplicates_run_once(composer):
    for overrides in (["optimizer=sgd,sgd"], ["optimizer.lr=0.1,1e-1"], ["seed=0,0"]):
        grid = expand(composer, overrides, multirun=True)
        assert len(grid.cells) == 1
        assert grid.notes == ("1 of 2 cells are spellings of another one and run once",)


def test_H7_an_alias_and_the_order_of_keys_are_the_same_cell(tmp_path, composer):
    group = tmp_path / "optimizer"
    group.mkdir()
    (group / "one.yaml").write_text("_target_: torch.optim.SGD\n_partial_: true\nlr: 0.5\n")
    (group / "two.yaml").write_text("lr: 5e-1\n_partial_: true\n_target_: torch.optim.SGD\n")
    assert len(expand(Composer([str(tmp_path)]), ["optimizer=one,two"], multirun=True).cells) == 1
    assert cells(composer, "seed=3", "optimizer=sgd")[0].id == cells(composer, "optimizer=sgd", "seed=3")[0].id


def test_H5_resources_belong_to_the_cell(composer):
    found = cells(composer, "resources.mem_gb=2,3")
    assert len(found) == 1, "resources are not science"
    assert found[0].config["resources"]["mem_gb"] == 2


def test_S18_ids_are_short_whatever_the_overrides(composer):
    value = "/=ü " * 50
    (cell,) = cells(composer, *[f"+optimizer.key{n}={n}" for n in range(30)], f"+optimizer.note='{value}'")
    assert len(cell.id) == 12
    assert cell.science["optimizer"]["note"] == value
    assert json.loads(json.dumps(cell.science)) == cell.science


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer=adan", "optimizer=adan: unknown optimizer; allowed: adadelta, adagrad, adam, cg, sgd; did you mean adam?"),
        ("strategy=chekpointing", "strategy=chekpointing: unknown strategy; allowed: accumulation, checkpointing, standard; did you mean checkpointing?"),
        ("model=bert", "model=bert: unknown model; allowed: llama, modernbert, nanovlm, vit"),
        ("size=huge", "size=huge: unknown size; allowed: paper, tiny"),
        ("precision=fp8", "precision=fp8: must be one of fp32, bf16"),
        ("train.updates=0", "train.updates=0: must be 1 or more"),
        ("train.updates=many", "train.updates=many: must be an integer of 1 or more"),
        ("train.batch_size=-1", "train.batch_size=-1: must be 1 or more"),
        ("train.eval_every=0", "train.eval_every=0: must be 1 or more"),
        ("optimizer.lr=-1", "optimizer.lr=-1: must be positive and finite"),
        ("optimizer.lr=0", "optimizer.lr=0: must be positive and finite"),
        ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
        ("optimizer.lr=null", "optimizer.lr=null: must be a number"),
        ("seed=-1", "seed=-1: must be between 0 and 2**32 - 1"),
        ("resources.mem_gb=-1", "resources.mem_gb=-1: must be more than 0"),
        ("resources.mem_gb=nan", "resources.mem_gb=nan: must be more than 0"),
        ("resources.time_min=0", "resources.time_min=0: must be more than 0"),
        ("resources.gpus=-1", "resources.gpus=-1: must be 0 or more"),
        ("gate.samples=0", "gate.samples=0: must be 1 or more"),
        ("runs=''", "runs= is empty: it names the folder of the results"),
        ("launch.workers=0", "launch.workers=0: must be 1 or more"),
        ("optimizer={lr:0.5}", "optimizer={lr:0.5}: takes the name of a choice (adadelta, adagrad, adam, cg, sgd); one of its keys is optimizer.key=value"),
        ("optimizer=[1]", "optimizer=[1]: takes the name of a choice (adadelta, adagrad, adam, cg, sgd); one of its keys is optimizer.key=value"),
        ("~seed", "seed is missing: every cell needs it"),
        ("~train.updates", "~train.updates: cannot be left out"),
        ("tracking.uri=ftp://x", "tracking.uri=ftp://x: no such store; allowed: null (a database in the runs folder), sqlite:///FILE.db, http://HOST:PORT, https://HOST"),
        ("rerun=some", "rerun=some: must be one of missing, all"),
        ("trian.updates=1", "trian.updates=1: no such key; did you mean train.updates?"),
        ("train.update=1", "train.update=1: no such key; did you mean train.updates?"),
        ("train.foo=1", "train.foo=1: no such key; allowed: train.batch_size, train.eval_every, train.updates, train.warmup"),
        ("foo=1", "foo=1: no such key; allowed: data, gate, launch, model, optimizer, plan, precision, probe, rerun, resources, runs, seed, size, strategy, tracking, train"),
        ("strategy.foo=1", "strategy.foo=1: no such key; allowed: none"),
        ("data.folder=/nope", "data.folder=/nope: no such key at size=tiny; allowed: data.held_out, data.image_size, data.num_channels, data.num_labels"),
        ("train.updates=1.5", "train.updates=1.5: must be an integer of 1 or more"),
        ("train.updates=null", "train.updates=null: must be an integer of 1 or more"),
        ("launch.workers=x", "launch.workers=x: must be an integer of 1 or more, or null"),
        ("probe.audit=maybe", "probe.audit=maybe: must be true or false"),
        ("train=5", "train=5: must be set by its keys, such as train.updates"),
        ("optimizer.betas.x=3", "optimizer.betas.x=3: invalid literal for int() with base 10: 'x'"),
        ("optimizer=glob(zz*)", "optimizer=glob(zz*): matches nothing; allowed: adadelta, adagrad, adam, cg, sgd"),
        ("optimizer.lr=interval(0.1,1)", "optimizer.lr=interval(0.1,1): an interval is no list of values; a grid takes lists, range(...) or glob(...)"),
        ("seed=", "seed=: must be an integer"),
        ("optimizer", "optimizer: not an override; write key=value"),
        ("hydra.launcher.x=1,2", "hydra.launcher.x=1,2: cannot differ from cell to cell"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_line(composer, override, line):
    with pytest.raises(UserError) as caught:
        cells(composer, override)
    assert str(caught.value) == line


def test_several_values_need_multirun(composer):
    with pytest.raises(UserError, match=r"^seed=0,1: several values need -m"):
        cells(composer, "seed=0,1", multirun=False)


def test_a_thousand_cells_share_compositions(composer, monkeypatch):
    composed = []
    monkeypatch.setattr(
        Composer, "_compose", lambda self, groups, real=Composer._compose: composed.append(1) or real(self, groups)
    )
    found = cells(Composer(), "optimizer=glob(*)", "seed=range(20)")
    assert (len(found), len(composed)) == (100, 5)
