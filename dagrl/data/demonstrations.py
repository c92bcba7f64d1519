"""Responses that come with the prompts of a data set: extraction from a row, and tokenisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dagrl.data.batch import Column

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ResponseColumns:
    """Columns of a prompt file that hold responses, and their length limit."""

    columns: tuple[str, ...]
    """Columns with text, or with chats whose last message is the response; ``extra_info.answer`` is a struct's
    field.
    """
    max_tokens: int
    """Largest number of tokens, including the end token."""
    overlong: Literal["drop", "cut", "error"]
    """Treatment of a prompt with a longer response; a response that is cut has no end token."""


def value_at(row: Any, column: str) -> Any:
    """The value of a column, or of a struct's field, in a row of Python objects; None if a struct is missing."""
    for name in column.split("."):
        row = row[name] if row is not None else None
    return row


def response_text(value: Any) -> str:
    """The response in a column's value: a text, or a chat's last message. Raises ValueError without one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("holds no response" if value is None or value == [] else f"holds {value!r:.80}, no response")
    # Parquet may store null for a message, or for one of its fields.
    last = value[-1] or {}
    role, content = last.get("role"), last.get("content")
    if role != ASSISTANT:
        whose = f"of the {role}" if role else "without a role"
        raise ValueError(f"ends with a message {whose}; the response must be the assistant's")
    if not isinstance(content, str):
        raise ValueError("ends with a message of the assistant that has no text, such as a call of a tool")
    return content


def prompt_before(values: Sequence[Any]) -> list[dict[str, Any]]:
    """The chat before the response; empty if responses are plain text. Raises ValueError if the chats differ.

    `values` are those of a row's response columns.
    """
    chats = [value[:-1] for value in values if isinstance(value, list)]
    if any(chat != chats[0] for chat in chats):
        raise ValueError("the chats differ before their last message; they must answer the same prompt")
    return chats[0] if chats else []


def response_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a response as a policy samples it: without special tokens, except for the end token."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, which a response must end with; use another one")
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def in_turn(columns: Sequence[Column], groups: np.ndarray) -> Column:
    """One response per row: the rows of a group take the response columns in turn.

    `groups`: index of each row's prompt, int64 [rows], ascending; each column has a row per prompt.
    """
    _, first, place = np.unique(groups, return_index=True, return_inverse=True)
    turn = (np.arange(len(groups)) - first[place]) % len(columns)
    return Column.concat(columns).take(turn * len(columns[0]) + groups)
