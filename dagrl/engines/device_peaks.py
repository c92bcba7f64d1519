"""What a GPU could do at best, by its name: the denominator of model FLOPs utilization."""

from __future__ import annotations

import re

_TFLOPS = (
    (r"GB[23]00", 2500.0),
    (r"B200|B300( SXM6 AC)?", 2250.0),
    (r"GH200 \d+GB", 989.4),
    (r"H200", 989.4),
    (r"H[12]00 NVL", 835.5),
    (r"H100 \d+GB HBM3e?", 989.4),
    (r"H100 PCIe", 756.5),
    (r"H800", 989.4),
    (r"H20", 148.0),
    (r"A[18]00[- ].*", 312.0),
    (r"A30", 165.0),
    (r"A40", 149.7),
    (r"L40S", 362.05),
    (r"L40", 181.05),
    (r"L4", 121.0),
)
"""Name without the maker's, and bfloat16 TFLOP/s of the tensor cores, dense: NVIDIA's data sheets, where a figure is
with sparsity half of it."""


def peak_flops_per_s(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU, by the name that the driver gives it; None where it is not known.

    A slice of a GPU (MIG) is not known: it has a share of the whole that its name does not tell.
    """
    name = device_name.removeprefix("NVIDIA ")
    if "MIG" in name:
        return None
    for pattern, tflops in _TFLOPS:
        if re.fullmatch(pattern, name):
            return tflops * 1e12
    return None
