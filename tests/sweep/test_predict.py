"""Cells share plans; what is known is not made again; the largest micro-batch is the largest."""

import io

import pytest
from rich.console import Console

from gradbench.sweep import predict as module
from gradbench.sweep.gpus import RESERVE_BYTES
from gradbench.sweep.grid import expand
from gradbench.sweep.imagined import planned
from gradbench.sweep.predict import predict

SMALL = ("model.num_hidden_layers=1", "train.batch_size=8")


@pytest.fixture
def cells_of(composer, runs):
    return lambda *words: expand(composer, [f"runs={runs}", *SMALL, *words], multirun=True).cells


@pytest.fixture
def here(monkeypatch):
    """Make plans in this process, which has imported what they need."""
    made = []

    def noted(update, cache):
        made.append(update)
        return planned(update, cache)

    monkeypatch.setattr(module, "_known", noted)
    return made


def silent():
    return Console(file=io.StringIO())


def test_a_plan_that_nobody_knows_is_made_in_another_process_and_then_known(cells_of, monkeypatch):
    cells = cells_of("optimizer=sgd", "strategy=accumulation")
    (first,) = predict(cells, silent()).values()
    assert first.plan.micro_batches == 4
    monkeypatch.setattr(module, "ProcessPoolExecutor", None)
    assert predict(cells, silent()) == {cells[0].id: first}


def test_cells_that_differ_in_seed_budget_and_lr_share_a_plan(cells_of, here):
    cells = cells_of("seed=0,1", "train.updates=4,5", "optimizer.lr=0.1,0.2")
    predictions = predict(cells, silent())
    assert len(cells) == len(predictions) == 8
    assert len(here) == len(set(predictions.values())) == 1


def test_a_cell_that_is_skipped_is_not_predicted(cells_of, here):
    assert predict(cells_of("optimizer=sgd", "~optimizer.momentum", "+optimizer.betas=1")[:0], silent()) == {}


def test_data_of_the_hub_is_imagined(composer, runs, here):
    words = [f"runs={runs}", "size=paper", "model=glob(*)", "train.batch_size=2"]
    shapes = {}
    for cell in expand(composer, words, multirun=True).cells:
        update = module._update_of(cell)
        shapes[cell.axes["model"]] = {key: shape for key, (shape, _) in update.batch.items()}
    text = {"input_ids": (2, 256), "attention_mask": (2, 256), "labels": (2, 256)}
    assert shapes == {
        "vit": {"pixel_values": (2, 3, 224, 224), "labels": (2,)},
        "llama": text,
        "modernbert": dict.fromkeys(text, (2, 512)),
        "nanovlm": text | {"pixel_values": (2, 3, 224, 224)},
    }


def test_each_of_two_processes_has_half_of_the_batch(cells_of):
    (cell,) = cells_of("resources.processes=2", "strategy=accumulation")
    update = module._update_of(cell)
    assert (update.samples, update.batch_size) == (4, 4)


@pytest.mark.parametrize("strategy", ["standard", "accumulation"])
def test_the_largest_micro_batch_fits_and_one_more_does_not(cells_of, here, runs, strategy):
    (cell,) = cells_of(f"strategy={strategy}")
    capacity = RESERVE_BYTES + 50_000_000
    found = predict([cell], silent(), capacity)[cell.id]
    update = module._update_of(cell)
    most, more = (
        planned(update.resized(size * found.plan.micro_batches), runs / "cache" / "plan")
        for size in (found.micro_batch, found.micro_batch + 1)
    )
    assert most.micro_batches == more.micro_batches == found.plan.micro_batches
    assert most.memory.peak_bytes <= 50_000_000 < more.memory.peak_bytes
    assert len(here) <= 6


def test_data_that_cannot_be_had_is_a_reason(cells_of, monkeypatch):
    def refuse(*_):
        raise ValueError("no such data\nat all")

    monkeypatch.setattr(module, "_first_batch", refuse)
    (cell,) = cells_of()
    assert predict([cell], silent())[cell.id].why == "ValueError: no such data"


@pytest.mark.slow
def test_what_a_cell_prints_does_not_end_up_in_the_document(composer, runs, tmp_path, monkeypatch, capfd):
    (tmp_path / "loud.py").write_text(
        "from gradbench.strategy.standard import Standard\n\n\nclass Loud(Standard):\n"
        "    def attach(self, *args):\n        print('attached')\n        super().attach(*args)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    words = [f"runs={runs}", *SMALL, "optimizer=sgd", "strategy._target_=loud.Loud"]
    (cell,) = expand(composer, words, multirun=False).cells
    assert predict([cell], silent())[cell.id].plan is not None
    said = capfd.readouterr()
    assert (said.out, "attached" in said.err) == ("", True)
