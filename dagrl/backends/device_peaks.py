"""What a GPU could do at best, by its name: the denominator of model FLOPs utilization."""

from __future__ import annotations

from dagrl.models.gpus import gpu_of_driver


def peak_flops_per_s(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU, by the name that the driver gives it; None where it is not known.

    A slice of a GPU (MIG) is not known: it has a share of the whole that its name does not tell.
    """
    gpu = gpu_of_driver(device_name)
    return None if gpu is None else gpu.tflops * 1e12
