"""SGLang's parsers of tool calls, for the formats of many model families."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dagrl.backends.tool_calls import Call, MalformedCall, Parser, outside_reasoning, parsed_call
from dagrl.model_files.library_classes import source_of

_PARSERS = "srt/function_call/function_call_parser.py"
_AROUND = {"gpt-oss": ("<|start|>assistant", "<|call|>")}
"""End of the prompt, and end token of a call, for parsers that look for them."""
_CALL_ID = re.compile(r"\[CALL_ID\](\w+)")
_KIMI_ID = re.compile(r"<\|tool_call_begin\|>\s*([\w.-]+:\d+)")


def parser_names() -> Iterator[str]:
    """Names of the parsers, read from SGLang's source as text; empty if it is not installed."""
    source = source_of("sglang", _PARSERS)
    for node in ast.walk(ast.parse(source)) if source else ():
        match node:
            case ast.AnnAssign(target=ast.Name(id="ToolCallParserEnum"), value=ast.Dict(keys=keys)):
                yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))


def tool_parser(name: str, schemas: Sequence[Mapping[str, Any]]) -> Parser:
    """The parser of that name for tools with these JSON schemas. ValueError if SGLang cannot make it."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    tools = [Tool.model_validate(schema) for schema in schemas]
    try:
        FunctionCallParser(tools, name)
    except ValueError as error:
        raise ValueError(f"SGLang has no tool-call parser `{name}`: {error}") from error

    def parse(text: str, /, *, thinks: bool = False) -> list[Call | MalformedCall]:
        # A parser remembers its message, so each text needs another one.
        parser = FunctionCallParser(tools, name)
        begin, end = _AROUND.get(name, ("", ""))
        answer = begin + outside_reasoning(text, thinks=thinks) + end
        if not parser.has_tool_call(answer):
            return []
        try:
            _, items = parser.parse_non_stream(_CALL_ID.sub("", answer))
        except Exception as error:  # noqa: BLE001
            # SGLang's parsers raise many kinds of errors for malformed text: KeyError, SyntaxError, re.error and more.
            # A model may write such text at any time, and gets the error as the answer to its call.
            return [MalformedCall(f"the tool call cannot be read: {error}")]
        calls = [parsed_call(str(item.name), item.parameters) for item in items]
        ids = _ids(answer)
        if len(calls) == len(ids) == len(set(ids)):
            calls = [
                replace(call, id=own_id) if isinstance(call, Call) else call
                for call, own_id in zip(calls, ids, strict=True)
            ]
        return calls or [MalformedCall("no tool call could be parsed that names an existing tool")]

    return parse


def _ids(text: str) -> list[str]:
    """Ids that the policy gives its calls: newer and older models of Mistral, and Kimi."""
    if marked := _CALL_ID.findall(text) or _KIMI_ID.findall(text):
        return marked
    listed = text.partition("[TOOL_CALLS]")[2].lstrip()
    try:
        calls, _ = json.JSONDecoder(strict=False).raw_decode(listed)
        return [call["id"] for call in calls if isinstance(call["id"], str)]
    except (ValueError, RecursionError, TypeError, KeyError):
        return []
