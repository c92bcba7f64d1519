"""Responses that come with the prompts of a data set: found in a row, and made into tokens."""

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
    """Where a prompt file holds responses, and how long they may be."""

    columns: tuple[str, ...]
    """Text, or chats whose last message is the response; ``extra_info.answer`` is a field of a struct."""
    max_tokens: int
    """The longest, its end token included."""
    overlong: Literal["drop", "cut", "error"]
    """What happens to a prompt with a longer one; a response that is cut has no end token."""


def value_at(row: Any, column: str) -> Any:
    """What a row, as Python objects, has in a column, or in a field of a struct; None where a struct is missing."""
    for name in column.split("."):
        row = row[name] if row is not None else None
    return row


def response_text(value: Any) -> str:
    """The response in a column's value: a text, or a chat's last message. ValueError where there is none."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("holds no response" if value is None or value == [] else f"holds {value!r:.80}, no response")
    # Parquet may hold null for a message, as for a field of one.
    last = value[-1] or {}
    role, content = last.get("role"), last.get("content")
    if role != ASSISTANT:
        whose = f"of the {role}" if role else "without a role"
        raise ValueError(f"ends with a message {whose}, and the response is the assistant's")
    if not isinstance(content, str):
        raise ValueError("ends with a message of the assistant that has no text, such as a call of a tool")
    return content


def prompt_before(values: Sequence[Any]) -> list[dict[str, Any]]:
    """The chat before the response; nothing where responses stand alone. ValueError where responses differ in it.

    `values` are those of a row's response columns.
    """
    chats = [value[:-1] for value in values if isinstance(value, list)]
    if any(chat != chats[0] for chat in chats):
        raise ValueError("the chats differ before their last message; they must answer the same")
    return chats[0] if chats else []


def response_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a response, as a policy samples it: without special tokens but for the one that ends it."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, which a response ends with; name another one")
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def in_turn(columns: Sequence[Column], groups: np.ndarray) -> Column:
    """One response for each row: the rows of a group take the columns, each with a row for each prompt, in turn.

    `groups`: the prompt of each row, int64 [rows], ascending.
    """
    _, first, place = np.unique(groups, return_index=True, return_inverse=True)
    turn = (np.arange(len(groups)) - first[place]) % len(columns)
    return Column.concat(columns).take(turn * len(columns[0]) + groups)
