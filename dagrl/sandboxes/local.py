"""Sandboxes on this machine: processes in a folder, which Linux confines to it, without network."""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dagrl.environments.failures import EnvironmentFailedError
from dagrl.rewards.sandbox import launcher
from dagrl.rewards.sandbox.runner import SYSTEM, python_paths
from dagrl.rewards.sandbox.syscalls import filter_program
from dagrl.sandboxes import local_init
from dagrl.sandboxes.sandbox import (
    MOST_FILE_BYTES,
    MOST_PROCESSES,
    OUTPUT_BYTES,
    READ_BYTES,
    TIMED_OUT,
    ExecResult,
    RawResult,
    SandboxRequest,
    ShellSandbox,
    as_arguments,
    as_bytes,
)

_PROGRAMS = ("/bin", "/usr/bin", "/usr/local/bin", "/usr/share", "/etc/alternatives")
_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
_LOOK_EVERY_S = 0.5
_END_S = 15.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class LocalProvider:
    """Processes of this machine. A sandbox ends with the process that started it, whatever ends that."""

    def __init__(self, label: str, *, confined: bool = True) -> None:
        """With `confined`, programs see the system's files and their own folder, have no network and no privileges, and
        can change neither owners and modes of files nor send signals. Without, they are processes of this user.
        """
        self._confined = confined
        self._root = Path(tempfile.gettempdir(), f"dagrl-sandboxes-{os.getuid()}", label).resolve()
        self._running: dict[int, SandboxRequest] = {}
        """Process id -> its request; the session of the same number has all of its processes."""
        self._watch: asyncio.Task[None] | None = None

    async def start(self, request: SandboxRequest) -> LocalSandbox:
        if request.image is not None:
            raise EnvironmentFailedError("start", "the provider local has no images; remove `image`")
        if self._confined == request.network:
            raise EnvironmentFailedError("start", "the provider local has a network only with args: {confined: false}")
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(dir=self._root))
        work = folder / "work"
        work.mkdir()
        ours, theirs = socket.socketpair()
        with theirs:
            order = self._order(request, work) | {"folder": str(folder), "socket": theirs.fileno()}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", local_init.__file__, json.dumps(order)),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={},
                cwd=work,
                start_new_session=True,
            )
        sandbox = LocalSandbox(folder, process, *await asyncio.open_connection(sock=ours))
        try:
            await sandbox.ready()
        except BaseException:
            sandbox.hang_up()
            raise
        self._running[process.pid] = request
        sandbox.ended.add_done_callback(lambda _: self._running.pop(process.pid, None))
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._watched())
        return sandbox

    async def sweep(self) -> int:
        return await asyncio.to_thread(_sweep, self._root)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        with suppress(OSError):
            self._root.rmdir()

    def _order(self, request: SandboxRequest, work: Path) -> dict[str, Any]:
        limits = {"RLIMIT_FSIZE": MOST_FILE_BYTES, "RLIMIT_CORE": 1}
        if request.memory_mib is not None:
            limits["RLIMIT_AS"] = request.memory_mib << 20
        cores = sorted(os.sched_getaffinity(0))
        confined = {
            "limits": limits,
            "readable": [*python_paths(), *SYSTEM, *_PROGRAMS],
            "writable": ["/dev/null"],
            "owned": [str(work)],
            "port": None,
            "forks": False,
            "filter": filter_program(platform.machine(), write_files=True, forks=True, programs=True).hex(),
        }
        return {
            "launchers": str(Path(launcher.__file__).parent),
            "lifetime_s": request.lifetime_s,
            "limits": limits,
            "cpus": random.sample(cores, min(len(cores), math.ceil(request.cpus))) if request.cpus else None,
            "confined": confined if self._confined else None,
        }

    async def _watched(self) -> None:
        """Kill the commands of sandboxes with too many processes, or with more memory than each of them may have."""
        while self._running:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(_kill_excess, dict(self._running))


PROVIDER = LocalProvider


class LocalSandbox(ShellSandbox):
    """A process that starts others in its folder."""

    def __init__(
        self,
        folder: Path,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._folder, self._process, self._reader, self._writer = folder, process, reader, writer
        self._answers: dict[int, asyncio.Future[int]] = {0: asyncio.get_running_loop().create_future()}
        self._number = 0
        self.ended = asyncio.get_running_loop().create_task(self._listen())

    async def ready(self) -> None:
        try:
            await self._answers[0]
        except OSError as error:
            raise EnvironmentFailedError("start", f"its first process has ended: {error}") from error
        await self.check()

    def hang_up(self) -> None:
        """Let the sandbox end."""
        self._writer.close()

    async def run(self, command: list[str], stdin: bytes) -> RawResult:
        return await self._execute(command, stdin, {}, "", None, READ_BYTES + 1)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        arguments = as_arguments(command)
        result = await self._execute(arguments, as_bytes(stdin), env or {}, cwd or "", timeout_s, OUTPUT_BYTES)
        return ExecResult(result.exit_code, *(text.decode(errors="replace") for text in (result.stdout, result.stderr)))

    async def close(self) -> None:
        self.hang_up()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _execute(
        self, command: list[str], stdin: bytes, env: Mapping[str, str], cwd: str, timeout_s: float | None, most: int
    ) -> RawResult:
        self._number += 1
        number, work = self._number, self._folder / "work"
        files = {name: self._folder / f"{name}-{number}" for name in ("stdin", "stdout", "stderr")}
        failed = files["stdout"].with_name(f"stdout-{number}.{local_init.FAILED}")
        variables = {"PATH": _PATH, "LANG": "C.UTF-8", "HOME": str(work), "TMPDIR": str(work)}
        order = {
            "command": command,
            "env": variables | dict(env),
            "cwd": str(work / cwd),
            **{name: str(file) for name, file in files.items()},
        }
        try:
            files["stdin"].write_bytes(stdin)
            code = await self._answer(number, order, timeout_s)
            stdout, stderr = (_head(files[name], most) for name in ("stdout", "stderr"))
            if code == local_init.NOT_CONFINED and failed.exists():
                raise EnvironmentFailedError("exec", f"this machine cannot confine programs: {failed.read_text()}")
        except OSError as error:
            raise EnvironmentFailedError("exec", f"the sandbox has ended, or has no disk: {error}") from error
        finally:
            for file in (*files.values(), failed):
                file.unlink(missing_ok=True)
        return RawResult(code, stdout, stderr)

    async def _answer(self, number: int, order: Mapping[str, Any], timeout_s: float | None) -> int:
        if self.ended.done():
            raise OSError("its process has ended")
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self._send(number, order)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._send(number, None)
            async with asyncio.timeout(_END_S):
                await answer
            return TIMED_OUT
        except asyncio.CancelledError:
            self._send(number, None)
            raise
        finally:
            self._answers.pop(number, None)

    def _send(self, number: int, order: Mapping[str, Any] | None) -> None:
        self._writer.write(json.dumps([number, order]).encode() + b"\n")

    async def _listen(self) -> None:
        with suppress(OSError):
            async for line in self._reader:
                number, status = json.loads(line)
                if (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_result(status)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(OSError("its process has ended"))


def _head(file: Path, most: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(most)


def _processes() -> list[tuple[int, int, int]]:
    """All processes: process group, session, bytes of memory."""
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - often
        if entry.isdigit():
            with suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
                found.append((int(fields[2]), int(fields[3]), int(fields[21]) * _PAGE_BYTES))
    return found


def _kill_excess(running: Mapping[int, SandboxRequest]) -> None:
    counts, used, groups = Counter[int](), Counter[int](), defaultdict[int, set[int]](set)
    for group, session, memory in _processes():
        if session in running and group != session:
            counts[session] += 1
            used[session] += memory
            groups[session].add(group)
    for session, request in running.items():
        limit = math.inf if request.memory_mib is None else request.memory_mib << 20
        if counts[session] > MOST_PROCESSES or used[session] > limit:
            for group in groups[session]:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)


def _sweep(root: Path) -> int:
    """Kill processes of sandboxes below `root`, and remove these."""
    if not root.is_dir():
        return 0
    mark = f"{root}/".encode()
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):  # noqa: PTH208
        with suppress(OSError):
            place = Path("/proc", str(pid))
            texts = [
                (place / "cmdline").read_bytes(),
                (place / "environ").read_bytes(),
                bytes((place / "cwd").readlink()),
            ]
            if pid != os.getpid() and any(mark in text for text in texts):
                os.kill(pid, signal.SIGKILL)
    found = [*root.iterdir()]
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return len(found)
