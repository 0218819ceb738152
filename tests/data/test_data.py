"""What holds for every data set in conf/data/, at tiny."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from gradbench.config import register
from gradbench.data.base import Data, Sample, Split
from gradbench.data.captions import CaptionSplit
from gradbench.data.images import ImageSplit
from gradbench.data.order import batches, held_out_batches, sha256_of
from gradbench.data.text import TextSplit
from gradbench.model.loss import CrossEntropy

CONF = Path(__file__).parents[2] / "conf"
DATA = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))
MODEL_OF = {"images": "vit", "masked_text": "modernbert", "causal_text": "llama", "captions": "nanovlm"}

Load = Callable[..., Data]
Config = Callable[..., DictConfig]

each = pytest.mark.parametrize("name", DATA)


def contents(split: Split) -> set[bytes]:
    """Return what a model could remember of each sample."""
    if isinstance(split, TextSplit):
        return {split.blocks[index].tobytes() for index in range(len(split))}
    assert isinstance(split, ImageSplit | CaptionSplit)
    indices = split.indices if isinstance(split, ImageSplit) else split.shown
    return {split.pictures[index].numpy().tobytes() for index in set(indices)}


def same(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@each
def test_there_is_enough_of_it(name: str, load: Load) -> None:
    data = load(name)
    assert len(data.train) > 1500
    assert 128 <= len(data.held_out) <= 300  # its loss is taken four times per cell


@each
def test_no_content_is_on_both_sides(name: str, load: Load) -> None:
    data = load(name)
    assert not contents(data.train) & contents(data.held_out)


@each
def test_the_draw_alone_decides_a_sample(name: str, load: Load) -> None:
    split = load(name).train
    torch.manual_seed(1)
    one = split.sample(5, draw=7)
    torch.manual_seed(2)
    assert same(one, split.sample(5, draw=7))


@each
def test_a_batch_is_what_a_model_takes(name: str, load: Load, config: Config) -> None:
    keys = config(name)
    for batch in (next(batches(load(name), [32], seed=0)), next(held_out_batches(load(name), 32))):
        assert {tensor.shape[0] for tensor in batch.values()} == {32}
        if "image_size" in keys:
            side, pixels = keys.image_size, batch["pixel_values"]
            assert pixels.shape == (32, keys.num_channels, side, side)
            assert (pixels.dtype, pixels.min(), pixels.max()) == (torch.float32, -1, 1)
        if "vocab_size" in keys:
            assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["labels"].shape
            assert batch["input_ids"].shape[1] <= keys.sequence_length
            assert 0 <= batch["input_ids"].min() <= batch["input_ids"].max() < keys.vocab_size
        assert batch["labels"].dtype == torch.int64
        live = batch["labels"][batch["labels"] != -100]
        assert 0 <= live.min() <= live.max() < keys.get("vocab_size", keys.get("num_labels"))


@each
def test_every_sample_has_a_label_and_padding_has_none(name: str, load: Load) -> None:
    batch = next(batches(load(name), [64], seed=0))
    assert (batch["labels"] != -100).view(64, -1).any(1).all()
    if "attention_mask" in batch:
        padding = batch["attention_mask"] == 0
        assert set(batch["input_ids"][padding].tolist()) == {0}  # <pad>
        assert set(batch["labels"][padding].tolist()) == {-100}


@pytest.mark.parametrize("name", [name for name in DATA if name != "images"])
def test_lengths_are_ragged(name: str, load: Load) -> None:
    for batch in batches(load(name), [32] * 3, seed=0):
        lengths = batch["attention_mask"].sum(1)
        assert lengths.min() < lengths.max() == batch["input_ids"].shape[1]
        # Padding is on the right: a text is seen up to its end.
        assert torch.equal(batch["attention_mask"], (torch.arange(int(lengths.max())) < lengths[:, None]).long())


@pytest.mark.parametrize("name", ["causal_text", "captions"])
def test_a_causal_label_is_the_next_token(name: str, load: Load) -> None:
    batch = next(batches(load(name), [64], seed=0))
    live = batch["labels"][:, :-1] != -100
    assert torch.equal(batch["labels"][:, :-1][live], batch["input_ids"][:, 1:][live])
    assert set(batch["labels"][:, -1].tolist()) == {-100}


HASHES = """
import sys
from pathlib import Path
from hydra.utils import instantiate
from omegaconf import OmegaConf
from gradbench.data.order import batches, sha256_of
for path in sys.argv[1:]:
    data = instantiate(OmegaConf.load(path), cache=Path(path).parent)  # an empty one
    print(data.sha256, sha256_of(next(batches(data, [32], seed=3))))
print(*({"matplotlib", "sklearn", "datasets", "transformers"} & sys.modules.keys()))
"""


def test_data_and_batches_are_the_same_in_another_process_with_another_hash_seed(
    load: Load, config: Config, tmp_path: Path
) -> None:
    for name in DATA:
        OmegaConf.save(config(name), tmp_path / name)
    command = [sys.executable, "-c", HASHES, *(str(tmp_path / name) for name in DATA)]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    here = [(load(name).sha256, sha256_of(next(batches(load(name), [32], seed=3)))) for name in DATA]
    *there, imported = [tuple(line.split()) for line in done.stdout.splitlines()]
    assert there == here
    assert imported == ()  # each would cost every cell seconds


def refusal(load: Load, name: str, override: str) -> str:
    with pytest.raises(InstantiationException) as caught:
        load(name, override)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError | TypeError)
    assert "\n" not in str(cause)
    return str(cause)


ALL_TEXT = ("masked_text", "causal_text", "captions")
MISTAKES: list[tuple[Iterable[str], str, str]] = [
    (DATA, "data.held_out=0", "data.held_out=0: must be 1 or more"),
    (
        ["images", "masked_text", "captions"],
        "data.held_out=100000",
        "data.held_out=100000: none of the [0-9]+ samples would be left to train on",
    ),
    (["masked_text", "captions"], "data.sequence_length=2", "data.sequence_length=2: "),
    (ALL_TEXT, "data.vocab_size=200", "data.vocab_size=200: must be 261 or more, for every byte has a token"),
    (ALL_TEXT, "data.eos_token_id=9", "data.eos_token_id=9: a tokenizer that is trained on the spot has 2"),
    (ALL_TEXT, "+data.sequence_lenght=9", ".*unexpected keyword argument 'sequence_lenght'"),
    (["images"], "+data.side=9", ".*unexpected keyword argument 'side'"),
    (["images"], "data.num_labels=100", "data.num_labels=100: the handwritten digits have 10"),
    (["masked_text"], "data.mlm_probability=1.5", "data.mlm_probability=1.5: must lie between 0 and 1"),
    (["captions"], "data.num_channels=3", "data.num_channels=3: glyphs have 1, their brightness"),
]


@pytest.mark.parametrize(
    ("name", "override", "line"), [(name, override, line) for names, override, line in MISTAKES for name in names]
)
def test_a_mistake_is_one_line(name: str, override: str, line: str, load: Load) -> None:
    assert re.match(line, refusal(load, name, override))


@pytest.mark.slow
@each
def test_its_model_learns_what_holds_for_the_held_out_side(name: str, load: Load, cache: Path) -> None:
    register()
    with initialize_config_dir(str(CONF), version_base=None):
        node = compose("config", [f"model={MODEL_OF[name]}"])
    torch.manual_seed(0)
    model, data, loss = instantiate(node.model), instantiate(node.data, cache=cache), CrossEntropy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def held_out_loss() -> float:
        model.eval()
        with torch.no_grad():
            sums = [(loss(model, batch).item(), loss.count(batch)) for batch in held_out_batches(data, 64)]
        model.train()
        return sum(total for total, _ in sums) / sum(count for _, count in sums)

    before = held_out_loss()
    for batch in batches(data, [32] * 60, seed=0):
        optimizer.zero_grad()
        (loss(model, batch) / loss.count(batch)).backward()
        optimizer.step()
    assert held_out_loss() < 0.9 * before
