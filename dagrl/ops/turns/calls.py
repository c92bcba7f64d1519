"""How a policy writes that it calls a tool: parsers from the text of a turn to calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.graph.plugins.custom import load_function, located, raised_by

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name, and what it is called with."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What was meant as a call and is none."""

    why: str


type Parser = Callable[[str], Sequence[Call | Unreadable]]
"""From what the policy has said in a turn, without the token that ended it, to the calls in it, in their order."""


def parser_of(tool_format: str, schemas: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Parser:
    """The parser that a pipeline names; `schemas` are those of its tools. ValueError where there is none."""
    if tool_format == "hermes":
        return hermes_calls
    if ":" in tool_format:
        return _own_parser(tool_format, folder)
    return _sglang_parser(tool_format, schemas)


def hermes_calls(text: str) -> list[Call | Unreadable]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen 2.5 and Qwen 3 write them.

    What a model thinks (up to ``</think>``) calls nothing.
    """
    return [_hermes_call(body.strip()) for body in _HERMES.findall(said_aloud(text))]


def said_aloud(text: str) -> str:
    """What comes behind a model's thoughts."""
    return text.rpartition(_END_OF_THOUGHT)[2]


def _hermes_call(body: str) -> Call | Unreadable:
    try:
        call = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"a tool call is JSON, and this is not: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Unreadable('a tool call has a "name" and "arguments"')
    return _call(call["name"], call.get("arguments", {}))


def _call(name: str, arguments: Any) -> Call | Unreadable:
    if isinstance(arguments, str):
        # Some models write the arguments' JSON as a string.
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return Unreadable(f"the arguments of {name} are not JSON: {error}")
    if not isinstance(arguments, dict):
        return Unreadable(f"the arguments of {name} are names with values")
    return Call(name, arguments)


def _own_parser(place: str, folder: Path | None) -> Parser:
    """A function of the user's: from text to (name, arguments), several or none; it raises ValueError for bad calls."""
    function = load_function(place, folder)

    def parse(text: str) -> list[Call | Unreadable]:
        try:
            found = list(function(text))
        except ValueError as error:
            return [Unreadable(str(error))]
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise ValueError(f"the parser `{place}` {raised_by(function, error)}") from error
        for each in found:
            well_formed = isinstance(each, tuple) and len(each) == 2
            if not (well_formed and isinstance(each[0], str) and isinstance(each[1], dict)):
                raise ValueError(
                    f"the parser {located(function, place)} returned {each!r}; return pairs of a name and arguments (a "
                    "dict)"
                )
        return [Call(name, arguments) for name, arguments in found]

    return parse


def _sglang_parser(name: str, schemas: Sequence[Mapping[str, Any]]) -> Parser:
    """One of SGLang's, for the formats of many model families."""
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise ValueError(f"`tool_format: {name}` is read by SGLang, which is not installed; choose hermes") from error
    tools = [Tool.model_validate(schema) for schema in schemas]
    try:
        FunctionCallParser(tools, name)
    except ValueError as error:
        raise ValueError(f"SGLang has no parser `{name}` of tool calls: {error}") from error

    def parse(text: str) -> list[Call | Unreadable]:
        # A new one each time: it remembers its message.
        parser, aloud = FunctionCallParser(tools, name), said_aloud(text)
        if not parser.has_tool_call(aloud):
            return []
        try:
            _, items = parser.parse_non_stream(aloud)
        except Exception as error:  # noqa: BLE001 - what a model makes up must not end a run, whatever it does to a parser
            return [Unreadable(f"the tool call cannot be read: {error}")]
        calls = [_call(str(item.name), item.parameters) for item in items]
        return calls or [Unreadable("there is no tool call that can be read, of a tool that there is")]

    return parse
