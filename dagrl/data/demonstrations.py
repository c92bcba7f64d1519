"""Responses that come with the prompts of a data set: extraction from a row, and tokenisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dagrl.data.batch import Column
from dagrl.model_files.chats import CALLS, Message, fields_beside_content, no_chat
from dagrl.model_files.tokenizer import chat_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
_OTHER_TEMPLATE = "use another template, or write the response as text"


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


def reply_of(value: object) -> str | Message:
    """The response in a column's value: a text, or a chat's last message. Raises ValueError without one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or no_chat(value):
        raise ValueError("holds no response" if value is None or value == [] else f"holds {value!r:.80}, no response")
    # Parquet may store null for a message, or for one of its fields.
    last: Message = value[-1] or {}
    role = last.get("role")
    if role != ASSISTANT:
        whose = f"of the {role}" if role else "without a role"
        raise ValueError(f"ends with a message {whose}; the response must be the assistant's")
    if not isinstance(last.get("content"), str):
        raise ValueError("ends with a message of the assistant that has no text and no call of a tool")
    return last


def written_reply(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[Message],
    reply: Message,
    tools: Sequence[Mapping[str, object]] = (),
) -> str:
    """The template's text of the assistant's message `reply` after `before`, up to the token that ends it.

    Raises ValueError if the template rejects the chat, or does not write one of the message's fields.
    """
    start = chat_text(tokenizer, before, tools)

    def rest(message: Message) -> str:
        whole = chat_text(tokenizer, [*before, message], tools, complete=True)
        if not whole.startswith(start):
            fact = (
                f"the chat template ends the prompt with {start[-40:]!r}, and does not write the response behind that"
            )
            raise ValueError(f"{fact}; {_OTHER_TEMPLATE}")
        return whole[len(start) :]

    changed = {name: _changed(name, reply[name]) for name in ("content", *fields_beside_content(reply)) if reply[name]}
    text = rest(reply)
    for name, value in changed.items():
        if rest({**reply, name: value}) == text:
            among = [f"`{other}`" for other in changed if other != name]
            beside = f" beside {' and '.join(among)}" if among else ""
            raise ValueError(f"the chat template does not write the message's `{name}`{beside}; {_OTHER_TEMPLATE}")
    bare = text.rstrip()
    return bare if bare.endswith(tuple(tokenizer.all_special_tokens)) else text


def prompt_before(values: Sequence[object]) -> list[Message]:
    """The chat before the response; empty if responses are plain text. Raises ValueError if the chats differ.

    `values` are the values of a row's response columns.
    """
    if any(map(no_chat, values)):
        raise ValueError("a response is neither text nor a list of messages")
    chats = [value[:-1] for value in values if isinstance(value, list)]
    if any(chat != chats[0] for chat in chats):
        raise ValueError("the chats differ before their last message; they must answer the same prompt")
    return chats[0] if chats else []


def response_tokens(text: str, tokenizer: PreTrainedTokenizerBase, *, by_template: bool = False) -> list[int]:
    """Token ids of a response as a policy samples it: without special tokens, except for the end token.

    A chat template (`by_template`) has written the special tokens, and perhaps another end token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, which a response must end with; use another one")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ended = by_template and tokens[-1:] and tokens[-1] in tokenizer.all_special_ids
    return tokens if ended else [*tokens, tokenizer.eos_token_id]


def in_turn(columns: Sequence[Column], groups: np.ndarray) -> Column:
    """One response per row: the rows of a group take the response columns in turn.

    `groups`: index of each row's prompt, int64 [rows], ascending; each column has a row per prompt.
    """
    _, first, place = np.unique(groups, return_index=True, return_inverse=True)
    turn = (np.arange(len(groups)) - first[place]) % len(columns)
    return Column.concat(columns).take(turn * len(columns[0]) + groups)


def _changed(name: str, value: Any) -> Any:
    """A changed value of a field: a text with a further character, or calls with another name of the last one."""
    if isinstance(value, str) and name != CALLS:
        return f"{value}."
    *others, call = value if isinstance(value, list) else [value]
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"the message's `{name}` has no function with a name: {value!r:.80}; use OpenAI's form")
    changed = {**function, "name": f"{function['name']}."}
    changed = {**call, "function": changed} if "function" in call else changed
    return [*others, changed] if isinstance(value, list) else changed
