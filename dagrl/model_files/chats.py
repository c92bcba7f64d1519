"""Converts chats of a prompt file from the forms in files to the form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

type Message = dict[str, Any]
type Chat = Sequence[Mapping[str, Any]]

CALLS = "tool_calls"
_BESIDE_CONTENT = (CALLS, "function_call", "reasoning_content", "reasoning", "thinking", "tool_plan")
"""Fields of an assistant's message, in the forms of several libraries, that a policy writes beside the content."""

_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
"""Roles in the form of ShareGPT, ``{from, value}``."""


def chat_of(value: object) -> Any:
    """A value of a prompt file with chats converted for templates; a text is kept unless it is a chat in JSON.

    Null fields of structs are removed: in parquet a message has the fields of all others, and templates test for
    example for ``tool_calls``. The arguments of calls become objects, and a message of calls alone has a content.
    ShareGPT's ``{from, value}`` become ``{role, content}``.
    """
    value = _without_nulls(_chat_in_json(value) if isinstance(value, str) else value)
    return [_message(each) for each in value] if isinstance(value, list) else value


def no_chat(value: object) -> bool:
    """Whether a value is neither missing, nor a text, nor a list of messages; null messages are reported separately."""
    if isinstance(value, list):
        return not all(isinstance(each, dict | None) for each in value)
    return not isinstance(value, str | None)


def fields_beside_content(message: Mapping[str, object]) -> list[str]:
    """Fields of an assistant's message, except the content, that are part of the policy's text."""
    return [name for name in _BESIDE_CONTENT if message.get(name)]


def with_arguments_as_text(chat: Chat) -> list[Mapping[str, Any]]:
    """The chat with the arguments of its calls as text in JSON, not as objects."""

    def call_of(call: object) -> object:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            return call
        if isinstance(function.get("arguments"), str | None):
            return call
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def message_of(message: Mapping[str, object]) -> Mapping[str, object]:
        calls = message.get(CALLS)
        return {**message, CALLS: [call_of(call) for call in calls]} if isinstance(calls, list) else message

    return [message_of(message) for message in chat]


def _chat_in_json(text: str) -> str | list[Message]:
    if not text.lstrip().startswith("["):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_chat = isinstance(found, list) and found and all(_is_message(each) for each in found)
    return found if is_chat else text


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and ("role" in value or (isinstance(value.get("from"), str) and "value" in value))


def _message(message: object) -> object:
    if not isinstance(message, dict):
        return message
    if _is_message(message) and "role" not in message:
        others = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = {"role": _SHAREGPT.get(message["from"], message["from"]), "content": message["value"], **others}
    if not fields_beside_content(message):
        return message
    calls = _from_json(message.get(CALLS))
    return {"content": "", **message, **({CALLS: [_call(call) for call in calls]} if isinstance(calls, list) else {})}


def _call(call: object) -> object:
    """A call with its arguments as an object, in OpenAI's form."""
    if not isinstance(call, dict):
        return call
    if "name" in call and "function" not in call:
        call = {"type": "function", "function": call}
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _from_json(function["arguments"])}}


def _from_json(value: object) -> object:
    """The value of a text in JSON; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: object) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value
