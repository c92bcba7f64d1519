"""The process in which an agent's async functions run: a function, or an environment.

Imports the standard library and modules of dagrl that do so, because its Python need not have dagrl's packages.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dagrl.config.errors import bounded
from dagrl.environments.failures import EnvironmentFailedError, FailureClass
from dagrl.ops.agents.results import ProgramError, ProgramResult, program_result
from dagrl.plugins.agent import NamedAgent
from dagrl.plugins.calls import ending_children
from dagrl.plugins.custom import importable_from, raised_by
from dagrl.sandboxes.pool import SandboxPool, pool_of

_FAILURES = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""Exceptions of user functions. SystemExit and KeyboardInterrupt would end the loop, and every agent with it."""
_CLOSES_S = 30.0


class FunctionProgram:
    """Async functions, called on one event loop."""

    def __init__(
        self,
        function: Callable[..., Awaitable[object]],
        args: Mapping[str, object],
        score: Callable[..., Awaitable[Iterable[object]]] | None = None,
        close: Callable[[], Awaitable[object]] | None = None,
        sandboxes: SandboxPool | None = None,
    ) -> None:
        """`score` is an async function of the states of `Unscored` results, which returns a result for each.

        The function gets one of the `sandboxes` for each call.
        """
        self._function, self._args, self._score, self._close = function, args, score, close
        self._sandboxes = sandboxes
        self._transport: Any = None

    @property
    def scores_groups(self) -> bool:
        return self._score is not None

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        """The function's result. Raises ProgramError if it fails."""
        client = self._client(base_url, key)
        try:
            async with self._sandbox() as given:
                with ending_children(self._function):
                    result = program_result(await self._function(client, dict(row), **self._args, **given))
        except _FAILURES as error:
            raise _failure("it", self._function, error) from error
        if result.state is not None and self._score is None:
            raise ProgramError("it returned Unscored, and has no method `score`; return the reward")
        return result

    async def score(self, states: Sequence[object]) -> list[ProgramResult]:
        """The results of a group. Raises ProgramError."""
        score = self._score
        assert score is not None, "the function scores no groups"
        try:
            with ending_children(score):
                results = [program_result(result) for result in await score(states)]
        except _FAILURES as error:
            raise _failure("scoring its group", score, error) from error
        if len(results) != len(states):
            raise ProgramError(f"scoring its group gave {len(results)} results for {len(states)} samples")
        return results

    async def open(self) -> None:
        """Start the first sandboxes."""
        if self._sandboxes is not None:
            # The next episode reports a failure.
            with suppress(EnvironmentFailedError):
                await self._sandboxes.open()

    async def close(self) -> None:
        if self._sandboxes is not None:
            await self._sandboxes.close()
        if self._close is not None:
            with suppress(*_FAILURES):
                await asyncio.wait_for(self._close(), _CLOSES_S)

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[dict[str, Any]]:
        if self._sandboxes is None:
            yield {}
            return
        async with self._sandboxes.sandbox() as sandbox:
            yield {"sandbox": sandbox}

    def _client(self, base_url: str, key: str) -> Any:
        try:
            import httpx
            from openai import AsyncOpenAI
        except ImportError:
            return SimpleNamespace(base_url=base_url, api_key=key)
        if self._transport is None:
            try:
                from dagrl.ops.agents.client_transport import ClientTransport
            except ImportError:  # of aiohttp
                self._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
            else:
                self._transport = ClientTransport()
        # Settings of the user's environment, such as proxies, do not apply to this endpoint.
        http = httpx.AsyncClient(transport=self._transport, trust_env=False, timeout=None)
        return AsyncOpenAI(base_url=base_url, api_key=key, http_client=http, max_retries=0, timeout=None)


def _failure(what: str, function: Callable[..., object], error: BaseException) -> ProgramError:
    """The failure of a function. Raises `error` if it cancels this task, not a task that the function awaited."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    if isinstance(error, ProgramError):
        return error
    failure: FailureClass = error.failure if isinstance(error, EnvironmentFailedError) else "program"
    return ProgramError(bounded(f"{what} {raised_by(function, error)}"), failure=failure)


def program_of(agent: NamedAgent) -> FunctionProgram:
    """The program of an agent. Raises ValueError if it cannot be loaded, or the environment cannot be made."""
    if problem := agent.problem():
        raise ValueError(problem[1])
    made = agent.load()
    pool = None
    if agent.sandbox is not None:
        with importable_from(None if agent.folder is None else Path(agent.folder)):
            pool = pool_of(agent.sandbox)
    if agent.environment is None:
        return FunctionProgram(made, agent.args, sandboxes=pool)
    try:
        # It may import modules that its arguments name.
        with importable_from(None if agent.folder is None else Path(agent.folder)):
            environment = made(**agent.args)
    except (ValueError, EnvironmentFailedError) as error:
        raise ValueError(bounded(f"the environment `{agent.name}` cannot be made: {error}")) from error
    except Exception as error:  # an environment may raise anything
        raise ValueError(bounded(f"the environment `{agent.name}` {raised_by(made, error)}")) from error
    return FunctionProgram(
        environment.solve, {}, getattr(environment, "score", None), getattr(environment, "close", None), pool
    )


class _Host:
    """Serves a worker: its runs, and states that wait for their group."""

    def __init__(self, program: FunctionProgram, connection: Connection) -> None:
        self._program, self._connection = program, connection
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._states: dict[int, object] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="agents", daemon=True).start()
        asyncio.run_coroutine_threadsafe(program.open(), self.loop)

    def _serve(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            # A task of a function has raised SystemExit, and no run would end.
            os._exit(1)

    def handle(self, kind: str, number: int, *given: Any) -> None:
        match kind:
            case "run":
                self._begin(number, self._run(number, *given))
            case "score":
                self._begin(number, self._program.score([self._states.pop(each) for each in given[0]]))
            case "cancel" if number in self._tasks:
                self._tasks[number].cancel()
            case "forget":
                self._states.pop(number, None)

    async def _run(self, number: int, base_url: str, key: str, row: Mapping[str, object]) -> list[ProgramResult]:
        result = await self._program.run(base_url, key, row)
        if result.state is not None:
            self._states[number] = result.state
        return [result]

    def _begin(self, number: int, work: Coroutine[Any, Any, list[ProgramResult]]) -> None:
        async def answered() -> None:
            answer: list[Any] = [number, [], None, None]
            try:
                answer[1] = [[result.reward, dict(result.metrics), result.state is not None] for result in await work]
            except ProgramError as error:
                answer[2:] = str(error), error.failure
            finally:
                del self._tasks[number]
            self._connection.send_bytes(json.dumps(answer).encode())

        self._tasks[number] = self.loop.create_task(answered())

    def close(self) -> None:
        with suppress(*_FAILURES):
            asyncio.run_coroutine_threadsafe(self._program.close(), self.loop).result(_CLOSES_S)


def main(descriptor: str) -> None:
    """Serve the worker at the other end of a socket, in JSON, until that ends.

    The first message has the fields of `NamedAgent`; the first answer is ``[problem, scores_groups]``. Then
    ``["run", number, url, key, row]`` runs it, ``["score", number, numbers]`` scores the states of these runs,
    ``["forget", number]`` drops a state, and ``["cancel", number]`` cancels a run. Runs and scores are answered with
    ``[number, results, error, failure]``, where a result is ``[reward, metrics, unscored]``.
    """
    connection = Connection(int(descriptor))
    try:
        agent = NamedAgent(**json.loads(connection.recv_bytes()))
        agent.make_importable()
        program = program_of(agent)
    except ValueError as error:
        connection.send_bytes(json.dumps([str(error), False]).encode())
        os._exit(1)
    connection.send_bytes(json.dumps([None, program.scores_groups]).encode())
    host = _Host(program, connection)
    with suppress(EOFError, OSError):
        while True:
            host.loop.call_soon_threadsafe(host.handle, *json.loads(connection.recv_bytes()))
    host.close()
    # Not the exit of an interpreter, which would wait for threads of the function.
    os._exit(0)
