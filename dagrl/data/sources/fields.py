"""Prompts and reference answers in the values of a source's columns."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

from dagrl.config.schema import SourceSpec
from dagrl.model_files.chats import Message, chat_of, no_chat

_OWN_KEY = SourceSpec.model_fields["prompt_key"].default


def prompt_of(value: Any, spec: SourceSpec, *, has_template: bool) -> Any:
    """The prompt in a value of the source's column, a text or a chat, with the source's system message.

    Text in a column of another name than ``prompt`` is a user's message where the tokenizer has a chat template, and
    the last answers of a chat are removed. Raises ValueError, with the object of "has", for other values.
    """
    prompt = chat_of(value)
    if no_chat(prompt):
        raise ValueError("a prompt that is neither text nor a list of messages")
    if spec.prompt_key != _OWN_KEY:
        if isinstance(prompt, str) and prompt and has_template:
            prompt = as_chat(prompt)
        while isinstance(prompt, list) and prompt and (prompt[-1] or {}).get("role") == "assistant":
            prompt = prompt[:-1]
    return with_system(prompt, spec.system_prompt)


def with_system(prompt: Any, system: str | None) -> Any:
    """A prompt as a chat that begins with this system message, unless it has a system message or is missing."""
    if system is None or not prompt:
        return prompt
    chat = as_chat(prompt)
    own = (chat[0] or {}).get("role") in ("system", "developer")
    return chat if own else [{"role": "system", "content": system}, *chat]


def answer_of(value: object) -> str:
    """A reference answer as text: text unchanged, "" for None, the last message of a chat.

    Dates are in ISO 8601, anything else is JSON. Raises UnicodeDecodeError for bytes that are not UTF-8.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        last = chat_of(value)[-1]
        if isinstance(last.get("role"), str) and isinstance(last.get("content"), str):
            return str(last["content"])
    plain = value if isinstance(value, dict | list | int | float) else _in_json(value)
    return plain if isinstance(plain, str) else as_json(plain)


def as_chat(prompt: str | Sequence[Message]) -> list[Message]:
    """A prompt as messages; plain text becomes a user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_in_json)


def _in_json(value: object) -> object:
    """The JSON form of a value of another type; bytes that are not text become base64."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | time) else str(value)
