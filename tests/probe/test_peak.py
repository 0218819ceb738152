import pytest

from gradbench.probe.peak import peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", False, 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989),
        ("NVIDIA H100 PCIe", "bf16", False, 756),
        ("NVIDIA H200", "fp32", True, 495),
        ("NVIDIA L40S", "bf16", True, 362),
        ("NVIDIA L4", "bf16", True, 121),
        ("NVIDIA GeForce RTX 4090", "bf16", False, 165),
        ("Tesla V100-SXM2-32GB", "fp32", False, 15.7),
    ],
)
def test_the_peak_of_a_gpu_in_the_precision_of_its_products(device, precision, tf32, tera):
    assert peak_flops(device, precision, tf32=tf32) == tera * 1e12


@pytest.mark.parametrize(
    ("device", "precision"),
    [("x86_64", "fp32"), ("Tesla V100-SXM2-32GB", "bf16"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"), ("", "fp32")],
)
def test_what_is_not_known_is_none(device, precision):
    assert peak_flops(device, precision, tf32=False) is None
