"""Writes answers to the policy as tokens, by the chat template; earlier tokens are not tokenised again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.models.images import ImageSettings, image_starts

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
    images: tuple[np.ndarray, ...] = ()
    """Images before the text, uint8 [height, width, 3], resized as the model sees them."""


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
        vision: ImageSettings | None = None,
    ) -> None:
        """`schemas` of the tools, for the template; the text of an answer is truncated to `max_tokens`.

        `literal` is a copy of the tokenizer that no other thread uses. Default: a new one. `vision` is set for a model
        that sees.
        """
        self._vision = vision
        self._tokenizer = tokenizer
        # A copy, because handling of special tokens is a state of the tokenizer, which other threads use.
        self._literal = literal or copy.deepcopy(tokenizer)
        self._schemas = list(schemas) or None
        self._max_tokens = max_tokens
        self._pieces: dict[tuple[tuple[str, int], ...], list[list[int]]] = {}
        cut = self._text_tokens(_CUT)
        # Only if the tokenizer can write dots.
        self._cut = [] if tokenizer.unk_token_id in cut else cut

    def tokens(self, answers: Sequence[Message], last_token: int) -> np.ndarray:
        """Token ids of the answers after a turn that ended with `last_token`, up to the next turn, int64.

        Raises ValueError if the template cannot write them.
        """
        kinds = tuple((answer.role, len(answer.images)) for answer in answers)
        if kinds not in self._pieces:
            self._pieces[kinds] = self._pieces_of(kinds)
        first, *others = self._pieces[kinds]
        # The policy has already written the end of its turn.
        first = first[1:] if first[:1] == [last_token] else first
        images = [image for answer in answers for image in answer.images]
        tokens = self._expanded(first, images)
        for answer, piece in zip(answers, others, strict=True):
            tokens += self._shortened(self._text_tokens(answer.text))
            tokens += self._expanded(piece, images)
        return np.array(tokens, dtype=np.int64)

    def image_starts(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """Index in `tokens`, which `tokens` has returned, of the first token of each image, int64 [images]."""
        if self._vision is None or not images:
            return np.zeros(0, dtype=np.int64)
        return image_starts(tokens, np.array([image.shape[:2] for image in images]), self._vision)

    def _expanded(self, piece: Sequence[int], images: list[np.ndarray]) -> list[int]:
        """The tokens of a piece, with those of an image, taken from `images`, in place of each image token."""
        if self._vision is None:
            return list(piece)
        tokens: list[int] = []
        for token in piece:
            count = self._vision.tokens(np.array(images.pop(0).shape[:2]))[0] if token == self._vision.token else 1
            tokens += [token] * int(count)
        return tokens

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

    def _pieces_of(self, kinds: Sequence[tuple[str, int]]) -> list[list[int]]:
        """The template's pieces around messages of these roles and numbers of images, one more than there are messages.

        Each image is one token.
        """
        roles, counts = [role for role, _ in kinds], [count for _, count in kinds]
        if not self._tokenizer.chat_template:
            return [*([self._vision.token] * count if self._vision else [] for count in counts), []]
        marks = [f"answer number {number} of them" for number in range(len(roles))]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _ASSISTANT},
        ]
        messages += [
            {"role": role, "content": [*[{"type": "image"}] * count, {"type": "text", "text": mark}] if count else mark}
            for (role, count), mark in zip(kinds, marks, strict=True)
        ]
        rest = self._rendered(messages, roles).partition(_ASSISTANT)[2]
        pieces = []
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise ValueError(_cannot_write(roles, "it drops their content"))
            pieces.append(piece)
        encoded = [self._encoded(piece) for piece in (*pieces, rest)]
        if self._vision and sum(piece.count(self._vision.token) for piece in encoded) != sum(counts):
            raise ValueError(_cannot_write(roles, "it drops their images"))
        return encoded

    def _encoded(self, piece: str) -> list[int]:
        if self._vision is None:
            return self._tokenizer.encode(piece, add_special_tokens=False)
        tokens: list[int] = []
        for number, text in enumerate(piece.split(str(self._tokenizer.convert_ids_to_tokens(self._vision.token)))):
            tokens += [self._vision.token] if number else []
            tokens += self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _rendered(self, messages: Sequence[dict[str, Any]], roles: Sequence[str]) -> str:
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
