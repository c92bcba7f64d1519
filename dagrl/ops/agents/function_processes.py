"""Runs agents' functions in separate processes.

The official client uses more CPU time for a request than the endpoint and the engine's client, which share the worker's
interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dagrl.environments.failures import FailureClass
from dagrl.ops.agents.functions import FunctionProgram
from dagrl.ops.agents.programs import ProgramError, ProgramResult
from dagrl.plugins.custom import load_function

_CORES_OF_A_PROCESS, _MOST_PROCESSES = 4, 4
_ENDS_S = 5.0


class FunctionProcesses:
    """A `Program`: a function whose runs are distributed over processes, one for every four cores and four at most."""

    def __init__(self, function: str, args: Mapping[str, object], folder: Path | None) -> None:
        """`function` is ``module:function``, found in `folder` or on the module path."""
        named = {"function": function, "args": dict(args), "folder": str(folder) if folder is not None else None}
        self._named = json.dumps(named).encode()
        self._numbers = itertools.count()
        count = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // _CORES_OF_A_PROCESS))
        self._processes: list[_Process | None] = [None] * count
        """A process is started for its first run, and again after it has died."""

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        """Run the function in one of the processes; all on one event loop.

        Raises ProgramError if it fails or its process dies. Ends the run if cancelled.
        """
        number = next(self._numbers)
        index = number % len(self._processes)
        process = self._processes[index]
        if process is None or process.over:
            process = self._processes[index] = _Process(self._named, asyncio.get_running_loop())
        return await process.run(number, base_url, key, row)

    def close(self) -> None:
        for process in self._processes:
            if process is not None:
                process.close()


class _Process:
    """A process that has been started."""

    def __init__(self, named: bytes, loop: asyncio.AbstractEventLoop) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dagrl.ops.agents.function_processes", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                # Only the driver handles Ctrl-C.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._loop = loop
        self._waiting: dict[int, asyncio.Future[ProgramResult]] = {}
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.over = False
        self._messages.put(named)
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"agents' process {self._process.pid}", daemon=True).start()

    async def run(self, number: int, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        self._waiting[number] = future = self._loop.create_future()
        self._messages.put(json.dumps([number, base_url, key, row]).encode())
        try:
            return await future
        except asyncio.CancelledError:
            self._messages.put(json.dumps([number]).encode())
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    # -- in separate threads

    def _write(self) -> None:
        # `_read` reports a process that has died.
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._connection.send_bytes(message)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._loop.call_soon_threadsafe(self._answer, *json.loads(self._connection.recv_bytes()))
        self._messages.put(None)
        try:
            code = self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:  # the function has closed the socket
            self.close()
            code = self._process.wait()
        with suppress(RuntimeError):  # the loop has ended with the worker
            self._loop.call_soon_threadsafe(self._lost, code)

    # -- on the event loop

    def _answer(
        self, number: int, reward: float | None, metrics: dict[str, float], error: str | None, failure: FailureClass
    ) -> None:
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(ProgramError(error, failure=failure))
        else:
            future.set_result(ProgramResult(reward, metrics))

    def _lost(self, code: int) -> None:
        self.over = True
        self._connection.close()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProgramError(f"the process of its function ended with {how}"))


def main(descriptor: int) -> None:
    """The process in which functions run: serves the worker at the other end of a socket, in JSON, until that ends.

    The first message names the function. Then ``[number, url, key, row]`` runs it and ``[number]`` cancels that run;
    the answers are ``[number, reward, metrics, error, failure]``, with null for a reward that is not given and for no
    error.
    """
    connection = Connection(descriptor)
    named = json.loads(connection.recv_bytes())
    folder = Path(named["folder"]) if named["folder"] is not None else None
    program = FunctionProgram(load_function(named["function"], folder), named["function"], named["args"])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="runs", daemon=True).start()
    runs: dict[int, asyncio.Task[None]] = {}

    async def run(number: int, url: str, key: str, row: Mapping[str, object]) -> None:
        answer: list[Any] = [number, None, {}, None, None]
        try:
            verdict = await program.run(url, key, row)
            answer[1:3] = verdict.reward, dict(verdict.metrics)
        except ProgramError as error:
            answer[3:] = str(error), error.failure
        finally:
            del runs[number]
        connection.send_bytes(json.dumps(answer).encode())

    def begin(number: int, *run_of: Any) -> None:
        runs[number] = loop.create_task(run(number, *run_of))

    def cancel(number: int) -> None:
        if number in runs:
            runs[number].cancel()

    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # Not the exit of an interpreter, which would wait for threads of the function.
            os._exit(0)
        loop.call_soon_threadsafe(begin if len(message) > 1 else cancel, *message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
