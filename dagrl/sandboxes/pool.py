"""A pool of sandboxes for one process: starts some before they are needed, and removes them after their episode."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from typing import Any

from dagrl.environments.failures import EnvironmentFailedError
from dagrl.sandboxes.sandbox import Provider, Sandbox, SandboxRequest

_CLOSE_S = 8.0


def load_provider(name: str, label: str, args: Mapping[str, Any]) -> Provider:
    """The provider `name`, or ``module:Class``, whose sandboxes have a label of at most 63 letters, digits and dashes.

    Raises ValueError for a provider that is unknown or not installed, and for wrong arguments.
    """
    module, _, attribute = name.partition(":")
    try:
        made = getattr(
            importlib.import_module(module if attribute else f"dagrl.sandboxes.{module}"), attribute or "PROVIDER"
        )
        return made(label, **args)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the provider of sandboxes `{name}` cannot be loaded: {error}") from error


def pool_of(section: Mapping[str, Any]) -> SandboxPool:
    """The pool of the section `agent.sandbox`, with a ``label``. Raises ValueError."""
    wanted = {each.name: section[each.name] for each in fields(SandboxRequest)}
    options = {name: section[name] for name in ("warm", "starting", "start_timeout_s")}
    return SandboxPool(
        load_provider(section["provider"], section["label"], section["args"]), SandboxRequest(**wanted), **options
    )


class SandboxPool:
    """Sandboxes of one kind. All methods run on one event loop."""

    def __init__(
        self, provider: Provider, request: SandboxRequest, *, warm: int, starting: int, start_timeout_s: float
    ) -> None:
        """Keep `warm` unused sandboxes, and start at most `starting` at a time."""
        self._provider, self._request, self._warm, self._timeout_s = provider, request, warm, start_timeout_s
        self._slots = asyncio.Semaphore(starting)
        self._ready: deque[tuple[float, Sandbox]] = deque()
        self._waiting: deque[asyncio.Future[Sandbox]] = deque()
        self._starts: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._swept: asyncio.Task[int] | None = None

    async def open(self) -> None:
        """Remove what an earlier owner left behind, and start the first sandboxes. May be called again."""
        if self._swept is None:
            self._swept = asyncio.get_running_loop().create_task(self._provider.sweep())
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(self._swept)
        except TimeoutError as error:
            message = f"the provider has not listed its sandboxes in {self._timeout_s:g} s"
            raise EnvironmentFailedError("network", message) from error
        except EnvironmentFailedError:
            self._swept = None
            raise
        self._fill()

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A sandbox of its own for the context. Raises EnvironmentFailedError if none starts."""
        await self.open()
        sandbox = await self._take()
        try:
            yield sandbox
        finally:
            self._remove(sandbox)

    async def close(self) -> None:
        """Remove all sandboxes, for at most `_CLOSE_S` seconds."""
        self._warm = 0
        for task in self._starts:
            task.cancel()
        while self._ready:
            self._remove(self._ready.popleft()[1])
        ending = {*self._starts, *self._closing}
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_S)
        await self._provider.close()

    async def _take(self) -> Sandbox:
        while self._ready:
            born, sandbox = self._ready.popleft()
            if time.monotonic() - born < self._request.lifetime_s / 2:
                self._fill()
                return sandbox
            self._remove(sandbox)
        future: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._fill()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._remove(future.result())
            raise

    def _fill(self) -> None:
        self._waiting = deque(future for future in self._waiting if not future.done())
        missing = self._warm + len(self._waiting) - len(self._ready) - len(self._starts)
        for _ in range(missing):
            task = asyncio.get_running_loop().create_task(self._start())
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def _start(self) -> None:
        """Start a sandbox for the episode that has waited longest, or for later: no episode waits for a certain one."""
        failure: EnvironmentFailedError
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    sandbox = await self._provider.start(self._request)
            except TimeoutError:
                failure = EnvironmentFailedError("start", f"it has not started in {self._timeout_s:g} s")
            except EnvironmentFailedError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - of a user's provider
                failure = EnvironmentFailedError("start", f"{type(error).__name__}: {error}")
            else:
                if (waiting := self._first_waiting()) is not None:
                    waiting.set_result(sandbox)
                else:
                    self._ready.append((time.monotonic(), sandbox))
                return
        # Without an episode that waits, the next one reports that sandboxes do not start.
        if (waiting := self._first_waiting()) is not None:
            waiting.set_exception(failure)

    def _first_waiting(self) -> asyncio.Future[Sandbox] | None:
        while self._waiting:
            if not (future := self._waiting.popleft()).done():
                return future
        return None

    def _remove(self, sandbox: Sandbox) -> None:
        """Remove a sandbox in the background: the next episode does not wait for it."""

        async def close() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await sandbox.close()

        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
