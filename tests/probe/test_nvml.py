from importlib.metadata import distributions

import pytest

from gradbench.probe.nvml import gpu_uuids, visible

LIST = "from gradbench.probe.nvml import gpu_uuids; print(*gpu_uuids())"
PLAIN = [("GPU-aa1", []), ("GPU-ab2", []), ("GPU-cc3", [])]
MIXED = [("GPU-aa1", []), ("GPU-ab2", ["MIG-x1", "MIG-y2"]), None]


def test_gpus_are_listed_in_the_drivers_order(run_with_nvml):
    assert run_with_nvml(LIST, "GPU-b GPU-a") == "GPU-b GPU-a"


def test_instances_stand_for_a_gpu_under_mig_and_empty_slots_for_nothing(run_with_nvml):
    assert run_with_nvml(LIST, "GPU-a: GPU-b:MIG-1,-,MIG-2") == "GPU-a MIG-1 MIG-2"


def test_a_lost_gpu_is_left_out_and_keeps_its_index(run_with_nvml):
    assert run_with_nvml(LIST, "GPU-a lost GPU-c") == "GPU-a GPU-c"
    assert run_with_nvml(LIST, "GPU-a lost GPU-c", visible="2") == "GPU-c"


def test_the_environment_variable_is_honoured(run_with_nvml):
    assert run_with_nvml(LIST, "GPU-a GPU-b", visible="1") == "GPU-b"
    assert run_with_nvml(LIST, "GPU-a GPU-b", visible="") == ""


@pytest.mark.parametrize("gpus", ["", "nodriver"])
def test_there_may_be_no_gpu_and_no_driver(run_with_nvml, gpus):
    assert run_with_nvml(LIST, gpus) == ""


def test_there_may_be_no_library(monkeypatch):
    monkeypatch.setattr("pynvml._LoadNvmlLibrary", _no_library)
    assert gpu_uuids() == []


def _no_library():
    import pynvml

    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["GPU-aa1", "GPU-ab2", "GPU-cc3"]),
        ("2", ["GPU-cc3"]),
        ("2,0", ["GPU-cc3", "GPU-aa1"]),
        (" 0 , 1 ", ["GPU-aa1", "GPU-ab2"]),
        ("0,0", ["GPU-aa1"]),
        ("GPU-ab2", ["GPU-ab2"]),
        ("GPU-c", ["GPU-cc3"]),
        ("GPU-a", []),  # the beginning of two
        ("GPU-zz", []),
        ("0,7,1", ["GPU-aa1"]),  # CUDA stops at the first name that fits nothing
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_N1_visible_devices_by_index_and_uuid(variable, expected):
    assert visible(PLAIN, variable) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["GPU-aa1", "MIG-x1", "MIG-y2"]),
        ("1", ["MIG-x1", "MIG-y2"]),
        ("GPU-ab2", ["MIG-x1", "MIG-y2"]),
        ("MIG-y2", ["MIG-y2"]),
        ("MIG-z", []),
        ("2", []),  # a lost GPU
    ],
)
def test_N1_visible_devices_under_mig(variable, expected):
    assert visible(MIXED, variable) == expected


def test_N4_no_distribution_named_pynvml_is_installed():
    assert "pynvml" not in {distribution.name.lower() for distribution in distributions()}
