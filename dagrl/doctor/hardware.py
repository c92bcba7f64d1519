"""Checks GPUs, memory, disks and the sandbox."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.doctor.findings import Finding, hint, missing, ok
from dagrl.rewards import sandbox

_GIB = 2**30
_SMI_TIMEOUT_S = 30
_HELD_MIB = 1024
"""More than the driver's own memory on an idle GPU."""
_LEAST_SHARED = 2 * _GIB
"""Size of Ray's object store in a run."""
_LEAST_DISK = 5 * _GIB


@dataclass(frozen=True, slots=True)
class DetectedGpu:
    """A GPU as reported by its driver."""

    index: str
    name: str
    total_mib: int
    used_mib: int
    driver: str


def list_gpus() -> list[DetectedGpu]:
    """NVIDIA GPUs; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.used,driver_version"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [DetectedGpu(row[0], row[1], _number(row[2]), _number(row[3]), row[4]) for row in rows if len(row) == 5]


def hardware(gpus: list[DetectedGpu]) -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield ok("processor", f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB memory, {system}")
    if not gpus:
        yield hint("GPUs", "none; groups of CPU slots (cpus_per_node) run here, groups of GPUs do not")
    for gpu in gpus:
        text = f"{gpu.name}, {gpu.total_mib / 1024:.0f} GiB, driver {gpu.driver}"
        if gpu.used_mib > _HELD_MIB:
            used = f"{gpu.used_mib / 1024:.1f} GiB are in use; nvidia-smi names the processes"
            yield hint(f"GPU {gpu.index}", f"{text}; {used}")
        else:
            yield ok(f"GPU {gpu.index}", text)
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        yield hint("CUDA_VISIBLE_DEVICES", f"is `{visible}`; runs see these GPUs only")
    yield _space("shared memory", "/dev/shm", _LEAST_SHARED, "start Docker with --shm-size=16g or --ipc=host")
    yield _space("disk for runs", ".", _LEAST_DISK, "checkpoints go there")
    yield _space("temporary files", tempfile.gettempdir(), _LEAST_DISK, "Ray writes there; set TMPDIR to move it")
    yield _sandbox()


def _space(name: str, folder: str, least: int, remedy: str) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return missing(name, f"there is no {folder}")
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.0f} GiB free in {folder}"
    return ok(name, text) if usage.free >= least else hint(name, f"{text}; {remedy}")


def _sandbox() -> Finding:
    try:
        sandbox.run("")
    except OSError as error:
        return hint(
            "sandbox", f"{error}; only `fn: code`, the tool `python` and `dagrl import` need it, see docs/rewards.md"
        )
    return ok("sandbox", "model-written code can be confined (seccomp, Landlock)")


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0  # MIG slices show [N/A]
