"""MCP servers whose tools a rollout offers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dagrl.config.schema.section import Section


class McpServerSpec(Section):
    """A server of the Model Context Protocol: a `command` that each worker starts, or a `url`."""

    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A program (``python``: the worker's) and its arguments, which speaks the protocol on its standard input and
    output; started in the folder of the pipeline file."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of the command's environment, which has little of the worker's."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """A server that is running already, over streamable HTTP."""
    tools: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the tools that are offered. Default: all of the server's."""
