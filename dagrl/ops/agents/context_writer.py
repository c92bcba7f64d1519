"""Writes conversations as tokens: whole ones at a root of the tree, only what is new after a reply."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.data.tokenizer import chat_text
from dagrl.ops.agents.messages import FOLLOWING, Message, RequestError
from dagrl.ops.turns.template import Message as Answer
from dagrl.ops.turns.template import MessageWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNLIMITED = 10**9
_WRITERS = 64
"""Sets of tools that are remembered."""


class ContextWriter:
    """The chat template and tokenizer of the policy. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # A copy, because tokenizers have states, and other threads use this one.
        self.tokenizer = copy.deepcopy(tokenizer)
        self._literal = copy.deepcopy(tokenizer)
        self._specials = tuple(tokenizer.all_special_tokens)
        self._writers: dict[str, MessageWriter] = {}

    def conversation(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> np.ndarray:
        """Tokens of a whole conversation up to the next reply, int64, as prompts of a data set are written.

        Special tokens in what users and tools say are plain text. Raises RequestError if the template rejects it.
        """
        if not self.tokenizer.chat_template:
            raise RequestError("the policy's tokenizer has no chat template; use /v1/completions")
        shown, hidden = self._without_specials(messages)
        try:
            text = chat_text(self.tokenizer, shown, tools)
        except ValueError as error:
            raise RequestError(str(error)) from error
        tokens: list[int] = []
        for mark, content in hidden:
            before, found, text = text.partition(mark)
            tokens += self._encoded(before)
            tokens += self.plain(content).tolist() if found else []
        tokens += self._encoded(text)
        if not tokens:
            raise RequestError("the conversation is empty")
        return np.array(tokens, dtype=np.int64)

    def following(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], last_token: int
    ) -> np.ndarray | None:
        """Tokens of messages after a reply that ended with `last_token`, int64.

        None if the template can only write them as a part of the whole conversation.
        """
        if not messages or any(message["role"] not in FOLLOWING for message in messages):
            return None
        key = json.dumps(tools, sort_keys=True)
        if key not in self._writers:
            if len(self._writers) >= _WRITERS:
                self._writers.clear()
            self._writers[key] = MessageWriter(self.tokenizer, tools, _UNLIMITED, literal=self._literal)
        try:
            answers = [Answer(message["role"], message["content"]) for message in messages]
            return self._writers[key].tokens(answers, last_token)
        except ValueError:
            return None

    def plain(self, text: str) -> np.ndarray:
        """Tokens of a text, int64; special tokens in it are plain text."""
        text = text.encode("utf-8", "replace").decode()
        tokens = self._literal.encode(text, add_special_tokens=False, split_special_tokens=True)
        return np.array(tokens, dtype=np.int64)

    def _without_specials(self, messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, str]]]:
        """The messages with marks in place of contents that hold special tokens; the marks and contents in order."""
        shown, hidden = [], []
        for message in messages:
            content = message["content"]
            if message["role"] in ("user", "tool") and any(special in content for special in self._specials):
                mark = f"content {secrets.token_hex(8)}"
                hidden.append((mark, content))
                message = {**message, "content": mark}
            shown.append(message)
        return shown, hidden

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []
