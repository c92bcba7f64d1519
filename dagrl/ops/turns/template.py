"""Writes answers to the policy as tokens, by the chat template; earlier tokens are not tokenised again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT = "\n...\n"
_ASSISTANT, _USER = "what the policy has said", "what it was asked"


@dataclass(frozen=True, slots=True)
class Message:
    """A message to the policy."""

    role: str
    """``tool`` or ``user``"""
    text: str


class MessageWriter:
    """Writes answers as the tokens between two turns of the policy.

    The chat template is rendered once for each sequence of roles, with placeholders for the texts. Texts are tokenised
    separately, without special tokens, so that an answer cannot end a turn or begin one. Without a chat template the
    texts follow each other.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
        max_tokens: int,
        literal: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """`schemas` of the tools, for the template; an answer is truncated to `max_tokens`.

        `literal` is a copy of the tokenizer that no other thread uses. Default: a new one.
        """
        self._tokenizer = tokenizer
        # A copy, because handling of special tokens is a state of the tokenizer, which other threads use.
        self._literal = literal or copy.deepcopy(tokenizer)
        self._schemas = list(schemas) or None
        self._max_tokens = max_tokens
        self._pieces: dict[tuple[str, ...], list[list[int]]] = {}
        cut = self._text_tokens(_CUT)
        # Only if the tokenizer can write dots.
        self._cut = [] if tokenizer.unk_token_id in cut else cut

    def tokens(self, answers: Sequence[Message], last_token: int) -> np.ndarray:
        """Token ids of the answers after a turn that ended with `last_token`, up to the next turn, int64.

        Raises ValueError if the template cannot write them.
        """
        roles = tuple(answer.role for answer in answers)
        if roles not in self._pieces:
            self._pieces[roles] = self._pieces_of(roles)
        first, *others = self._pieces[roles]
        # The policy has already written the end of its turn.
        tokens = first[1:] if first[:1] == [last_token] else list(first)
        for answer, piece in zip(answers, others, strict=True):
            tokens += self._shortened(self._text_tokens(answer.text))
            tokens += piece
        return np.array(tokens, dtype=np.int64)

    def _shortened(self, tokens: list[int]) -> list[int]:
        if len(tokens) <= self._max_tokens:
            return tokens
        cut = self._cut if len(self._cut) < self._max_tokens else []
        kept = self._max_tokens - len(cut)
        head = -(-kept // 2)
        return tokens[:head] + cut + tokens[len(tokens) - (kept - head) :]

    def _text_tokens(self, text: str) -> list[int]:
        # JSON may contain unpaired surrogates, which cannot be encoded.
        text = text.encode("utf-8", "replace").decode()
        return self._literal.encode(text, add_special_tokens=False, split_special_tokens=True)

    def _pieces_of(self, roles: Sequence[str]) -> list[list[int]]:
        """The template's pieces around messages of these roles, one more than there are messages."""
        if not self._tokenizer.chat_template:
            return [[] for _ in range(len(roles) + 1)]
        marks = [f"answer number {number} of them" for number in range(len(roles))]
        messages = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}]
        messages += [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        rest = self._rendered(messages, roles).partition(_ASSISTANT)[2]
        pieces = []
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise ValueError(_cannot_write(roles, "it drops their content"))
            pieces.append(piece)
        return [self._tokenizer.encode(piece, add_special_tokens=False) for piece in (*pieces, rest)]

    def _rendered(self, messages: Sequence[dict[str, str]], roles: Sequence[str]) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=self._schemas, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(_cannot_write(roles, str(error))) from error


def _cannot_write(roles: Sequence[str], why: str) -> str:
    return (
        f"the tokenizer's chat template cannot write messages of role `{roles[0]}` after the assistant's: {why}; use a "
        "tokenizer whose template can"
    )
