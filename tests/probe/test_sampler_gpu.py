"""The sampler with the real nvidia-ml-py on the library that `nvml.c` makes."""

import os
import time

import pytest

from gradbench.probe.nvml import visible
from gradbench.probe.sampler import Sampler
from tests.probe.test_sampler import column, rows_of

FULL = """\
{0} util 37 12
{0} memory 5000000
{0} process {1} 3000000
{0} power 250000
{0} energy 4000
{0} clock 1980 2619
{0} temperature 40
{0} throttle 4
{0} pcie 100 200
"""
EXPECTED = {
    "util_pct": 37,
    "mem_util_pct": 12,
    "mem_used_bytes": 5e6,
    "process_bytes": 3e6,
    "power_w": 250,
    "energy_j": 4,
    "sm_clock_mhz": 1980,
    "mem_clock_mhz": 2619,
    "temp_c": 40,
    "throttle_reasons": 4,
    "pcie_tx_bytes_per_s": 1e5,
    "pcie_rx_bytes_per_s": 2e5,
}


@pytest.fixture
def segment(tmp_path):
    return tmp_path / "trace.1.csv"


def of_gpus(row):
    return {name for name in row if name.startswith("gpu")}


def full(uuid):
    return FULL.format(uuid, os.getpid())


def test_every_counter_in_its_unit(segment, gpus):
    gpus(full("GPU-a"), names="GPU-a")
    with Sampler(segment, hz=10, gpus=["GPU-a"]) as sampler:
        pass
    assert sampler.notes == []
    first = rows_of(segment)[0]
    assert {name: float(first[f"gpu0_{name}"]) for name in EXPECTED} == EXPECTED


def test_several_gpus_have_columns_in_the_order_asked_for(segment, gpus):
    gpus("GPU-b power 2000\nGPU-a power 1000\nGPU-c power 3000", names="GPU-b GPU-c GPU-a")
    with Sampler(segment, hz=10, gpus=["GPU-a", "GPU-b"]):
        pass
    first = rows_of(segment)[0]
    assert (first["gpu0_power_w"], first["gpu1_power_w"]) == ("1", "2")
    assert "gpu2_power_w" not in first


@pytest.mark.parametrize("variable", ["2", "0", "GPU-b", "MIG-2", "", "NoDevFiles"])
def test_N1_the_gpu_of_that_uuid_is_sampled_whatever_is_visible(segment, gpus, monkeypatch, variable):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    gpus("GPU-c power 3000\nGPU-a power 1000\nMIG-2 memory 22\nMIG-1 memory 11", names="GPU-c GPU-b:MIG-1,MIG-2 GPU-a")
    with Sampler(segment, hz=10, gpus=["GPU-a", "MIG-2"]):
        pass
    assert column(segment, "gpu0_power_w")[0] == 1
    assert column(segment, "gpu1_mem_used_bytes")[0] == 22


def test_M11_only_the_cells_gpu_is_sampled_and_one_counter_fails_alone(segment, gpus):
    four = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    mine = visible([(uuid, []) for uuid in four], "2")
    refused = full("GPU-c").replace("power 250000", "power unsupported")
    gpus(full("GPU-a") + full("GPU-b") + refused + full("GPU-d"), names=" ".join(four))
    with Sampler(segment, hz=10, gpus=mine) as sampler:
        pass
    expected = {f"gpu0_{name}" for name in EXPECTED if name != "power_w"}
    assert of_gpus(rows_of(segment)[0]) == expected
    assert sampler.notes == ["gpu0_power_w: Not Supported"]


@pytest.mark.parametrize("listed", ["1 5000", "{me} none", "{me} none\nGPU-a process 1 5000", ""])
def test_N3_no_memory_of_our_own_is_absent_and_not_zero(segment, gpus, listed):
    gpus("GPU-a process " + listed.format(me=os.getpid()) if listed else "", names="GPU-a")
    with Sampler(segment, hz=10, gpus=["GPU-a"]) as sampler:
        pass
    assert column(segment, "gpu0_process_bytes") == []
    assert any(note.startswith("gpu0_process_bytes: NVML told of no memory") for note in sampler.notes)


def test_N3_our_own_memory_is_told_from_others(segment, gpus):
    gpus(f"GPU-a process 1 5000\nGPU-a process {os.getpid()} 70", names="GPU-a")
    with Sampler(segment, hz=10, gpus=["GPU-a"]):
        pass
    assert set(column(segment, "gpu0_process_bytes")) == {70}


def test_N7_utilisation_is_absent_under_mig(segment, gpus):
    gpus("MIG-1 memory 11\nGPU-a util 90 50", names="GPU-a:MIG-1")
    with Sampler(segment, hz=10, gpus=["MIG-1"]) as sampler:
        pass
    assert not {"gpu0_util_pct", "gpu0_mem_util_pct"} & of_gpus(rows_of(segment)[0])
    assert any("gpu0_util_pct" in note and note.endswith("Not Supported") for note in sampler.notes)


def test_the_energy_counter_steps_and_pcie_is_asked_once_a_second(segment, gpus):
    gpus("GPU-a energy step:1000:200\nGPU-a pcie 1 2", names="GPU-a")
    with Sampler(segment, hz=50, gpus=["GPU-a"]):
        time.sleep(0.5)
    joules = column(segment, "gpu0_energy_j")
    assert joules == sorted(joules)
    assert joules[-1] - joules[0] in (2, 3, 4)
    assert len(column(segment, "gpu0_pcie_tx_bytes_per_s")) == 1


def test_a_lost_gpu_is_empty_until_it_is_back(segment, gpus):
    gpus("GPU-a power 1000", names="GPU-a")
    with Sampler(segment, hz=50, gpus=["GPU-a"]) as sampler:
        gpus("GPU-a power lost")
        time.sleep(0.2)
        gpus("GPU-a power 2000")
        time.sleep(0.2)
    values = [row["gpu0_power_w"] for row in rows_of(segment)]
    assert values[0] == "1"
    assert "" in values
    assert values[-1] == "2"
    assert "gpu0_power_w: GPU is lost" in sampler.notes


@pytest.mark.parametrize(
    ("names", "note"),
    [
        ("GPU-a", "NVML: Not Found: there are no samples of GPU-b"),
        ("nodriver", "NVML: Driver Not Loaded: there are no samples of GPU-b"),
    ],
)
def test_a_gpu_that_nvml_does_not_know_is_noted(segment, gpus, names, note):
    gpus("", names=names)
    with Sampler(segment, hz=10, gpus=["GPU-b"]) as sampler:
        pass
    assert sampler.notes == [note]
    assert of_gpus(rows_of(segment)[0]) == set()


def test_a_recorded_gpu_is_replayed_where_there_is_none(segment, tmp_path):
    recorded = tmp_path / "recorded.csv"
    recorded.write_text("t_unix_s,gpu0_power_w\n5.0,250\n500.0,300\n")
    with Sampler(segment, hz=10, replay=recorded) as sampler:
        pass
    assert set(column(segment, "gpu0_power_w")) == {250}
    assert sampler.notes == []
