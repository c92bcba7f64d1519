"""OpenEnv: episodes of an environment's server, with its package's client."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import uvicorn
from openenv.core.client_types import StepResult
from openenv.core.generic_client import GenericEnvClient
from websockets.exceptions import WebSocketException

from dagrl.environments.failures import EnvironmentFailedError, FailureClass
from dagrl.environments.limits import is_limit
from dagrl.environments.services import Service, as_text, number

_MOST_MIB = 16
_CAPACITY_WAIT_S = 600.0
_START_S = 60.0
_CLOSE_S = 1.0
_RESETS = 16
"""Episodes that `rows` begins at a time."""
_CODE = re.compile(r"\(code: (\w+)\)$")


class OpenEnv:
    """Arguments: see `__init__`; `docs/environments.md` describes them to users."""

    requires = ("openenv",)

    def __init__(
        self,
        url: str | None = None,
        app: str | None = None,
        action: str | None = None,
        observation: str | None = None,
        reward: Literal["sum", "last"] = "sum",
        instructions: str | None = None,
        split: str | None = None,
        episodes: int = 1000,
        timeout_s: float = 60,
    ) -> None:
        """`url` is a server's address, `app` an application of this Python, ``module:name``, to serve instead.

        `action` and `observation` name the fields with the texts. `reward` of an episode is the sum of its steps', or
        the last one. `instructions`, `split` and `episodes` are for `rows`. A message takes `timeout_s` at most.
        """
        if (url is None) == (app is None):
            raise ValueError("give either `url`, the address of a server, or `app`, such as echo_env.server.app:app")
        if reward not in ("sum", "last"):
            raise ValueError(f"`reward` is sum or last, not {reward!r}")
        self._url = url.rstrip("/") if url is not None else _serve(app)
        self._action, self._observation, self._last = action, observation, reward == "last"
        self._instructions, self._split, self._episodes = instructions, split, episodes
        self._timeout_s = timeout_s
        self._schema: dict[str, Any] | None = None
        self._queue = asyncio.Lock()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tasks of `split`, or `episodes` seeds. Each is reset, so that its prompt is what the policy is asked."""
        return iter(asyncio.run(self._rows()))

    async def solve(self, client: Any, row: Mapping[str, Any]) -> dict[str, float] | None:
        extra = row.get("extra_info") or {}
        given = extra.get("reset") if isinstance(extra, dict) else None
        begin = {name: value for name, value in (given or {"seed": row["seed"]}).items() if value is not None}
        fields = await self._action_fields()
        async with self._episode(begin) as (episode, first):
            messages = _with_observation(list(row["messages"]), self._shown(first))
            tools = await episode.tools() if _has_tools(fields) else None
            rewards = [first.reward]
            if not first.done:
                play = (
                    self._text_steps(client, episode, messages, fields)
                    if tools is None
                    else _tool_steps(client, episode, messages, tools)
                )
                rewards += [step.reward async for step in play]
        gained = [reward for reward in rewards if reward is not None]
        if not gained:
            return None
        return {"reward": gained[-1] if self._last else sum(gained)}

    async def _text_steps(
        self, client: Any, episode: _Episode, messages: list[Any], fields: Mapping[str, Any]
    ) -> AsyncIterator[StepResult[dict[str, Any]]]:
        while (reply := await _reply(client, messages)) is not None:
            try:
                step = await episode.act(self._action_of(reply.content or "", fields))
            except _InvalidActionError as error:
                messages.append({"role": "user", "content": f"Error: {error}"})
                continue
            yield step
            if step.done:
                return
            messages.append({"role": "user", "content": self._shown(step)})

    def _action_of(self, text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        required = [name for name, field in fields.items() if "default" not in field]
        names = [self._action] if self._action else required if len(required) == 1 else [*fields]
        if len(names) == 1 and fields.get(names[0], {}).get("type") == "string":
            return {names[0]: text}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text.strip()
        if len(names) == 1:
            return {names[0]: value}
        if not isinstance(value, dict):
            raise _InvalidActionError(f"answer with a JSON object with the fields {', '.join(names)}")
        return value

    def _shown(self, step: StepResult[dict[str, Any]]) -> str:
        """An observation as text: its field, its only value, or all of them as JSON."""
        fields = {name: value for name, value in step.observation.items() if value not in (None, "", [], {})}
        fields.pop("metadata", None)
        value: Any = fields
        if self._observation is not None:
            value = fields.get(self._observation, "")
        elif len(fields) < 2:
            value = next(iter(fields.values()), "")
        return as_text(value)

    async def _action_fields(self) -> dict[str, Any]:
        """The fields of actions, by name, from the server's schema."""
        if self._schema is None:
            async with Service(re.sub("^ws", "http", self._url), self._timeout_s) as server:
                action = (await server.object("GET", "schema")).get("action")
            fields = action.get("properties") if isinstance(action, dict) else None
            if not isinstance(fields, dict) or not all(isinstance(field, dict) for field in fields.values()):
                raise EnvironmentFailedError("network", f"/schema describes no action: {action!r:.200}")
            if self._action is not None and self._action not in fields:
                raise ValueError(f"actions have no field {self._action!r}; they have {', '.join(fields)}")
            self._schema = {name: field for name, field in fields.items() if name != "metadata"}
        return self._schema

    @asynccontextmanager
    async def _episode(self, begin: Mapping[str, Any]) -> AsyncIterator[tuple[_Episode, StepResult[dict[str, Any]]]]:
        """An episode that has begun, and its first observation."""
        episode, first = await self._begun(begin)
        try:
            yield episode, first
        finally:
            await episode.end()

    async def _begun(self, begin: Mapping[str, Any]) -> tuple[_Episode, StepResult[dict[str, Any]]]:
        """Begin an episode. If the server has no session left, one episode at a time asks again."""
        if not self._queue.locked():
            with suppress(_NoSessionError):
                return await self._try(begin)
        async with self._queue:
            until, pause = time.monotonic() + _CAPACITY_WAIT_S, 0.05
            while True:
                try:
                    return await self._try(begin)
                except _NoSessionError as error:
                    if time.monotonic() > until:
                        message = f"no session in {_CAPACITY_WAIT_S:g} s ({error}); lower agent.concurrency"
                        raise EnvironmentFailedError("start", message) from error
                # Other processes ask, too.
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(1.0, 1.5 * pause)

    async def _try(self, begin: Mapping[str, Any]) -> tuple[_Episode, StepResult[dict[str, Any]]]:
        episode = _Episode(self._url, self._timeout_s)
        try:
            return episode, await episode.begin(begin)
        except BaseException:
            await episode.end()
            raise

    async def _rows(self) -> list[dict[str, Any]]:
        if self._split is None:
            begins: list[dict[str, Any]] = [{"seed": seed} for seed in range(self._episodes)]
        else:
            begins = [{"split": self._split, "index": index} for index in range(await self._task_count())]
        resetting = asyncio.Semaphore(_RESETS)

        async def row(begin: dict[str, Any]) -> dict[str, Any]:
            async with resetting, self._episode(begin) as (_, first):
                text = self._shown(first)
            system = [{"role": "system", "content": self._instructions}] if self._instructions else []
            user = [{"role": "user", "content": text}] if text else []
            if not system and not user:
                raise ValueError("the environment shows nothing at the beginning; give `instructions`")
            extra = {"reset": begin}
            return {"prompt": system + user, "answer": "", "data_source": "openenv", "extra_info": extra}

        return await asyncio.gather(*map(row, begins))

    async def _task_count(self) -> int:
        async with Service(re.sub("^ws", "http", self._url), self._timeout_s) as server:
            names = (await server.ask("GET", "list_environments")).json()
            count = (await server.object("POST", f"{names[0]}/num_tasks", {"split": self._split})).get("num_tasks")
        if not isinstance(count, int):
            raise EnvironmentFailedError("network", f"/num_tasks gives no number: {count!r:.200}")
        return count


class _InvalidActionError(ValueError):
    """The policy's action is none of the environment's."""


class _NoSessionError(RuntimeError):
    """The server has as many sessions as it may have."""


class _Episode(GenericEnvClient):
    """One connection, which is one session of the server."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, connect_timeout_s=timeout_s, message_timeout_s=timeout_s, max_message_size_mb=_MOST_MIB)
        self._timeout_s = timeout_s

    async def _ensure_connected(self) -> None:
        # The package would connect again, which is another session, in which nothing has been reset.
        if self._ws is None:
            raise ConnectionError("the connection has been closed")

    async def begin(self, options: Mapping[str, Any]) -> StepResult[dict[str, Any]]:
        await self._bounded(self.connect(), "start")
        return _checked(await self._bounded(self.reset(**options), "start"))

    async def act(self, action: dict[str, Any]) -> StepResult[dict[str, Any]]:
        return _checked(await self._bounded(self.step(action), "exec"))

    async def end(self) -> None:
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                await self.close()

    async def tools(self) -> list[dict[str, Any]]:
        """The environment's tools, as those of a request."""
        listed = (await self.act({"type": "list_tools"})).observation.get("tools")
        try:
            return [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool["description"],
                        "parameters": tool["input_schema"],
                    },
                }
                for tool in listed or ()
            ]
        except (TypeError, KeyError) as error:
            raise EnvironmentFailedError("network", f"{self.base_url} lists no tools: {listed!r:.200}") from error

    async def _bounded(self, answer: Any, failure: FailureClass) -> Any:
        """The answer to a message. `failure` is the class of errors that the server reports."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as error:
            message = f"{self.base_url} took longer than {self._timeout_s:g} s"
            raise EnvironmentFailedError("timeout", message) from error
        except (OSError, WebSocketException, ValueError, AttributeError, TypeError, RecursionError) as error:
            # The package reads answers without checking them.
            raise EnvironmentFailedError("network", f"{self.base_url}: {error!r:.200}") from error
        except RuntimeError as error:
            code = _CODE.search(str(error))
            if code is not None and code[1] == "CAPACITY_REACHED":
                raise _NoSessionError(str(error)) from error
            if code is not None and code[1] == "VALIDATION_ERROR" and failure == "exec":
                raise _InvalidActionError("this is no action of the environment") from error
            raise EnvironmentFailedError(failure, f"{self.base_url}: {error!s:.500}") from error


def _checked(step: StepResult[Any]) -> StepResult[dict[str, Any]]:
    reward = number(step.reward)
    if not isinstance(step.observation, dict) or (reward is None and step.reward is not None):
        raise EnvironmentFailedError("network", f"no observation and reward: {step!r:.200}")
    return StepResult(step.observation, reward, bool(step.done))


async def _tool_steps(
    client: Any, episode: _Episode, messages: list[Any], tools: list[dict[str, Any]]
) -> AsyncIterator[StepResult[dict[str, Any]]]:
    while (reply := await _reply(client, messages, tools)) is not None and reply.tool_calls:
        for call in reply.tool_calls:
            try:
                action = {"type": "call_tool", "tool_name": call.function.name}
                step = await episode.act(action | {"arguments": json.loads(call.function.arguments)})
            except ValueError as error:  # _InvalidActionError and errors of JSON
                said = f"Error: {error}"
            else:
                yield step
                if step.done:
                    return
                said = _result_of(step.observation)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def _result_of(observation: Mapping[str, Any]) -> str:
    """The result or error of a tool, as text."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"Error: {as_text(error.get('message') if isinstance(error, dict) else error)}"
    value = result["data"] if isinstance(result, dict) and "data" in result else result
    return as_text(value)


async def _reply(client: Any, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> Any:
    """The policy's next message, which is added to `messages`; None if a limit has been reached."""
    try:
        answer = await client.chat.completions.create(
            model="policy", messages=messages, **({"tools": tools} if tools else {})
        )
    except Exception as error:
        if is_limit(error) and any(message["role"] == "assistant" for message in messages):
            return None
        raise
    reply = answer.choices[0].message
    messages.append(reply.model_dump(exclude_none=True))
    return reply


def _with_observation(messages: list[Any], text: str) -> list[Any]:
    """A row's messages and the first observation, which belongs to the last one of the user, if it is not there."""
    last = messages[-1] if messages else {}
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        return [*messages, {"role": "user", "content": text}] if text else messages
    if last["content"].endswith(text):
        return messages
    return [*messages[:-1], last | {"content": f"{last['content']}\n\n{text}"}]


def _has_tools(fields: Mapping[str, Any]) -> bool:
    """Whether actions call tools: an environment with tools has this action, or the base of all."""
    return not fields or {"tool_name", "arguments"} <= fields.keys()


def _serve(app: str | None) -> str:
    """Serve an application of this Python in a thread, which ends with the process; returns the address."""
    module, _, name = (app or "").partition(":")
    try:
        served = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`app` {app!r} cannot be imported: {error}") from error
    server = uvicorn.Server(uvicorn.Config(served, host="127.0.0.1", port=0, log_level="warning"))
    threading.Thread(target=server.run, name=f"server of {app}", daemon=True).start()
    until = time.monotonic() + _START_S
    while not server.started:
        if time.monotonic() > until:
            raise EnvironmentFailedError("start", f"the server of {app} has not started in {_START_S:g} s")
        time.sleep(0.02)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
