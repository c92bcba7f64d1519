"""NeMo Gym: tasks from its JSONL files, with the tools and the verifier of its resources servers.

An episode is what NeMo Gym's own agents do with such a server, `simple_agent` and `gymnasium_agent`, with the sample's
client in place of a model server. The package itself runs with its servers, not here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dagrl.environments.failures import EnvironmentFailedError
from dagrl.environments.limits import is_limit
from dagrl.environments.services import Service, as_text, number

_MOST_METRICS = 100
_NOT_FOR_THE_POLICY = ("model", "input", "temperature", "top_p", "stream")


class NemoGym:
    """The tasks of a JSONL file and their resources servers."""

    requires = ("httpx", "openai")

    def __init__(
        self, url: str | Mapping[str, str] | None = None, data: str | None = None, timeout_s: float = 60
    ) -> None:
        """`url` is the address of the resources server, or addresses by the name of the rows' `agent_ref`.

        `data` is the JSONL file of the tasks, for `rows`. A request to a server takes `timeout_s` at most.
        """
        if url is None and data is None:
            raise ValueError("give `url`, the address of a resources server, such as http://127.0.0.1:8000")
        self._url, self._data, self._timeout_s = url, data, timeout_s
        self._paths: dict[str, frozenset[str]] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tasks of `data`. Raises ValueError for a line that is none."""
        if self._data is None:
            raise ValueError("give `data`, a JSONL file with `responses_create_params`")
        with Path(self._data).open(encoding="utf-8") as file:
            for place, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    task = json.loads(line)
                    messages = _messages(_items(task["responses_create_params"]["input"]))
                    source = (task.get("agent_ref") or {}).get("name", "nemo_gym")
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{self._data}:{place}: no task with responses_create_params.input") from error
                # As text: a column of objects would give each row the fields of all others.
                extra = {"nemo_gym": line.strip()}
                yield {"prompt": messages, "answer": "", "data_source": source, "extra_info": extra}

    async def solve(self, client: Any, row: Mapping[str, Any]) -> dict[str, float]:
        try:
            task = json.loads(row["extra_info"]["nemo_gym"])
        except (KeyError, TypeError, ValueError) as error:
            message = "the row has no `extra_info.nemo_gym`; write the data with `dagrl data environment nemo_gym`"
            raise ValueError(message) from error
        url = self._url_of(task)
        async with Service(url, self._timeout_s) as server:
            if url not in self._paths:
                paths = (await server.object("GET", "openapi.json")).get("paths")
                self._paths[url] = frozenset(paths if isinstance(paths, dict) else ())
            paths_here = self._paths[url]
            if "/verify" in paths_here:
                return await _verified(client, server, task)
            if {"/reset", "/step"} <= paths_here:
                return await _stepped(client, server, task)
        why = "; it is an agent server, which has its own model server" if "/run" in paths_here else ""
        raise ValueError(f"{url} is no resources server, with /verify, or /reset and /step{why}")

    def _url_of(self, task: dict[str, Any]) -> str:
        if isinstance(self._url, str):
            return self._url
        name = str((task.get("agent_ref") or {}).get("name"))
        if self._url is None or name not in self._url:
            raise ValueError(f"`url` has no address for rows of the agent {name!r}")
        return self._url[name]


async def _verified(client: Any, server: Service, task: dict[str, Any]) -> dict[str, float]:
    """As `simple_agent`: tools are paths of the server, which verifies the whole output at the end."""
    parameters = task["responses_create_params"]
    tools = {tool.get("name") for tool in parameters.get("tools") or () if tool.get("type") == "function"}
    await _begin(server, "seed_session", task)
    given, last = _items(parameters["input"]), None
    output: list[dict[str, Any]] = []
    while (response := await _reply(client, parameters, [*given, *output], begun=last is not None)) is not None:
        last = response
        output += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not calls or response.get("incomplete_details"):
            break
        for call in calls:
            said = await _call(server, call, tools)
            output.append({"type": "function_call_output", "call_id": call["call_id"], "output": said})
    assert last is not None, "the first reply is none only if it raises"
    verdict = await server.object("POST", "verify", task | {"response": last | {"output": output}})
    reward = number(verdict.get("reward"))
    if reward is None:
        raise EnvironmentFailedError("grader", f"/verify gives no number as reward: {verdict.get('reward')!r:.200}")
    values = {name: number(value) for name, value in verdict.items() if name not in task}
    metrics = {name: value for name, value in values.items() if value is not None}
    return dict(list(metrics.items())[:_MOST_METRICS]) | {"reward": reward}


async def _stepped(client: Any, server: Service, task: dict[str, Any]) -> dict[str, float]:
    """As `gymnasium_agent`: the server is given each reply, and answers with a reward and the next observation."""
    parameters = task["responses_create_params"]
    given, rewards, begun = _items(parameters["input"]), 0.0, False
    given += _observed(await _begin(server, "reset", task))
    while (response := await _reply(client, parameters, given, begun=begun)) is not None:
        begun = True
        step = await server.object("POST", "step", task | {"response": response})
        reward = number(step.get("reward", 0.0))
        if reward is None:
            raise EnvironmentFailedError("grader", f"/step gives no number as reward: {step.get('reward')!r:.200}")
        rewards += reward
        if step.get("terminated") or step.get("truncated"):
            break
        given += [*response["output"], *_observed(step)]
    return {"reward": rewards}


async def _begin(server: Service, path: str, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return await server.object("POST", path, task)
    except EnvironmentFailedError as error:
        if error.failure == "network":
            raise EnvironmentFailedError("start", str(error)) from error
        raise


def _observed(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of tools, and the observation, as items of the next request."""
    info = answer.get("info")
    results = info.get("tool_outputs", []) if isinstance(info, dict) else []
    observation = answer.get("observation")
    try:
        items = [
            {"type": "function_call_output", "call_id": result["call_id"], "output": as_text(result["output"])}
            for result in results
        ]
    except (TypeError, KeyError) as error:
        raise EnvironmentFailedError("network", f"tool_outputs without call_id and output: {results!r:.200}") from error
    return [*items, {"role": "user", "content": as_text(observation)}] if observation else items


async def _reply(
    client: Any, parameters: Mapping[str, Any], items: list[dict[str, Any]], *, begun: bool
) -> dict[str, Any] | None:
    """The policy's next response; None if a limit has been reached since the episode has `begun`."""
    options = {name: value for name, value in parameters.items() if name not in _NOT_FOR_THE_POLICY}
    try:
        response = await client.responses.create(model="policy", input=items, extra_body=options)
    except Exception as error:
        if begun and is_limit(error):
            return None
        raise
    return response.model_dump(mode="json", exclude_unset=True, warnings=False)


async def _call(server: Service, call: Mapping[str, Any], tools: set[str]) -> str:
    """Call a tool, and return its answer or error as text."""
    # Other paths of the server are not for the policy.
    if call["name"] not in tools:
        return json.dumps({"error": f"there is no tool {call['name']!r}"})
    try:
        arguments = json.loads(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
    return (await server.ask("POST", quote(call["name"], safe=""), arguments)).text


def _items(given: object) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given) or not given:
        raise ValueError("`input` is a text or a list of items")
    return list(given)


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages among items, as those of a chat."""
    messages = []
    for item in items:
        if item.get("type", "message") != "message":
            continue
        content = item["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        messages.append({"role": "system" if item["role"] == "developer" else item["role"], "content": text})
    return messages
