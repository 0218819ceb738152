"""The keys of `hydra/launcher=slurm`."""

import dataclasses

import pytest
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

from gradbench.config import UserError
from gradbench.sweep.compose import Composer


@pytest.fixture(scope="module")
def composer():
    return Composer()


def composed(composer, *words):
    return composer.hydra(["hydra/launcher=slurm", *words], lambda: "local").launcher


def test_every_key_of_the_submitit_launcher_is_one_of_ours(composer):
    theirs = {field.name for field in dataclasses.fields(SlurmQueueConf)}
    assert theirs <= set(composed(composer))


def test_it_is_known_by_its_kind_and_needs_no_key(composer, conf):
    assert composed(composer).kind == conf["kind"] == "slurm"
    assert [key for key in ("partition", "account", "qos", "constraint") if conf[key] is not None] == []


def test_a_site_may_be_told_what_gradbench_does_not_know(composer):
    launcher = composed(composer, "+hydra.launcher.additional_parameters.reservation=mine", "hydra.launcher.qos=long")
    assert (launcher.additional_parameters.reservation, launcher.qos) == ("mine", "long")


@pytest.mark.parametrize("word", ["hydra.launcher.partitoin=gpu", "hydra.launcher.timeout_min=soon"])
def test_a_key_or_value_that_makes_no_sense_is_one_line(composer, word):
    with pytest.raises(UserError) as raised:
        composed(composer, word)
    assert "\n" not in str(raised.value)
    assert any(part in str(raised.value) for part in ("partitoin", "timeout_min", "soon"))
