"""Peak throughput of GPUs by name, the denominator of model FLOPs utilization."""

from __future__ import annotations

from dagrl.models.gpus import gpu_of_driver


def peak_flops_per_s(device_name: str) -> float | None:
    """Dense bfloat16 FLOPs per second of a GPU, by the driver's name for it; None if unknown.

    Unknown for a slice of a GPU (MIG), whose name does not tell its size.
    """
    gpu = gpu_of_driver(device_name)
    return None if gpu is None else gpu.tflops * 1e12
