"""Tools, parser and environment of a multi-turn rollout, loaded once per worker."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dagrl.backends.registry import backends
from dagrl.backends.tool_calls import Call, MalformedCall, Parser, outside_reasoning, parsed_call
from dagrl.data.batch import Batch
from dagrl.model_files.images import ImageSettings, image_settings
from dagrl.ops.base import Context
from dagrl.ops.turns.dialogue import TurnSettings
from dagrl.ops.turns.template import MessageWriter
from dagrl.plugins.calls import UserFunctionError, call
from dagrl.plugins.custom import load_function, located
from dagrl.plugins.environment import load_environment
from dagrl.plugins.tool import Tool, load_tool, tool_name
from dagrl.tools.mcp import McpServer, McpTool

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parser_of(tool_format: str, schemas: Sequence[Mapping[str, object]], folder: Path | None = None) -> Parser:
    """The parser named in a pipeline; `schemas` of its tools. Raises ValueError if it does not exist."""
    if tool_format == "hermes":
        return hermes_calls
    if ":" in tool_format:
        return _own_parser(tool_format, folder)
    backend = next((backend for backend in backends().values() if tool_format in backend.tool_formats()), None)
    if backend is None:
        raise ValueError(f"no installed backend reads `tool_format: {tool_format}`; choose hermes")
    return backend.tool_parser(tool_format, schemas)


def hermes_calls(text: str, /, *, thinks: bool = False) -> list[Call | MalformedCall]:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes, Qwen 2.5 and Qwen 3.

    Calls inside a model's reasoning are ignored.
    """
    return [_hermes_call(body.strip()) for body in _HERMES.findall(outside_reasoning(text, thinks=thinks))]


def _hermes_call(body: str) -> Call | MalformedCall:
    try:
        call = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"a tool call must be JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return MalformedCall('a tool call must have a "name" and "arguments"')
    return parsed_call(call["name"], call.get("arguments", {}))


def _own_parser(place: str, folder: Path | None) -> Parser:
    """Wrap a user's function from text to (name, arguments) pairs, which raises ValueError for malformed calls."""
    function = load_function(place, folder)

    @functools.wraps(function)
    def listed(text: str) -> list[object]:
        return [*function(text)]

    def parse(text: str, /, *, thinks: bool = False) -> list[Call | MalformedCall]:
        try:
            pairs = call(listed, {}, text)
        except UserFunctionError as error:
            if isinstance(error.__cause__, ValueError):
                return [MalformedCall(str(error.__cause__))]
            raise ValueError(f"the parser `{place}` {error}") from error.__cause__
        for pair in pairs:
            well_formed = isinstance(pair, tuple) and len(pair) == 2
            if not (well_formed and isinstance(pair[0], str) and isinstance(pair[1], dict)):
                raise ValueError(
                    f"the parser {located(function, place)} returned {pair!r}; return pairs of a name and arguments (a "
                    "dict)"
                )
        return [Call(name, arguments) for name, arguments in pairs]

    return parse


def rollout_tools(context: Context) -> dict[str, Tool | McpTool]:
    """Tools of the rollout by their names for the policy; empty if nothing is sampled.

    Starts MCP servers. Raises ToolUnavailableError if one does not start, ValueError if two tools share a name.
    """
    if not context.pipeline.rollouts:
        return {}
    node, resources = context.rollout, context.resources

    def load() -> dict[str, Tool | McpTool]:
        args = node.tool_args
        tools: dict[str, Tool | McpTool] = {
            tool_name(place): load_tool(place, args.get(tool_name(place), {}), resources.folder) for place in node.tools
        }
        for name, spec in node.mcp_servers.items():
            for tool in McpServer(name, spec, resources.folder, node.tool_timeout_s).tools():
                if tool.name in tools:
                    raise ValueError(
                        f"the MCP server `{name}` has a tool `{tool.name}`, and so has another; name others"
                    )
                tools[tool.name] = tool
        return tools

    return resources.once(f"tools of {context.sampled_by}", load)


def turn_settings(context: Context) -> TurnSettings:
    """Tools and environment of the rollout. Raises ValueError if one cannot be loaded."""
    node, resources, tools = context.rollout, context.resources, rollout_tools(context)
    schemas = [tool.schema for tool in tools.values()]

    def make() -> TurnSettings:
        environment = node.environment
        return TurnSettings(
            tools,
            parser_of(node.tool_format, schemas, resources.folder),
            load_environment(environment, node.environment_args, resources.folder) if environment else None,
            node.max_parallel_calls,
            node.on_environment_error == "end",
            policy_images(context),
        )

    return resources.once(f"turn settings of {context.sampled_by}", make)


def message_writer(context: Context) -> MessageWriter:
    schemas = [tool.schema for tool in rollout_tools(context).values()]
    tokenizer, longest = context.resources.tokenizer, context.rollout.max_observation_tokens
    vision = policy_images(context)
    return context.resources.once(
        f"answers of {context.sampled_by}", lambda: MessageWriter(tokenizer, schemas, longest, vision=vision)
    )


def policy_images(context: Context) -> ImageSettings | None:
    data = context.pipeline.data
    return image_settings(context.pipeline.model, data) if data.image_key else None


def row_fields(batch: Batch, row: int, seed: int, context: Context) -> dict[str, object]:
    """Fields of a row that tools and environments may use; environments get more."""
    fields: dict[str, object] = {"extra_info": json.loads(batch["extra_info"].string(row))}
    if context.rollout.environment is not None:
        prompt = context.resources.tokenizer.decode(batch["prompt_tokens"][row], skip_special_tokens=True)
        fields |= {"prompt": prompt, "seed": seed} | {
            name: batch[name].string(row) for name in ("answer", "data_source")
        }
    return fields
