"""Peaks by the names that the driver gives devices."""

from __future__ import annotations

import pytest

from dagrl.backends.device_peaks import peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert peak_flops_per_s(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "Tesla V100-SXM2-16GB",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H2000",
        "NVIDIA A10",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "",
    ],
)
def test_a_device_whose_peak_is_not_known_has_none(name: str) -> None:
    assert peak_flops_per_s(name) is None
