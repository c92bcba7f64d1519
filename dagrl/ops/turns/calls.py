"""Parsers from the text of a turn to tool calls."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dagrl.backends.registry import backends
from dagrl.backends.tool_calls import Call, MalformedCall, Parser, outside_reasoning, parsed_call
from dagrl.plugins.calls import UserFunctionError, call
from dagrl.plugins.custom import load_function, located

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parser_of(tool_format: str, schemas: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Parser:
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
    def listed(text: str) -> list[Any]:
        return [*function(text)]

    def parse(text: str, /, *, thinks: bool = False) -> list[Call | MalformedCall]:
        try:
            found = call(listed, {}, text)
        except UserFunctionError as error:
            if isinstance(error.__cause__, ValueError):
                return [MalformedCall(str(error.__cause__))]
            raise ValueError(f"the parser `{place}` {error}") from error.__cause__
        for each in found:
            well_formed = isinstance(each, tuple) and len(each) == 2
            if not (well_formed and isinstance(each[0], str) and isinstance(each[1], dict)):
                raise ValueError(
                    f"the parser {located(function, place)} returned {each!r}; return pairs of a name and arguments (a "
                    "dict)"
                )
        return [Call(name, arguments) for name, arguments in found]

    return parse
