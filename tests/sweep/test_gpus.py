import pytest

from gradbench.cli import main
from gradbench.config import UserError
from gradbench.sweep.gpus import GIB, GPUS, RESERVE_BYTES, capacity_bytes, fits, in_words, why_not


def test_a_gpu_is_a_name_or_its_bytes():
    assert capacity_bytes(None) is None
    assert capacity_bytes("a100-40gb") == int(39.4 * GIB)
    assert capacity_bytes("123456789") == 123456789


@pytest.mark.parametrize("gpu", ["a100", "0", "-1", "40GB", ""])
def test_another_word_is_a_mistake_that_names_what_is_allowed(gpu):
    with pytest.raises(UserError, match=rf"^plan\.gpu={gpu}: must be one of a10g-24gb, .*, or a number of bytes$"):
        capacity_bytes(gpu)


@pytest.mark.parametrize("name", [name for name in GPUS if name.endswith("gb")])
def test_no_gpu_has_more_than_its_name_says(name):
    assert 0.9 * int(name.split("-")[1][:-2]) < GPUS[name] < int(name.split("-")[1][:-2])


def test_a_gpu_keeps_some_memory_to_itself():
    capacity = 2 * GIB
    assert fits(capacity - RESERVE_BYTES, capacity)
    assert not fits(capacity - RESERVE_BYTES + 1, capacity)
    assert why_not(capacity - RESERVE_BYTES, str(capacity)) is None
    assert why_not(capacity, str(capacity)) == (
        f"would need 2.0 GiB and the 1.0 GiB that a GPU keeps to itself, plan.gpu={capacity} has 2.0 GiB"
    )
    assert in_words(3 * 2**20) == "3.0 MiB"


def test_the_mistake_is_found_before_anything_else(capsys, tmp_path):
    assert main(["plan.gpu=gtx", f"runs={tmp_path}/runs"]) == 2
    assert capsys.readouterr().err.startswith("gradbench: plan.gpu=gtx: must be one of ")
    assert not list(tmp_path.iterdir())
