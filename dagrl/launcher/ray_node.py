"""Ray's processes on one machine of a job, and the driver: starts, watches and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dagrl.launcher.addresses import interfaces
from dagrl.launcher.handshake import write_token
from dagrl.orchestrator.cluster.session import (
    RAY_VARIABLES,
    keep_worker_logs,
    object_store_bytes,
    session_folder,
    watched,
)
from dagrl.scheduler.machines import Machine

HEAD, MEMBER, DRIVER = "Ray's head", "Ray", "the driver"
_END_TIMEOUT_S = 10.0
_EPITAPH = "dagrl launch: ended from outside; Ray ends on this machine"


class RayNode:
    """The processes of this machine."""

    def __init__(self, folder: Path, machine: Machine, address: str, token: str, watch: Callable[[], None]) -> None:
        """`watch` registers new processes, which then end even if this one is killed."""
        self._folder = folder
        self._machine = machine
        self._address = address
        self._watch = watch
        self._environment = ray_environment(os.environ, address, write_token(token, folder))
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_line: Callable[[str], None] = lambda line: None
        """Called with each line that Ray's head prints."""
        self.on_exit: Callable[[str], None] = lambda why: None
        """Called if Ray exits on this machine before it is stopped."""

    async def start_head(self) -> None:
        """Start Ray's head, which reports to `on_line` (see ``ray_head.py``)."""
        options = {
            "_node_ip_address": self._address,
            "_temp_dir": str(self._folder),
            "num_cpus": self._machine.cpus,
            "num_gpus": self._machine.gpus,
            "object_store_memory": object_store_bytes(),
        }
        await self._start(HEAD, ["dagrl.launcher.ray_head", json.dumps(options)], stdout=asyncio.subprocess.PIPE)

    async def start_member(self, head: str) -> None:
        """Join the Ray cluster of this head (see ``ray_member.py``)."""
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
        await self._start(MEMBER, ["dagrl.launcher.ray_member", *arguments])

    async def start_driver(self, head: str, arguments: list[str]) -> asyncio.subprocess.Process:
        """Start `dagrl run`, which prints to the terminal."""
        self._environment["RAY_ADDRESS"] = head
        return await self._start(DRIVER, ["dagrl", "run", *arguments])

    def signal_driver(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[DRIVER].send_signal(number)

    async def stop(self, name: str) -> None:
        """End a process if it runs, with SIGKILL after a timeout."""
        # Before its children lose their parent: then they could not be found.
        self._watch()
        process = self._processes.pop(name, None)
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

    async def _start(self, name: str, module: list[str], *, stdout: int | None = None) -> asyncio.subprocess.Process:
        with contextlib.ExitStack() as files:
            log = None if name == DRIVER else files.enter_context(self._log(name).open("w"))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *module,
                env=self._environment,
                stdin=asyncio.subprocess.PIPE if name == HEAD else asyncio.subprocess.DEVNULL,
                stdout=stdout or log,
                stderr=log,
                # The launcher handles Ctrl-C, and forwards it.
                start_new_session=True,
            )
        self._processes[name] = process
        self._watch()
        if name != DRIVER:
            task = asyncio.create_task(self._monitor(name, process))
            self._tasks.add(task)
        return process

    async def _monitor(self, name: str, process: asyncio.subprocess.Process) -> None:
        if process.stdout is not None:
            async for line in process.stdout:
                self.on_line(line.decode(errors="replace").strip())
        code = await process.wait()
        if name in self._processes:
            lines = self._log(name).read_text(errors="replace").strip().splitlines()
            self.on_exit(f"{name} exited with code {code}: {lines[-1] if lines else 'it printed nothing'}")

    def _log(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-').replace(chr(39), '')}.out"


@contextmanager
def session(logs: Path, prefix: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder for Ray's files, and a function that registers new processes.

    The folder and the processes end with the context, or when this process is killed. `logs` keeps the workers' output.
    """
    with session_folder() as folder, watched(folder, _EPITAPH) as watch:
        try:
            yield folder, watch
        finally:
            watch()
            keep_worker_logs(folder, logs, prefix)


def ray_environment(variables: Mapping[str, str], address: str, token: Path) -> dict[str, str]:
    """The environment of Ray, its workers and the driver on the machine with this address."""
    environment = {
        name: value for name, value in variables.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
    } | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **RAY_VARIABLES}
    # By default, Gloo resolves the host name, often to the loopback interface.
    for interface, addresses in interfaces().items():
        if address in addresses:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment
