"""Environments of the package verifiers, 0.4: its tasks, agents, tools, sandboxes and rewards, as its own commands run
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from dagrl.environments.contract import Row
from dagrl.environments.failures import EnvironmentFailedError, FailureClass

_KEY = "DAGRL_SAMPLE"
"""In place of the variable with a client's key: each sample has its own."""
_STARTS_S, _SHOWN_CHARACTERS = 300.0, 300
_MACHINES: dict[str, FailureClass] = {
    "HarnessError": "exec",
    "InterceptionError": "network",
    "ProviderError": "network",
    "SandboxError": "exec",
    "TaskError": "grader",
    "ToolsetError": "exec",
    "TunnelError": "network",
}
"""Errors that verifiers attributes to a machine, the sandbox, or the code that scores."""


class Verifiers:
    """An environment, as the block ``env`` of verifiers' own configuration describes it."""

    requires = ("verifiers",)

    def __init__(self, *, select: Mapping[str, Any] | None = None, **env: Any) -> None:
        """`select` chooses the tasks of `rows`, as verifiers does. Raises ValueError for wrong arguments."""
        import verifiers.v1 as vf
        from pydantic import ValidationError

        try:
            config = vf.resolve_env_config(env)
            self._select = vf.SelectConfig.model_validate(select or {})
            self._env = vf.load_environment(config)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "args"
            raise ValueError(f"{place}: {first['msg']} ({error.error_count()} in all)") from error
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(str(error)) from error
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stopping = asyncio.Event()
        self._keys: dict[str, str] = {}
        """Trace -> the key of its sample."""

    def rows(self) -> Iterable[dict[str, Any]]:
        taskset = self._env.taskset.select(self._select)
        if not taskset.bounded:
            raise ValueError("the taskset is infinite; give `select: {limit: ...}`")
        for task in taskset:
            data = task.data
            system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            # A prompt of messages, or a user who begins, is sent by the environment; the row only measures it.
            user = {"role": "user", "content": data.prompt_text or data.name or self._env.config.env_id}
            answer = getattr(data, "answer", None)
            yield {
                "prompt": [*system, user],
                "answer": None if answer is None else str(answer),
                "data_source": self._env.config.env_id,
                # As text: a column of structs would add the fields of other tasks.
                "extra_info": {"task": data.model_dump_json(), "index": data.idx},
            }

    async def solve(self, client: Any, row: Row) -> dict[str, float]:
        import verifiers.v1 as vf

        await self._serve()
        task_type = type(self._env.taskset).task_type()
        data = task_type.data_type().model_validate_json(row["extra_info"]["task"])
        task = task_type(data, self._env.config.taskset.task)
        endpoint = vf.EvalClientConfig(base_url=str(client.base_url), api_key_var=_KEY)
        (slot,) = self._env.slots(task)
        traces: list[str] = []

        def begun(trace: Any) -> None:
            traces.append(trace.id)
            self._keys[trace.id] = client.api_key

        try:
            episode = await self._env.run_slot(slot, vf.ModelContext("policy", endpoint), on_trace=begun)
        finally:
            for trace in traces:
                del self._keys[trace]
        _raise_if_failed(episode)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        numbers: dict[str, float] = {}
        for trace in trained:
            prefix = f"{trace.agent.name}/" if len(trained) > 1 else ""
            rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
            metrics = {name: value for name, value in trace.metrics.items() if value is not None}
            numbers |= {prefix + name: value for name, value in (rewards | metrics).items()}
        return numbers | {"reward": sum(trace.reward for trace in trained) / max(1, len(trained))}

    async def close(self) -> None:
        self._stopping.set()
        if self._serving is not None:
            with suppress(Exception):
                await self._serving

    async def _serve(self) -> None:
        """Start the environment's servers, once. They end in the task that has begun them."""
        if self._serving is None or (self._serving.done() and not self._stopping.is_set()):
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._served(self._ready))
        assert self._ready is not None
        try:
            async with asyncio.timeout(_STARTS_S):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise EnvironmentFailedError("start", f"its servers did not start in {_STARTS_S:g} s") from error

    async def _served(self, ready: asyncio.Future[None]) -> None:
        _send_keys(self._keys)
        try:
            async with self._env.serving():
                ready.set_result(None)
                await self._stopping.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(EnvironmentFailedError("start", f"its servers: {_shown(error)}"))


def _send_keys(keys: Mapping[str, str]) -> None:
    """Send each rollout's requests with the key of its sample.

    A client of verifiers has one key, and servers keep all clients that they have had.
    """
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.interception import server

    resolve = server.resolve_client

    class SampleClient(EvalClient):
        def _headers(self, dialect: Any, headers: Any, session_id: str | None) -> Any:
            made = super()._headers(dialect, headers, session_id)
            made.update(dialect.auth_headers(keys.get(session_id or "", "")))
            return made

    server.resolve_client = lambda config: SampleClient(config) if config.api_key_var == _KEY else resolve(config)


def _raise_if_failed(episode: Any) -> None:
    """Raise an error if the episode has no complete result."""
    if episode.ok:
        return
    failed = next((trace for trace in episode.traces if not trace.ok), None)
    if episode.is_timeout:
        raise EnvironmentFailedError("timeout", _shown(episode.last_error))
    error = episode.last_error or (failed and failed.last_error)
    if error is None:
        raise RuntimeError("the episode ended without a result")
    if (failure := _MACHINES.get(error.type)) is None:
        raise RuntimeError(_shown(error))
    if failure == "exec" and failed is not None and not failed.calls:
        failure = "start"
    raise EnvironmentFailedError(failure, _shown(error))


def _shown(error: Any) -> str:
    kind = error.type if hasattr(error, "type") else type(error).__name__
    message = error.message if hasattr(error, "message") else str(error)
    return " ".join(f"{kind}: {message}".split())[:_SHOWN_CHARACTERS]
