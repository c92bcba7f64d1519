"""The machine, as far as the doctor looks at it. Every method returns, whatever is broken; tests put their own here."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_IMPORT_TIMEOUT_S, _SMI_TIMEOUT_S = 180, 30
_LOOK = """
import json, sys
for name in sys.argv[1:]:
    try:
        module = __import__(name)
        found = {"version": str(getattr(module, "__version__", ""))}
        if name == "torch":
            found |= {"cuda": module.version.cuda, "available": module.cuda.is_available(),
                      "count": module.cuda.device_count(), "nccl": module.distributed.is_nccl_available()}
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    print("\\n" + json.dumps({name: found}), flush=True)
"""
"""Imports modules one by one, and prints a line of JSON for each."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as its driver sees it."""

    index: str
    name: str
    total_mib: int
    used_mib: int
    driver: str


class Edges:
    """The machine that this process is on."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment."""
        return os.environ

    def python(self) -> tuple[int, int, int]:
        """Python's version."""
        return sys.version_info[0], sys.version_info[1], sys.version_info[2]

    def system(self) -> str:
        """Operating system and processor."""
        return f"{platform.system()} {platform.release()} {platform.machine()}"

    def requirements(self) -> list[str]:
        """What dagrl needs, as its package says."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.requires("dagrl") or []
        return []

    def version(self, package: str) -> str | None:
        """The installed version of a package."""
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return None

    def imports(self, *modules: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each module, as soon as it has been tried, and what it says of itself: ``version``, or ``error``."""
        waiting, end = list(modules), ""
        try:
            command = [sys.executable, "-c", _LOOK, *modules]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError as error:
            end = f"cannot be tried: {error}"
        else:
            began = time.monotonic()
            timer = threading.Timer(_IMPORT_TIMEOUT_S, process.kill)
            timer.start()
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    with contextlib.suppress(ValueError):
                        found = json.loads(line) if line.startswith("{") else {}
                        if waiting and waiting[0] in found:
                            yield waiting[0], found[waiting.pop(0)]
            timer.cancel()
            end = f"ends Python (exit code {process.returncode})"
            if time.monotonic() - began > _IMPORT_TIMEOUT_S:
                end = f"takes more than {_IMPORT_TIMEOUT_S} s to import"
        for name in waiting:
            yield name, {"error": end if name == waiting[0] else f"not tried, as {waiting[0]} {end}"}

    def gpus(self) -> list[Gpu]:
        """NVIDIA's GPUs; none where there is no driver."""
        fields = "index,name,memory.total,memory.used,driver_version"
        rows = self._smi(f"--query-gpu={fields}")
        return [Gpu(row[0], row[1], _number(row[2]), _number(row[3]), row[4]) for row in rows if len(row) == 5]

    def gpu_processes(self) -> list[str]:
        """Processes that hold memory of a GPU, in words."""
        rows = self._smi("--query-compute-apps=pid,process_name,used_memory")
        return [f"pid {row[0]} ({row[1]}, {row[2]} MiB)" for row in rows if len(row) == 3]

    def _smi(self, query: str) -> list[list[str]]:
        try:
            done = subprocess.run(
                ["nvidia-smi", query, "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=_SMI_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode:
            return []
        return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]

    def cpus(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def memory_bytes(self) -> int:
        """Memory of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def room_bytes(self, folder: str) -> tuple[int, int] | None:
        """Free bytes and all bytes where a folder is; None where there is none."""
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            return None
        return usage.free, usage.total

    def temporary(self) -> str:
        """Where temporary files go."""
        return tempfile.gettempdir()

    def limits(self) -> dict[str, int]:
        """Soft limits of this process: ``files``, ``processes``, ``locked`` bytes; -1 for none."""
        kinds = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked": resource.RLIMIT_MEMLOCK}
        return {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}

    def unconfined(self) -> str | None:
        """Why programs of a policy cannot be run here; None where they can."""
        from dagrl.rewards import sandbox

        try:
            sandbox.run("")
        except OSError as error:
            return str(error)
        return None

    def interfaces(self) -> dict[str, list[str]]:
        """Network interface -> its IPv4 addresses; only names where psutil is missing."""
        try:
            import psutil
        except ImportError:
            return {name: [] for _, name in socket.if_nameindex()}
        return {
            name: [each.address for each in addresses if each.family == socket.AF_INET]
            for name, addresses in psutil.net_if_addrs().items()
        }

    def infiniband(self) -> list[str]:
        """InfiniBand and RoCE ports, each with its state."""
        found = []
        for state in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state")):
            with contextlib.suppress(OSError):
                found.append(f"{state.parts[-4]} port {state.parts[-2]} {state.read_text().strip()}")
        return found

    def can_listen(self, port: int) -> bool:
        """Whether a port of this machine is free."""
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            return True
        return False

    def resolves(self, host: str) -> bool:
        """Whether a host's name leads to an address."""
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, None)
            return True
        return False

    def running_ray(self) -> str | None:
        """Address of a Ray that somebody has started on this machine, and that answers."""
        from dagrl.workers.cluster.addresses import running_here

        return running_here()

    def silence_at(self, address: str) -> str | None:
        """Why nobody can be reached at ``host:port``; None where somebody can."""
        from dagrl.workers.cluster.addresses import knock

        try:
            knock(address)
        except OSError as error:
            return error.strerror or str(error)
        return None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
