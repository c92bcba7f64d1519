"""Writes conversations as tokens: whole ones at a root of the tree, only the new messages after a reply."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from dagrl.model_files.images import ImageSettings
from dagrl.model_files.tokenizer import MESSAGES, chat_text
from dagrl.ops.agents.messages import FOLLOWING, JsonObject, Message, RequestError
from dagrl.ops.turns.template import Answer, MessageWriter, RenderedText, nine_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Images = Sequence[np.ndarray]
"""Images in order, uint8 [height, width, 3] each, resized for the policy."""
_WRITERS = 64
"""Number of cached sets of tools."""


class ContextWriter:
    """The chat template and tokenizer of the policy. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vision: ImageSettings | None = None) -> None:
        """`vision` is set for a policy that takes images."""
        self._vision = vision
        # A copy, because tokenizers have states, and other threads use this one.
        self.tokenizer = copy.deepcopy(tokenizer)
        self._rendered = RenderedText(self.tokenizer, vision)
        self._writers: dict[str, MessageWriter] = {}

    @functools.cached_property
    def of_another_thread(self) -> ContextWriter:
        return ContextWriter(self.tokenizer, self._vision)

    @functools.cached_property
    def longest_token(self) -> int:
        """Most characters of a token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def conversation(self, messages: Sequence[Message], tools: Sequence[JsonObject], images: Images = ()) -> np.ndarray:
        """Tokens of a whole conversation up to the next reply, int64, encoded like prompts of a data set.

        `images` belong to its messages. Special tokens in texts of users and tools are plain text. Raises RequestError
        if the template rejects it.
        """
        if not self.tokenizer.chat_template:
            raise RequestError("the policy's tokenizer has no chat template; use /v1/completions")
        left = [image.shape[:2] for image in images]
        try:
            tokens = self._rendered.encode(self._written([self._shown(message) for message in messages], tools), left)
        except ValueError as error:
            raise RequestError(str(error)) from error
        if left:
            raise RequestError(f"the policy's chat template does not write {len(left)} of the {len(images)} images")
        if not tokens:
            raise RequestError("the conversation is empty")
        return np.array(tokens, dtype=np.int64)

    def following(
        self, messages: Sequence[Message], tools: Sequence[dict[str, object]], last_token: int, images: Images = ()
    ) -> np.ndarray | None:
        """Tokens of messages, with these images, after a reply that ended with `last_token`, int64.

        None if the template can write them only within the whole conversation.
        """
        is_whole = self.tokenizer.chat_template == MESSAGES
        if not messages or is_whole or any(message["role"] not in FOLLOWING for message in messages):
            return None
        key = json.dumps(tools, sort_keys=True)
        if key not in self._writers:
            if len(self._writers) >= _WRITERS:
                self._writers.clear()
            self._writers[key] = MessageWriter(self.tokenizer, tools, None, self._rendered, self._vision)
        left = iter(images)
        try:
            answers = [_answer(message, left) for message in messages]
            return self._writers[key].tokens(answers, last_token)
        except ValueError:
            return None

    def image_starts(self, given: np.ndarray, images: Images) -> list[int]:
        return self._rendered.image_starts(given, images).tolist()

    def image_tokens(self, image: np.ndarray) -> int:
        return len(self._rendered.image(image.shape[:2]))

    def check_text(self, tokens: np.ndarray) -> None:
        """Raise RequestError for tokens that a program may not choose: unknown tokens and image tokens."""
        if len(tokens) and tokens.max() >= len(self.tokenizer):
            raise RequestError(f"the policy has no token {tokens.max()}; the last one is {len(self.tokenizer) - 1}")
        if self._vision is not None and (tokens == self._vision.token).any():
            raise RequestError("tokens of images need images; send them as messages to /v1/chat/completions")

    def plain(self, text: str) -> np.ndarray:
        """Tokens of a text, int64; special tokens in it are plain text."""
        return np.array(self._rendered.plain(text), dtype=np.int64)

    def _written(self, messages: Sequence[Message], tools: Sequence[dict[str, object]]) -> str:
        """The messages as the template writes them; ids of calls become shorter if it wants that."""
        try:
            return chat_text(self.tokenizer, messages, tools)
        except ValueError:
            with suppress(ValueError):  # the ids may not be the cause
                return chat_text(self.tokenizer, [_with_short_ids(message) for message in messages], tools)
            raise

    def _shown(self, message: Message) -> Message:
        """The message without special tokens in texts of users and tools; an image token only marks an image."""
        content, only_images = message["content"], message["role"] not in ("user", "tool")
        if isinstance(content, str):
            return {**message, "content": self._rendered.hidden(content, only_images=only_images)}
        parts = [
            {**part, "text": self._rendered.hidden(part["text"], only_images=only_images)} if "text" in part else part
            for part in content
        ]
        return {**message, "content": parts}


def _with_short_ids(message: Message) -> Message:
    short = dict(message)
    if "tool_call_id" in message:
        short["tool_call_id"] = nine_characters(message["tool_call_id"])
    if "tool_calls" in message:
        short["tool_calls"] = [{**call, "id": nine_characters(str(call["id"]))} for call in message["tool_calls"]]
    return short


def _answer(message: Message, images: Iterator[np.ndarray]) -> Answer:
    """A message as `MessageWriter` takes it; its images are the next ones."""
    content, text = message["content"], ""
    places: list[int] = []
    own: list[np.ndarray] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] == "text":
            text += part["text"]
        else:
            places.append(len(text))
            own.append(next(images))
    return Answer(
        message["role"],
        text,
        tuple(own),
        tuple(places) if own else None,
        message.get("name", ""),
        message.get("tool_call_id", ""),
    )
