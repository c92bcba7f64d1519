"""GPUs, memory, disks, limits."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.doctor.findings import Line, hint, missing, ok
from dagrl.doctor.probe import Edges, Gpu

_GIB, _MIB = 2**30, 2**20
_HELD_MIB = 1024
"""More than a driver itself takes of an idle GPU."""
_LEAST_SHARED = 2 * _GIB
"""Ray's object store of a run."""
_LEAST_DISK = 5 * _GIB
_LEAST_FILES, _LEAST_PROCESSES = 4096, 4096


def hardware(edges: Edges, gpus: list[Gpu]) -> Iterator[Line]:
    """Lines on what the machine has."""
    yield ok("processor", f"{edges.cpus()} cores, {edges.memory_bytes() / _GIB:.0f} GiB memory, {edges.system()}")
    yield from _gpus(edges, gpus)
    yield from _room(edges)
    yield from _limits(edges)
    yield _sandbox(edges)


def _sandbox(edges: Edges) -> Line:
    if (why := edges.unconfined()) is None:
        return ok("sandbox", "programs of a policy can be confined (seccomp, Landlock)")
    return hint("sandbox", f"{why}; only `fn: code` and the tool `python` need it, docs/rewards.md says more")


def _gpus(edges: Edges, gpus: list[Gpu]) -> list[Line]:
    if not gpus:
        return [hint("GPUs", "none; groups of CPU slots (cpus_per_node) run here, groups of GPUs do not")]
    lines = []
    for gpu in gpus:
        text = f"{gpu.name}, {gpu.total_mib / 1024:.0f} GiB, driver {gpu.driver}"
        if gpu.used_mib > _HELD_MIB:
            lines.append(hint(f"GPU {gpu.index}", f"{text}; {gpu.used_mib / 1024:.1f} GiB are in use"))
        else:
            lines.append(ok(f"GPU {gpu.index}", text))
    if others := edges.gpu_processes():
        lines.append(hint("GPU memory", f"held by {', '.join(others[:8])}; a run beside it may not fit"))
    if (visible := edges.variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        lines.append(hint("CUDA_VISIBLE_DEVICES", f"is `{visible}`; runs see these GPUs only"))
    return lines


def _room(edges: Edges) -> list[Line]:
    lines = []
    for name, folder, least, remedy in (
        ("shared memory", "/dev/shm", _LEAST_SHARED, "with Docker say --shm-size=16g or --ipc=host"),
        ("disk for runs", ".", _LEAST_DISK, "checkpoints go there"),
        ("temporary files", edges.temporary(), _LEAST_DISK, "Ray's files go there; TMPDIR names another folder"),
    ):
        room = edges.room_bytes(folder)
        if room is None:
            lines.append(missing(name, f"there is no {folder}"))
            continue
        text = f"{room[0] / _GIB:.1f} of {room[1] / _GIB:.0f} GiB free in {folder}"
        lines.append(ok(name, text) if room[0] >= least else hint(name, f"{text}; {remedy}"))
    return lines


def _limits(edges: Edges) -> list[Line]:
    limits, lines = edges.limits(), []
    for name, kind, least, flag in (
        ("open files", "files", _LEAST_FILES, "-n"),
        ("processes", "processes", _LEAST_PROCESSES, "-u"),
    ):
        limit = limits[kind]
        if 0 <= limit < least:
            lines.append(hint(name, f"at most {limit}; Ray and many workers want more: `ulimit {flag} 65536`"))
        else:
            lines.append(ok(name, "no limit" if limit < 0 else f"at most {limit}"))
    locked = limits["locked"]
    if edges.infiniband() and locked >= 0:
        lines.append(hint("locked memory", f"at most {locked / _MIB:.0f} MiB; InfiniBand wants `ulimit -l unlimited`"))
    return lines
