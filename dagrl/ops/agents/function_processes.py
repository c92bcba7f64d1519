"""Runs agents' functions and environments in separate processes, of the worker's Python or another.

The official client uses more CPU time for a request than the endpoint and the engine's client, which share the worker's
interpreter. The packages of an environment may contradict those of the worker.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dagrl.environments import foreign
from dagrl.environments.failures import FailureClass
from dagrl.ops.agents.results import ProgramError, ProgramResult
from dagrl.plugins.agent import NamedAgent

_CORES_OF_A_PROCESS, _MOST_PROCESSES = 4, 4
_STARTS_S = 300.0
_ENDS_S = 5.0
_CLOSES_S = 10.0


class FunctionProcesses:
    """A `Program`: an agent whose runs are distributed over processes, one for every four cores and four at most."""

    def __init__(self, agent: NamedAgent, python: Path | None = None, label: str | None = None) -> None:
        """`python` runs the processes: None for this Python, with dagrl's packages.

        Sandboxes that an earlier object with this `label` left behind are removed. Default: one of its own.
        """
        self._agent, self._python, self._label = agent, python, label or secrets.token_hex(8)
        self._numbers = itertools.count()
        count = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // _CORES_OF_A_PROCESS))
        self._processes: list[_Process | None] = [None] * count
        """A process is started for its first run, and again after it has died."""
        self.scores_groups = False
        """Whether the results of a group are scored together; known after `start`."""

    def start(self) -> None:
        """Start the first process. Raises ValueError if the agent cannot be loaded there."""
        process = self._processes[0] = self._started(0)
        self.scores_groups = process.loaded(_STARTS_S)

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        """Run the agent in one of the processes.

        Raises ProgramError if it fails or its process dies. Ends the run if cancelled.
        """
        number = next(self._numbers)
        # A group is scored in one process.
        index = int(str(row["group_id"])) if self.scores_groups else number
        index %= len(self._processes)
        process = self._processes[index]
        if process is None or process.over:
            process = self._processes[index] = self._started(index)
        (result,) = await process.ask(number, "run", base_url, key, row)
        return result

    def _started(self, index: int) -> _Process:
        return _Process(self._agent.in_process(f"{self._label}-{index}", len(self._processes)), self._python)

    async def score(self, states: Sequence[Any]) -> list[ProgramResult]:
        """The results of a group, whose states are those of `run`. Raises ProgramError."""
        process: _Process = states[0].process
        if any(state.process is not process for state in states):
            raise ProgramError("the process that had a state of its group has ended")
        return await process.ask(next(self._numbers), "score", [state.number for state in states])

    def close(self) -> None:
        """Let environments close, for some seconds, and end the processes."""
        processes = [process for process in self._processes if process is not None]
        for process in processes:
            process.end()
        deadline = time.monotonic() + _CLOSES_S
        for process in processes:
            process.kill_at(deadline)


class _State:
    """The state of an episode in its process, until it is scored or dropped."""

    def __init__(self, process: _Process, number: int) -> None:
        self.process, self.number = process, number
        weakref.finalize(self, process.forget, number).atexit = False


class _Process:
    """A process that has been started."""

    def __init__(self, agent: NamedAgent, python: Path | None) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                foreign.command(python, "dagrl.ops.agents.functions", theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=foreign.variables(python),
                stdin=subprocess.DEVNULL,
                # Only the driver handles Ctrl-C.
                start_new_session=True,
            )
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._waiting: dict[int, asyncio.Future[list[ProgramResult]]] = {}
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._handshake = threading.Event()
        self._problem: str | None = None
        self._scores_groups = self._started = False
        self.over = False
        self._send(agent.as_values())
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"agents' process {self._process.pid}", daemon=True).start()

    def loaded(self, seconds: float) -> bool:
        """Wait until the agent is loaded; whether it scores groups. Raises ValueError if that fails."""
        if not self._handshake.wait(seconds):
            raise ValueError(f"the agent was not loaded in {seconds:g} s; do such work in its first run")
        if self._problem is not None:
            raise ValueError(self._problem)
        return self._scores_groups

    async def ask(self, number: int, kind: str, *given: object) -> list[ProgramResult]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        # `_read` sets `over` before it fails what waits.
        if self.over:
            self._fail(future)
        self._send([kind, number, *given])
        try:
            return await future
        except asyncio.CancelledError:
            self._send(["cancel", number])
            raise
        finally:
            self._waiting.pop(number, None)

    def forget(self, number: int) -> None:
        self._send(["forget", number])

    def end(self) -> None:
        """Close the connection, which ends the process when its environment has closed."""
        self._messages.put(None)

    def kill_at(self, deadline: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        """Kill the process and what it has started, except in sessions of their own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: object) -> None:
        self._messages.put(json.dumps(message).encode())

    # -- in separate threads

    def _write(self) -> None:
        # `_read` reports a process that has died.
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._connection.send_bytes(message)
            self._socket.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            self._problem, self._scores_groups = json.loads(self._connection.recv_bytes())
            self._started = self._problem is None
            self._handshake.set()
            while True:
                self._answer(*json.loads(self._connection.recv_bytes()))
        self._messages.put(None)
        try:
            code = self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:  # the function has closed the socket
            self._kill()
            code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._problem = self._problem or f"the process of its function ended with {how}"
        self.over = True
        for future in [*self._waiting.values()]:
            self._fail(future)
        self._handshake.set()
        self._connection.close()
        self._socket.close()

    def _answer(self, number: int, results: list[list[Any]], error: str | None, failure: FailureClass) -> None:
        if (future := self._waiting.get(number)) is None:
            # Cancelled.
            self.forget(number)
        elif error is not None:
            _settle(future, ProgramError(error, failure=failure))
        else:
            made = [
                ProgramResult(reward, metrics, state=_State(self, number) if unscored else None)
                for reward, metrics, unscored in results
            ]
            _settle(future, made)

    def _fail(self, future: asyncio.Future[list[ProgramResult]]) -> None:
        failure: FailureClass = "program" if self._started else "start"
        _settle(future, ProgramError(self._problem or "", failure=failure))


def _settle(future: asyncio.Future[list[ProgramResult]], result: list[ProgramResult] | ProgramError) -> None:
    """End a future from another thread."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(result, ProgramError):
            future.set_exception(result)
        else:
            future.set_result(result)

    with suppress(RuntimeError):  # the loop has ended with the worker
        future.get_loop().call_soon_threadsafe(settle)
