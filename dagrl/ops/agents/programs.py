"""Runs a user's program once for a trajectory: an async function, a command, or a service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from dagrl.config.errors import in_one_line
from dagrl.config.schema import AgentSpec
from dagrl.log_ends import LOOK_EVERY_S, LogEnds
from dagrl.ops.agents.results import ProgramError, ProgramResult, program_result
from dagrl.redact import hiding
from dagrl.rewards.sandbox import runner as sandbox

if TYPE_CHECKING:
    import aiohttp

OUTPUT_BYTES = 16 << 10
"""Number of characters kept of the end of a command's output."""
_RESULT = "result.json"
_RESULT_BYTES = 16 << 20
_MEMORY_MIB = 4096
"""Address space of a sandboxed program, which imports more than a policy's code."""
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_STARTER = Path(__file__).with_name("starter.py")


class Program(Protocol):
    """A way to run the user's program."""

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        """Run it to its end, on the endpoint's event loop. Raises ProgramError; ends it if cancelled."""


class CommandProgram:
    """Runs a process for each trajectory, in a process session that ends with it."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str], folder: Path) -> None:
        self._command = (sys.executable, *command[1:]) if command[0] == "python" else command
        self._env, self._folder, self._hide = env, folder, hiding({"env": env})

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        with TemporaryDirectory(prefix="dagrl-agent-") as made:
            result, output, task = (Path(made, name) for name in ("result.json", "output", "task.json"))
            # A file, because a program may end before it has read a pipe.
            task.write_text(json.dumps(row))
            endpoint = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "DAGRL_RESULT": str(result)}
            inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
            with output.open("ab") as file, task.open("rb") as stdin:
                process = await asyncio.create_subprocess_exec(
                    # Ends the command when this process ends, for any reason.
                    *(sys.executable, "-I", "-S", str(_STARTER), str(os.getpid()), *self._command),
                    stdin=stdin,
                    stdout=file,
                    stderr=file,
                    cwd=self._folder,
                    env={**inherited, **self._env, **endpoint},
                    start_new_session=True,
                )
            try:
                status = await _ended(process, LogEnds(output))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            said = self._hide(_end_of(output))
            return _process_result(status, said, _result_in(result, said))


class SandboxedProgram:
    """Confined Python programs, each watched by a thread."""

    def __init__(self, spec: AgentSpec, folder: Path) -> None:
        assert spec.command is not None
        _, file, *self._arguments = spec.command
        self._code = (folder / file).read_text()
        self._env, self._timeout_s, self._hide = spec.env, spec.timeout_s, hiding({"env": spec.env})
        self._threads = ThreadPoolExecutor(spec.max_running, thread_name_prefix="sandboxed agent")

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        endpoint = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "DAGRL_RESULT": _RESULT}
        run = partial(
            sandbox.run,
            self._code,
            stdin=json.dumps(row),
            timeout_s=self._timeout_s,
            memory_mib=_MEMORY_MIB,
            connects_to=urlsplit(base_url).port,
            arguments=self._arguments,
            environment={**self._env, **endpoint},
            kept=_RESULT,
        )
        ended = await asyncio.get_running_loop().run_in_executor(self._threads, run)
        said = self._hide((ended.stdout + ended.stderr)[-OUTPUT_BYTES:])
        if ended.outcome is sandbox.Outcome.TIMED_OUT:
            raise ProgramError(f"it {ended.outcome.value}", said, "timeout")
        if ended.outcome is sandbox.Outcome.TOO_MUCH:
            raise ProgramError(f"it {ended.outcome.value}", said)
        return _process_result(ended.exit_status, said, ended.kept)


class ServiceProgram:
    """A service that runs the program itself."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: aiohttp.ClientSession | None = None

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        import aiohttp

        from dagrl.bounded_http import AnswerError
        from dagrl.ops.agents.client_transport import open_session

        self._client = self._client or open_session()
        task = {"base_url": base_url, "api_key": key, "row": row}
        try:
            async with self._client.post(self._url, json=task, headers={"Accept-Encoding": "identity"}) as answer:
                body = await _read(answer)
        except AnswerError as error:
            raise ProgramError(f"it {error}", failure="network") from error
        except aiohttp.ClientError as error:
            raise ProgramError(f"it cannot be reached: {_shown(str(error), key)}", failure="network") from error
        if not 200 <= answer.status < 300:
            raise ProgramError(f"it answered {answer.status}: {_shown(body, key)}", failure="network")
        try:
            return program_result(json.loads(body) if body.strip() else None)
        except (ValueError, RecursionError) as error:
            raise ProgramError(
                f"it answered in another form than JSON: {_shown(body, key)}", failure="network"
            ) from error


def _shown(said: str, key: str) -> str:
    return in_one_line(said.replace(key, "***")[:200])


async def _read(answer: aiohttp.ClientResponse) -> str:
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ProgramError(f"it answered in the encoding {encoding[:40]!r}, which was not asked for", failure="network")
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > _RESULT_BYTES:
            raise ProgramError(f"it answered with more than {_RESULT_BYTES >> 20} MiB", failure="network")
    return body.decode(errors="replace")


async def _ended(process: asyncio.subprocess.Process, output: LogEnds) -> int:
    """The exit status of a process, whose output is kept short until it ends."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_EVERY_S))[0]:
            output.cut()
    finally:
        waiting.cancel()
    return waiting.result()


def _process_result(status: int, said: str, result: str | None) -> ProgramResult:
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
        raise ProgramError(f"it {how}{_last_line(said)}", said)
    try:
        return program_result(None if result is None else json.loads(result), said)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"its result file is not JSON: {error}", said) from error


def _result_in(file: Path, said: str) -> str | None:
    """The result file's text; None if there is none. ProgramError for a pipe, a device or a huge file."""
    if not file.exists():
        return None
    if not file.is_file() or file.stat().st_size > _RESULT_BYTES:
        raise ProgramError(f"its result is no file of less than {_RESULT_BYTES >> 20} MiB", said)
    return file.read_text(errors="replace")


def _end_of(file: Path) -> str:
    with file.open("rb") as output:
        output.seek(max(0, file.stat().st_size - OUTPUT_BYTES))
        return output.read().decode("utf-8", "replace")


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
