"""Writes conversations as tokens: whole ones at a root of the tree, only what is new after a reply."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.data.tokenizer import chat_text
from dagrl.models.images import ImageSettings, image_starts
from dagrl.ops.agents.messages import FOLLOWING, Message, RequestError
from dagrl.ops.turns.template import Message as Answer
from dagrl.ops.turns.template import MessageWriter, encodable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Images = Sequence[np.ndarray]
"""Images in order, uint8 [height, width, 3] each, as the policy sees them."""
_UNLIMITED = 10**9
_WRITERS = 64
"""Sets of tools that are remembered."""


class ContextWriter:
    """The chat template and tokenizer of the policy. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vision: ImageSettings | None = None) -> None:
        """`vision` is set for a policy that sees."""
        self._vision = vision
        # A copy, because tokenizers have states, and other threads use this one.
        self.tokenizer = copy.deepcopy(tokenizer)
        self._literal = copy.deepcopy(tokenizer)
        self._specials = tuple(tokenizer.all_special_tokens)
        self._placeholder = str(tokenizer.convert_ids_to_tokens(vision.token)) if vision else ""
        self._writers: dict[str, MessageWriter] = {}

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], images: Images = ()
    ) -> np.ndarray:
        """Tokens of a whole conversation up to the next reply, int64, as prompts of a data set are written.

        `images` are those of its messages. Special tokens in what users and tools say are plain text. Raises
        RequestError if the template rejects it.
        """
        if not self.tokenizer.chat_template:
            raise RequestError("the policy's tokenizer has no chat template; use /v1/completions")
        shown, hidden = self._without_specials(messages)
        try:
            text = chat_text(self.tokenizer, shown, tools)
        except ValueError as error:
            raise RequestError(str(error)) from error
        tokens: list[int] = []
        left = [image.shape[:2] for image in images]
        for mark, content in hidden:
            before, found, text = text.partition(mark)
            tokens += self._encoded(before, left)
            tokens += self.plain(content).tolist() if found else []
        tokens += self._encoded(text, left)
        if left:
            raise RequestError(f"the policy's chat template does not write {len(left)} of the {len(images)} images")
        if not tokens:
            raise RequestError("the conversation is empty")
        return np.array(tokens, dtype=np.int64)

    def following(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], last_token: int, images: Images = ()
    ) -> np.ndarray | None:
        """Tokens of messages, with these images, after a reply that ended with `last_token`, int64.

        None if the template can only write them as a part of the whole conversation.
        """
        if not messages or any(message["role"] not in FOLLOWING for message in messages):
            return None
        key = json.dumps(tools, sort_keys=True)
        if key not in self._writers:
            if len(self._writers) >= _WRITERS:
                self._writers.clear()
            self._writers[key] = MessageWriter(
                self.tokenizer, tools, _UNLIMITED, literal=self._literal, vision=self._vision
            )
        left = iter(images)
        try:
            answers = [_answer(message, left) for message in messages]
            return self._writers[key].tokens(answers, last_token)
        except ValueError:
            return None

    def image_starts(self, given: np.ndarray, images: Images) -> list[int]:
        """Index in tokens, which this has written, where each of their images begins."""
        if self._vision is None or not images:
            return []
        return image_starts(given, np.array([image.shape[:2] for image in images]), self._vision).tolist()

    def image_tokens(self, image: np.ndarray) -> int:
        """Tokens of an image."""
        assert self._vision is not None, "an image for a policy that does not see"
        return int(self._vision.tokens(np.array(image.shape[:2]))[0])

    def check_text(self, tokens: np.ndarray) -> None:
        """Raise RequestError for tokens that a program may not choose: unknown ones, and those of images."""
        if len(tokens) and tokens.max() >= len(self.tokenizer):
            raise RequestError(f"the policy has no token {tokens.max()}; the last one is {len(self.tokenizer) - 1}")
        if self._vision is not None and (tokens == self._vision.token).any():
            raise RequestError("tokens of images need images; send them as messages to /v1/chat/completions")

    def plain(self, text: str) -> np.ndarray:
        """Tokens of a text, int64; special tokens in it are plain text."""
        tokens = self._literal.encode(encodable(text), add_special_tokens=False, split_special_tokens=True)
        return np.array(tokens, dtype=np.int64)

    def _without_specials(self, messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, str]]]:
        """The messages with marks in place of texts that hold special tokens; the marks and texts in order."""
        hidden: list[tuple[str, str]] = []

        def shown(text: str, role: str) -> str:
            specials = self._specials if role in ("user", "tool") else ()
            # The token of images stands for images alone.
            if not any(special in text for special in (*specials, *filter(None, [self._placeholder]))):
                return text
            hidden.append((f"content {secrets.token_hex(8)}", text))
            return hidden[-1][0]

        written = []
        for message in messages:
            role, content = message["role"], message["content"]
            if isinstance(content, str):
                content = shown(content, role)
            else:
                content = [{**each, "text": shown(each["text"], role)} if "text" in each else each for each in content]
            written.append({**message, "content": content})
        return written, hidden

    def _encoded(self, text: str, left: list[tuple[int, ...]]) -> list[int]:
        """Tokens of a text, with those of the images at its placeholders, whose sizes are taken from `left`."""
        if not self._vision:
            return self.tokenizer.encode(encodable(text), add_special_tokens=False) if text else []
        tokens: list[int] = []
        for number, piece in enumerate(text.split(self._placeholder)):
            if number:
                if not left:
                    raise RequestError("the policy's chat template writes more images than there are")
                tokens += [self._vision.token] * int(self._vision.tokens(np.array(left.pop(0)))[0])
            tokens += self.tokenizer.encode(encodable(piece), add_special_tokens=False) if piece else []
        return tokens


def _answer(message: Message, images: Iterator[np.ndarray]) -> Answer:
    """A message as `MessageWriter` takes it; its images are the next ones."""
    content = message["content"]
    if isinstance(content, str):
        return Answer(message["role"], content)
    text, places, own = "", [], []
    for part in content:
        if part["type"] == "text":
            text += part["text"]
        else:
            places.append(len(text))
            own.append(next(images))
    return Answer(message["role"], text, tuple(own), tuple(places))
