"""GPUs by the names that people and drivers give them."""

from __future__ import annotations

import pytest

from dagrl.backends.planning.gpus import DEFAULT_GPU, GPUS, gpu_named, gpu_of_driver


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H200", "H200"),
        ("h200", "H200"),
        ("nvidia-h200", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("A100-80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100 80GB PCIe", "A100-80GB"),
        ("L40S", "L40S"),
        ("L4", "L4"),
    ],
)
def test_a_gpu_is_found_by_its_names(name: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(ValueError, match="no GPU is known as 'nvidia-h200'; "):
            gpu_named(name)
    else:
        assert gpu_named(name).name == found


def test_a_misspelt_name_is_met_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no GPU is known as 'A100-80G'; did you mean `A100-80GB`\?"):
        gpu_named("A100-80G")
    with pytest.raises(ValueError, match=r"choose from: GB300, GB200, .*L4$"):
        gpu_named("?")


def test_a_slice_is_not_the_whole() -> None:
    assert gpu_of_driver("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert gpu_of_driver("NVIDIA GeForce RTX 4090") is None


def test_every_gpu_has_a_name_of_its_own_and_figures() -> None:
    names = [gpu.name.casefold() for gpu in GPUS]
    assert len(set(names)) == len(names)
    assert gpu_named(DEFAULT_GPU) in GPUS
    for gpu in GPUS:
        assert gpu_named(gpu.name) is gpu
        assert min(gpu.memory_gib, gpu.tflops, gpu.memory_gb_per_s, gpu.pcie_gb_per_s, gpu.network_gb_per_s) > 0


def test_fp8_follows_from_the_generation() -> None:
    # Data sheets: 1979 TFLOP/s on H100s, 242.5 on L4s, 4500 on B200s; none on Ampere's.
    known = {"H100": 1979, "L4": 242, "B200": 4500, "A100-80GB": 312, "A40": 150}
    for name, tflops in known.items():
        assert gpu_named(name).fp8_tflops == pytest.approx(tflops, rel=0.01), name
    assert {name for name in known if not gpu_named(name).has_fp8} == {"A100-80GB", "A40"}


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
def test_drivers_names_give_the_peak(name: str, tflops: float) -> None:
    assert gpu_of_driver(name).tflops == tflops


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
def test_an_unknown_driver_name_gives_none(name: str) -> None:
    assert gpu_of_driver(name) is None
