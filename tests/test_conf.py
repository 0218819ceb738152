"""The YAML files: one per choice, every one composes, and the top of a group is exactly the paper's."""

from pathlib import Path

import pytest
import yaml

from gradbench.config import CONF, check
from gradbench.sweep.compose import Composer

FAMILIES = ("model", "optimizer", "strategy")
FILES = [path.relative_to(CONF) for family in FAMILIES for path in sorted((CONF / family).rglob("*.yaml"))]
CHOICES = [path for path in FILES if path.stem not in ("tiny", "paper")]
PAPER = {
    "optimizer": {"sgd", "adam", "adagrad", "adadelta", "cg"},
    "strategy": {"standard", "checkpointing", "accumulation"},
    "model": {"vit", "modernbert", "llama", "nanovlm"},
}


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize("size", ["tiny", "paper"])
@pytest.mark.parametrize("path", CHOICES, ids=str)
def test_every_choice_composes_at_every_size(composer, path, size):
    group, choice = path.parts[0], "/".join((*path.parts[1:-1], path.stem))
    config, choices = composer.cell([f"{group}={choice}", f"size={size}"])
    check(config)
    assert choices[group] == choice
    assert config["size"] == size
    assert config[group]["_target_"]


@pytest.mark.parametrize("group", ["optimizer", "strategy"])
def test_the_top_of_a_group_is_the_papers(composer, group):
    assert set(composer.choices(group)) == PAPER[group]
    assert set(composer.choices("model")) >= PAPER["model"]


def test_a_cell_fits_on_one_screen():
    assert len((CONF / "config.yaml").read_text().splitlines()) <= 20


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_files_are_lower_case_and_parse(path: Path):
    assert path.name == path.name.lower()
    assert yaml.safe_load(path.read_text())


def test_sweeping_a_model_brings_its_data_along(composer):
    data = {model: composer.cell([f"model={model}"])[1]["data"] for model in PAPER["model"]}
    assert data == {"vit": "images", "modernbert": "masked_text", "llama": "causal_text", "nanovlm": "captions"}
