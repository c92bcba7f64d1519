"""Messages of OpenAI's chat protocol: as chat templates take them, and as keys that recognise a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dagrl.backends.tool_calls import Call

_ROLES = ("system", "user", "assistant", "tool")
FOLLOWING = ("user", "tool", "system")
"""Roles of messages that can follow a reply without the whole conversation being written again."""


class RequestError(ValueError):
    """A request that the endpoint cannot answer."""


type Message = dict[str, Any]
"""``role`` and ``content`` (a string); an assistant's may have ``tool_calls`` whose arguments are objects."""


def message_of(given: Any) -> Message:
    """A message as the chat template takes it. Raises RequestError."""
    if not isinstance(given, Mapping):
        raise RequestError(f"a message is an object with role and content, not {given!r:.80}")
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in _ROLES:
        raise RequestError(f"there is no role {role!r}; choose one of {', '.join(_ROLES)}")
    message: Message = {"role": role, "content": text_of(given.get("content"))}
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [_call_of(call) for call in given["tool_calls"]]
    for key in ("name", "tool_call_id"):
        if isinstance(given.get(key), str):
            message[key] = given[key]
    return message


def text_of(content: Any) -> str:
    """The text of a content: a string, or parts. Raises RequestError for anything but text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise RequestError("a message's content is text, or parts of text; images and sounds are not supported")


def key_of(message: Message) -> bytes:
    """Bytes that are equal for messages that say the same.

    Ids of calls do not count, nor does space around an assistant's text: frameworks change both.
    """
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    return json.dumps([message["role"], text, calls], sort_keys=True).encode()


def reply_message(text: str, calls: Sequence[Call], ids: Sequence[str]) -> Message:
    """The assistant's message of a reply."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for key, call in zip(ids, calls, strict=True)
        ]
    return message


def _call_of(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"a tool call has a function with a name, unlike {call!r:.80}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            # The text that a template then writes is the program's, as it has changed the policy's call.
            arguments = {"arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
