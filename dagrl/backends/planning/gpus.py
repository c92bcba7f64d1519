"""GPUs by name, with the figures that plans and model FLOPs utilization use.

Sources: NVIDIA's data sheets of each product (the table has half of their tensor-core figures, which are with sparsity)
and of its DGX, HGX and OVX systems, for links and network. Memory is what CUDA reports for a whole device,
which is less than the name: firmware and error correction take a share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from dagrl.config.errors import suggest
from dagrl.config.schema import Pipeline

Generation = Literal["Ampere", "Ada", "Hopper", "Blackwell"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, whole: slices of a GPU (MIG) are not known here."""

    name: str
    memory_gib: float
    """Total of ``cudaMemGetInfo``."""
    tflops: float
    """Peak of the tensor cores in bfloat16, dense, 10^12 operations a second."""
    memory_gb_per_s: float
    """Device memory, 10^9 bytes a second."""
    nvlink_gb_per_s: float
    """To the other GPUs of its machine, each direction; 0 without NVLink."""
    pcie_gb_per_s: float
    """To the host, each direction."""
    network_gb_per_s: float
    """A GPU's share of the machine's network, each direction, in its maker's systems."""
    driver_name: str
    """The driver's name for it, without the maker: a regular expression."""
    generation: Generation

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply in fp8 (compute capability 8.9 and more)."""
        return self.generation != "Ampere"

    @property
    def fp8_tflops(self) -> float:
        """Peak of the tensor cores in fp8, dense: twice `tflops` in all data sheets; without fp8 the same."""
        return self.tflops * (2 if self.has_fp8 else 1)


_SERVER_LINKS: dict[str, Any] = {"pcie_gb_per_s": 64, "network_gb_per_s": 50}
_H100 = {"generation": "Hopper", "memory_gb_per_s": 3350, "nvlink_gb_per_s": 450, **_SERVER_LINKS}
_B200 = {"generation": "Blackwell", "memory_gb_per_s": 8000, "nvlink_gb_per_s": 900, **_SERVER_LINKS}
_A100: dict[str, Any] = {"generation": "Ampere", "nvlink_gb_per_s": 300, "pcie_gb_per_s": 32, "network_gb_per_s": 25}
_ADA: dict[str, Any] = {"generation": "Ada", "nvlink_gb_per_s": 0, "pcie_gb_per_s": 32, "network_gb_per_s": 12.5}
_A30 = {**_ADA, "generation": "Ampere"}

GPUS: tuple[Gpu, ...] = (
    Gpu("GB300", 277.0, 2500, driver_name=r"GB300", **{**_B200, "network_gb_per_s": 100, "pcie_gb_per_s": 450}),
    Gpu("GB200", 184.3, 2500, driver_name=r"GB200", **{**_B200, "pcie_gb_per_s": 450}),
    Gpu("B300", 267.0, 2250, driver_name=r"B300( SXM6 AC)?", **{**_B200, "network_gb_per_s": 100}),
    Gpu("B200", 178.3, 2250, driver_name=r"B200", **_B200),
    Gpu("GH200", 94.5, 989.4, driver_name=r"GH200 \d+GB", **{**_H100, "memory_gb_per_s": 4000, "pcie_gb_per_s": 450}),
    Gpu("H200", 139.8, 989.4, driver_name=r"H200", **{**_H100, "memory_gb_per_s": 4800}),
    Gpu("H200-NVL", 139.8, 835.5, driver_name=r"H200 NVL", **{**_H100, "memory_gb_per_s": 4800}),
    Gpu("H100", 79.1, 989.4, driver_name=r"H100 \d+GB HBM3e?", **_H100),
    Gpu("H100-NVL", 93.1, 835.5, driver_name=r"H100 NVL", **{**_H100, "memory_gb_per_s": 3900, "nvlink_gb_per_s": 300}),
    Gpu("H100-PCIe", 79.1, 756.5, driver_name=r"H100 PCIe", **{**_H100, "memory_gb_per_s": 2000, "nvlink_gb_per_s": 0}),
    Gpu("H800", 79.1, 989.4, driver_name=r"H800", **{**_H100, "nvlink_gb_per_s": 200}),
    Gpu("H20", 95.1, 148.0, driver_name=r"H20", **{**_H100, "memory_gb_per_s": 4000}),
    Gpu("A100-80GB", 79.2, 312.0, memory_gb_per_s=2039, driver_name=r"A100[- ].*80GB.*", **_A100),
    Gpu("A100-40GB", 39.5, 312.0, memory_gb_per_s=1555, driver_name=r"A100[- ].*40GB.*", **_A100),
    Gpu("A800", 79.2, 312.0, memory_gb_per_s=2039, driver_name=r"A800[- ].*", **{**_A100, "nvlink_gb_per_s": 200}),
    Gpu("A30", 23.5, 165.0, memory_gb_per_s=933, driver_name=r"A30", **{**_A30, "nvlink_gb_per_s": 100}),
    Gpu("A40", 44.4, 149.7, memory_gb_per_s=696, driver_name=r"A40", **{**_A30, "nvlink_gb_per_s": 56}),
    Gpu("L40S", 44.4, 362.05, memory_gb_per_s=864, driver_name=r"L40S", **_ADA),
    Gpu("L40", 44.4, 181.05, memory_gb_per_s=864, driver_name=r"L40", **_ADA),
    Gpu("L4", 22.0, 121.0, memory_gb_per_s=300, driver_name=r"L4", **_ADA),
)
GPUS_OF_MACHINE = 8
"""Assumed for machines that the file does not describe."""
DEFAULT_GPU = "H100"
"""The GPU of a group that names none: the most common GPU for large models, and a smaller one of these."""


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, case-insensitive, with or without the maker's name, or in the driver's form. ValueError
    with the nearest name, or all of them.
    """
    plain = name.strip().removeprefix("NVIDIA ")
    for gpu in GPUS:
        if plain.casefold() == gpu.name.casefold():
            return gpu
    if found := _by_driver_name(plain):
        return found
    raise ValueError(f"no GPU is known as {name!r}; {suggest(plain, names())}")


def gpu_of_group(pipeline: Pipeline, group: str, otherwise: str = DEFAULT_GPU) -> Gpu | None:
    """Return the GPUs of a group, `otherwise` if the file does not name them; None for a group of CPU slots."""
    spec = pipeline.groups[group]
    return None if spec.is_cpu else gpu_named(spec.gpu or otherwise)


def gpu_given(pipeline: Pipeline, group: str | None) -> Gpu | None:
    """Return the GPU that a group names; None without a name, or for an unknown one, which `validate` reports."""
    spec = pipeline.groups.get(group or "")
    try:
        return gpu_named(spec.gpu) if spec is not None and spec.gpu else None
    except ValueError:
        return None


def gpu_of_driver(driver_name: str) -> Gpu | None:
    """The GPU with this name in the driver; None for an unknown GPU or a slice."""
    name = driver_name.removeprefix("NVIDIA ")
    return None if "MIG" in name else _by_driver_name(name)


def names() -> Iterable[str]:
    return (gpu.name for gpu in GPUS)


def _by_driver_name(name: str) -> Gpu | None:
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.driver_name, name)), None)
