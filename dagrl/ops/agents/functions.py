"""Runs an agent's async function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagrl.config.errors import bounded
from dagrl.environments.failures import EnvironmentFailedError
from dagrl.ops.agents.programs import ProgramError, ProgramResult, program_result
from dagrl.plugins.calls import ending_children
from dagrl.plugins.custom import raised_by

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from dagrl.ops.agents.client_transport import ClientTransport

_FAILURES = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
"""Exceptions of user functions. SystemExit and KeyboardInterrupt would end the loop, and every agent with it."""


class FunctionProgram:
    """Async functions in a separate thread, so that a blocking one does not delay the endpoint."""

    def __init__(
        self,
        function: Callable[..., Awaitable[object]],
        place: str,
        args: Mapping[str, object],
        score: Callable[..., Awaitable[Iterable[object]]] | None = None,
    ) -> None:
        """`score` is an async function of the states of `Unscored` results, which returns a result for each."""
        self._function, self._place, self._args, self._score = function, place, args, score
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        self._transport: ClientTransport | None = None

    async def run(self, base_url: str, key: str, row: Mapping[str, object]) -> ProgramResult:
        call = asyncio.run_coroutine_threadsafe(self._call(base_url, key, row), self._loop)
        return program_result(await asyncio.wrap_future(call))

    @property
    def scores_groups(self) -> bool:
        return self._score is not None

    async def score(self, states: Sequence[Any]) -> list[ProgramResult]:
        """The verdicts of a group. Raises ProgramError."""
        score = self._score
        assert score is not None, "the function scores no groups"

        async def call() -> list[Any]:
            try:
                with ending_children(score):
                    return [*await score(states)]
            except _FAILURES as error:
                _unless_cancelled(error)
                raise ProgramError(bounded(f"scoring its group {raised_by(score, error)}")) from error

        given = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))
        return [program_result(result) for result in given]

    async def _call(self, base_url: str, key: str, row: Mapping[str, object]) -> Any:
        client = self._client(base_url, key)
        try:
            with ending_children(self._function):
                return await self._function(client, dict(row), **self._args)
        except _FAILURES as error:
            _unless_cancelled(error)
            failure = error.failure if isinstance(error, EnvironmentFailedError) else "program"
            raise ProgramError(bounded(f"it {raised_by(self._function, error)}"), failure=failure) from error

    def _client(self, base_url: str, key: str) -> AsyncOpenAI:
        import httpx
        from openai import AsyncOpenAI

        from dagrl.ops.agents.client_transport import ClientTransport

        self._transport = self._transport or ClientTransport()
        # Settings of the user's environment, such as proxies, do not apply to this endpoint.
        http = httpx.AsyncClient(transport=self._transport, trust_env=False, timeout=None)
        return AsyncOpenAI(base_url=base_url, api_key=key, http_client=http, max_retries=0, timeout=None)


def _unless_cancelled(error: BaseException) -> None:
    """Raise `error` again if it cancels this task, not a task that a user's function awaited."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
