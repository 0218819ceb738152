"""The typed frame: what a value may be, what a cell is, how it is identified."""

import subprocess
import sys

import pytest

from gradbench.config import CONF, SCIENCE, Frame, UserError, cell_id, check, check_processes, science
from gradbench.sweep.compose import Composer


@pytest.fixture(scope="module")
def config():
    return Composer().cell([])[0]


def test_the_default_config_is_sound(config):
    check(config)


def test_every_key_is_either_science_or_how_it_runs(config):
    assert set(config) == set(Frame.__dataclass_fields__)
    how = {"gate", "probe", "plan", "tracking", "launch", "resources", "runs", "rerun"}
    assert set(SCIENCE) | how == set(config)
    assert set(science(config)) == set(SCIENCE)


def test_an_optimizer_without_lr_is_a_mistake(config):
    broken = {**config, "optimizer": {"_target_": "torch.optim.SGD"}}
    with pytest.raises(UserError, match=r"^optimizer.lr is missing"):
        check(broken)


@pytest.mark.parametrize("value", [True, "0.1", None, [0.1]])
def test_a_learning_rate_is_a_number(config, value):
    with pytest.raises(UserError, match=r"^optimizer.lr=.*: must be a number$"):
        check({**config, "optimizer": {"lr": value}})


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_a_learning_rate_is_positive_and_finite(config, value):
    with pytest.raises(UserError, match=r"^optimizer.lr=.*: must be positive and finite$"):
        check({**config, "optimizer": {"lr": value}})


@pytest.mark.parametrize(
    ("batch_size", "asked", "said"),
    [
        (10, {"processes": 4}, "train.batch_size=10: not divisible by resources.processes=4"),
        (10, {"gpus": 4}, "train.batch_size=10: not divisible by resources.gpus=4"),
        (9, {"nodes": 2, "gpus": 3}, "train.batch_size=9: not divisible by resources.nodes=2 x resources.gpus=3"),
        (8, {"processes": 0}, "resources.processes=0: must be more than 0"),
        (8, {"processes": 2, "nodes": 0}, "resources.nodes=0: must be more than 0"),
    ],
)  # fmt: skip
def test_processes_that_cannot_share_a_batch_are_refused_in_one_line(config, batch_size, asked, said):
    train, resources = {**config["train"], "batch_size": batch_size}, {**config["resources"], **asked}
    with pytest.raises(UserError) as error:
        check({**config, "train": train, "resources": resources})
    assert str(error.value) == said


@pytest.mark.parametrize("asked", [{"processes": 4}, {"gpus": 8}, {"gpus": 0}, {"gpus": 3, "processes": 1}])
def test_processes_that_can_are_taken(config, asked):
    train = {**config["train"], "batch_size": 8}
    check({**config, "train": train, "resources": {**config["resources"], **asked}})


def test_a_cell_of_before_there_were_several_processes_has_one(config):
    check_processes({"train": config["train"], "resources": {"gpus": 1, "cpus": None}})


def test_an_id_is_twelve_hex_digits_and_depends_on_every_scientific_value(config):
    scientific = science(config)
    plain = cell_id(scientific)
    assert len(plain) == 12
    assert int(plain, 16) >= 0
    changed = {cell_id({**scientific, key: "other"}) for key in SCIENCE}
    assert len(changed | {plain}) == len(SCIENCE) + 1


def test_the_id_of_the_default_cell_is_what_it_was(config):
    """A change of the canonical form would make every finished cell of every user unknown: do it on purpose only."""
    frozen = {"model": {"a": [1, 2.5, None, "ü"], "b": True}, "optimizer": {"lr": 1e-3}, "seed": 0}
    assert cell_id(frozen) == "2afbdad6c5c9"


def test_the_frame_is_imported_without_torch():
    code = "import sys, gradbench.config, gradbench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_conf_is_found_in_a_checkout():
    assert (CONF / "config.yaml").is_file()


@pytest.mark.parametrize("hz", [-1.0, 101.0, float("nan")])
def test_a_rate_of_samples_is_one_that_the_sampler_can_keep(config, hz):
    with pytest.raises(UserError, match=r"^probe.hz=.*: must be between 0 \(no samples\) and 100$"):
        check({**config, "probe": {**config["probe"], "hz": hz}})
