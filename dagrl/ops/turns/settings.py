"""Tools, parser and environment of a multi-turn rollout, loaded once per worker."""

from __future__ import annotations

import json
from typing import Any

from dagrl.data.batch import Batch
from dagrl.model_files.images import ImageSettings, image_settings
from dagrl.ops.base import Context
from dagrl.ops.turns.calls import parser_of
from dagrl.ops.turns.dialogue import TurnSettings
from dagrl.ops.turns.template import MessageWriter
from dagrl.plugins.environment import load_environment
from dagrl.plugins.tool import Tool, load_tool, tool_name
from dagrl.tools.mcp import McpServer, McpTool


def rollout_tools(context: Context) -> dict[str, Tool | McpTool]:
    """Tools of the rollout by the names that the policy uses; empty if nothing is sampled.

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
    """The writer of answers to the policy."""
    schemas = [tool.schema for tool in rollout_tools(context).values()]
    tokenizer, longest = context.resources.tokenizer, context.rollout.max_observation_tokens
    vision = policy_images(context)
    return context.resources.once(
        f"answers of {context.sampled_by}", lambda: MessageWriter(tokenizer, schemas, longest, vision=vision)
    )


def policy_images(context: Context) -> ImageSettings | None:
    """The policy's settings for images, if prompts have images."""
    data = context.pipeline.data
    return image_settings(context.pipeline.model, data) if data.image_key else None


def row_fields(batch: Batch, row: int, seed: int, context: Context) -> dict[str, Any]:
    """Fields of a row that tools and environments may use; environments get more."""
    fields: dict[str, Any] = {"extra_info": json.loads(batch["extra_info"].string(row))}
    if context.rollout.environment is not None:
        prompt = context.resources.tokenizer.decode(batch["prompt_tokens"][row], skip_special_tokens=True)
        fields |= {"prompt": prompt, "seed": seed} | {
            name: batch[name].string(row) for name in ("answer", "data_source")
        }
    return fields
