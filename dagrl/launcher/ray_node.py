"""Ray's processes on one machine of a job, and the driver: started, watched, ended, with nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from dagrl.launcher.events import Events
from dagrl.launcher.secret import write_secret
from dagrl.scheduler.machines import Machine
from dagrl.workers.cluster.session import (
    RAY_VARIABLES,
    keep_worker_logs,
    object_store_bytes,
    session_folder,
    watched,
)

HEAD, MEMBER, DRIVER = "Ray's head", "Ray", "the driver"
_END_TIMEOUT_S = 10.0
_EPITAPH = "dagrl launch: ended from outside; Ray ends on this machine"


class RayNode:
    """What runs on this machine."""

    def __init__(self, folder: Path, machine: Machine, address: str, secret: str, events: Events) -> None:
        self._folder = folder
        self._machine = machine
        self._address = address
        self._events = events
        self._environment = ray_environment(os.environ, address, write_secret(secret, folder))
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start_head(self) -> None:
        """Start Ray here; what its process prints comes to the events (see `head.py`)."""
        told = {
            "address": self._address,
            "folder": str(self._folder),
            "cpus": self._machine.cpus,
            "gpus": self._machine.gpus,
            "object_store": object_store_bytes(),
        }
        await self._start(HEAD, ["-m", "dagrl.launcher.head", json.dumps(told)], stdout=asyncio.subprocess.PIPE)

    async def start_member(self, head: str) -> None:
        """Join the Ray whose head is at `head`."""
        options = {
            "address": head,
            "node-ip-address": self._address,
            "temp-dir": self._folder,
            "num-cpus": self._machine.cpus,
            "num-gpus": self._machine.gpus,
            "object-store-memory": object_store_bytes(),
            "include-log-monitor": "false",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        await self._start(MEMBER, ["-m", "ray.scripts.scripts", "start", "--block", *arguments])

    async def start_driver(self, head: str, arguments: list[str]) -> None:
        """Start `dagrl run` with these arguments; what it prints is for the terminal."""
        self._environment["RAY_ADDRESS"] = head
        await self._start(DRIVER, ["-m", "dagrl.cli", "run", *arguments], quiet=False)

    def signal_driver(self, number: int) -> None:
        """Pass a signal on."""
        with contextlib.suppress(ProcessLookupError):
            self._processes[DRIVER].send_signal(number)

    def last_words(self, name: str) -> str:
        """The last line that a quiet process has printed."""
        with contextlib.suppress(OSError, IndexError):
            return self._log(name).read_text(errors="replace").strip().splitlines()[-1]
        return "it said nothing"

    async def stop(self, name: str) -> None:
        """End a process if it runs, politely at first."""
        process = self._processes.get(name)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if process.stdin is not None:
                process.stdin.close()
            else:
                process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _start(self, name: str, arguments: list[str], *, stdout: int | None = None, quiet: bool = True) -> None:
        with contextlib.ExitStack() as files:
            log = files.enter_context(self._log(name).open("w")) if quiet else None
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                env=self._environment,
                stdin=asyncio.subprocess.PIPE if name == HEAD else asyncio.subprocess.DEVNULL,
                stdout=stdout if stdout is not None else log,
                stderr=log,
                # A Ctrl-C in the terminal is for the launcher, which tells everybody.
                start_new_session=True,
            )
        self._processes[name] = process
        self._events.watch(name, process)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-').replace(chr(39), '')}.out"


@contextmanager
def session(logs: Path, prefix: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder for Ray's files, gone in the end with all processes; what workers have printed stays in `logs`.

    With it comes a function that is called when there are new processes: they end even if this one is killed.
    """
    with session_folder() as folder, watched(folder, _EPITAPH) as watch:
        try:
            yield folder, watch
        finally:
            watch()
            keep_worker_logs(folder, logs, prefix)


def ray_environment(variables: Mapping[str, str], address: str, secret: Path) -> dict[str, str]:
    """What Ray, its workers and the driver find in their environment; `address` is this machine's."""
    environment = {
        name: value for name, value in variables.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
    } | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(secret),
        **RAY_VARIABLES,
    }
    # Gloo would look its address up by the host's name, which often means the loopback interface.
    if interface := interface_of(address):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def interface_of(address: str) -> str | None:
    """The network interface with that address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
