"""What all sandboxes do: run commands, and read and write files. What a provider does: start and remove them."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dagrl.environments.failures import EnvironmentFailedError

OUTPUT_BYTES = 1 << 20
"""Bytes kept of the beginning of a command's standard output and of its standard error."""
MOST_FILE_BYTES = 1 << 30
"""The largest file that a command can write, its output included."""
READ_BYTES = 16 << 20
MOST_PROCESSES = 256
TIMED_OUT = 124
"""Exit code of a command that reached its time limit, as that of ``timeout``."""
_GRACE_S = 30.0
"""Time for the provider to answer, beyond the command's own limit."""


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """A sandbox to start."""

    image: str | None = None
    cpus: float | None = None
    """None: unlimited."""
    memory_mib: int | None = None
    network: bool = False
    lifetime_s: float = 3600.0
    """The sandbox ends by itself after this time, whatever has become of its owner."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The end of a command."""

    exit_code: int
    """`TIMED_OUT` at the time limit; 128 + N after the signal N."""
    stdout: str
    """At most `OUTPUT_BYTES`, from the beginning."""
    stderr: str


class Sandbox(Protocol):
    """A running sandbox. Its methods raise EnvironmentFailedError if the sandbox fails, not the command."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """Run a command, a text by ``sh``, in the working directory or `cwd`, until it ends or `timeout_s` is over."""

    async def write(self, path: str, data: str | bytes) -> None:
        """Write a file and the folders above it. Relative paths begin at the working directory."""

    async def read(self, path: str) -> bytes:
        """Read a file. Raises FileNotFoundError, and ValueError for one of more than `READ_BYTES`."""

    async def close(self) -> None:
        """Remove the sandbox. Does not raise."""


class Provider(Protocol):
    """Starts sandboxes that have the label of their owner."""

    async def start(self, request: SandboxRequest) -> Sandbox:
        """Start a sandbox. Raises EnvironmentFailedError. Leaves nothing behind if cancelled."""

    async def sweep(self) -> int:
        """Remove sandboxes of earlier owners with the same label. Returns their number."""

    async def close(self) -> None:
        """Close the connection to the provider."""


def as_bytes(data: str | bytes) -> bytes:
    return data.encode("utf-8", "replace") if isinstance(data, str) else data


def as_arguments(command: str | Sequence[str]) -> list[str]:
    return ["sh", "-c", command] if isinstance(command, str) else [*command]


@dataclass(frozen=True, slots=True)
class RawResult:
    """The end of a command that a provider has run."""

    exit_code: int
    stdout: bytes
    stderr: bytes


# The output goes to files: a command that writes without end does not flood the connection, and processes in the
# background do not keep it open. Standard input has a known length, because connections cannot end it alone.
_EXEC = f"""limit=$1 cwd=$2 size=$3; shift 3
d=$(mktemp -d) || exit 125
head -c "$size" >"$d/in"
if cd -- "$cwd" 2>"$d/err"; then
  (ulimit -f {MOST_FILE_BYTES // 512}; exec timeout -s KILL "$limit" "$@") <"$d/in" >"$d/out" 2>"$d/err"
  status=$?
else
  status=125
fi
head -c {OUTPUT_BYTES} "$d/out" 2>/dev/null; head -c {OUTPUT_BYTES} "$d/err" >&2
rm -rf "$d"; exit $status
"""
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && head -c "$2" >"$1"'
_READ = f'if [ -f "$1" ]; then exec head -c {READ_BYTES + 1} -- "$1"; else exit 44; fi'
_NO_FILE = 44
_PROBE = "command -v timeout mktemp head dirname >/dev/null || { echo it has no coreutils >&2; exit 1; }"
_SIGKILL = 128 + 9


class ShellSandbox(ABC):
    """A sandbox of a provider that only runs commands: the image has ``sh`` and coreutils, or busybox."""

    @abstractmethod
    async def run(self, command: list[str], stdin: bytes) -> RawResult:
        """Run a command whose output is short. Raises EnvironmentFailedError."""

    @abstractmethod
    async def close(self) -> None:
        """Remove the sandbox. Does not raise."""

    async def check(self) -> None:
        """Raise EnvironmentFailedError unless the sandbox has the programs that this class calls."""
        result = await self._bounded(["sh", "-c", _PROBE], b"", _GRACE_S)
        if result.exit_code:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[:200]
            raise EnvironmentFailedError("start", f"the image cannot run sh, timeout, mktemp and head: {said}")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        given, limit = as_bytes(stdin), math.ceil(timeout_s)
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        arguments = [str(limit), cwd or ".", str(len(given)), "env", *variables, *as_arguments(command)]
        begun = time.monotonic()
        result = await self._bounded(["sh", "-c", _EXEC, "sh", *arguments], given, limit + _GRACE_S)
        late = result.exit_code == _SIGKILL and time.monotonic() - begun >= limit
        code = TIMED_OUT if late else result.exit_code
        return ExecResult(
            code, *(text[:OUTPUT_BYTES].decode(errors="replace") for text in (result.stdout, result.stderr))
        )

    async def write(self, path: str, data: str | bytes) -> None:
        given = as_bytes(data)
        result = await self._bounded(["sh", "-c", _WRITE, "sh", path, str(len(given))], given, _GRACE_S * 10)
        if result.exit_code:
            raise EnvironmentFailedError("exec", f"cannot write {path}: {result.stderr[:200].decode(errors='replace')}")

    async def read(self, path: str) -> bytes:
        result = await self._bounded(["sh", "-c", _READ, "sh", path], b"", _GRACE_S * 10)
        if result.exit_code == _NO_FILE:
            raise FileNotFoundError(f"the sandbox has no file {path}")
        if result.exit_code:
            raise EnvironmentFailedError("exec", f"cannot read {path}: {result.stderr[:200].decode(errors='replace')}")
        if len(result.stdout) > READ_BYTES:
            raise ValueError(f"{path} of the sandbox has more than {READ_BYTES >> 20} MiB")
        return result.stdout

    async def _bounded(self, command: list[str], stdin: bytes, timeout_s: float) -> RawResult:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.run(command, stdin)
        except TimeoutError as error:
            shown = shlex.join(command)[-80:]
            raise EnvironmentFailedError("timeout", f"no answer to a command in {timeout_s:g} s: {shown}") from error
