"""Writes answers to the policy as tokens, by the chat template; earlier tokens are not tokenised again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """Images, uint8 [height, width, 3], resized as the model sees them."""
    places: tuple[int, ...] | None = None
    """Index in the text where each of them stands. Default: all stand before the text."""

    @property
    def layout(self) -> tuple[str, tuple[bool, ...]]:
        """Role, and for each part whether it is an image."""
        return self.role, tuple(part is None for part in self.parts())

    def parts(self) -> list[str | None]:
        """Pieces of the text in order; None stands for an image."""
        if self.places is None:
            return [*[None] * len(self.images), self.text]
        parts: list[str | None] = []
        for begin, end in pairwise([0, *self.places, len(self.text)]):
            parts += [self.text[begin:end]] if end > begin else []
            parts.append(None)
        return parts[:-1]


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
        self._pieces: dict[tuple[tuple[str, tuple[bool, ...]], ...], list[list[int]]] = {}
        cut = self._text_tokens(_CUT)
        # Only if the tokenizer can write dots.
        self._cut = [] if tokenizer.unk_token_id in cut else cut

    def tokens(self, answers: Sequence[Message], last_token: int) -> np.ndarray:
        """Token ids of the answers after a turn that ended with `last_token`, up to the next turn, int64.

        Raises ValueError if the template cannot write them.
        """
        layouts = tuple(answer.layout for answer in answers)
        if layouts not in self._pieces:
            self._pieces[layouts] = self._pieces_of(layouts)
        first, *others = self._pieces[layouts]
        # The policy has already written the end of its turn, unless that is an image's token, which it may sample.
        ends = last_token if self._vision is None or last_token != self._vision.token else None
        first = first[1:] if first[:1] == [ends] else first
        images = [image for answer in answers for image in answer.images]
        tokens = self._expanded(first, images)
        texts = [part for answer in answers for part in answer.parts() if part is not None]
        for text, piece in zip(texts, others, strict=True):
            tokens += self._shortened(self._text_tokens(text))
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
        text = encodable(text)
        return self._literal.encode(text, add_special_tokens=False, split_special_tokens=True)

    def _pieces_of(self, layouts: Sequence[tuple[str, tuple[bool, ...]]]) -> list[list[int]]:
        """The template's pieces around the texts of messages of these layouts, one more than there are texts.

        Each image is one token.
        """
        roles = [role for role, _ in layouts]
        if not self._tokenizer.chat_template:
            return self._bare_pieces(layouts)
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _ASSISTANT},
        ]
        marks: list[str] = []
        for role, layout in layouts:
            parts: list[dict[str, str]] = []
            for is_image in layout:
                if is_image:
                    parts.append({"type": "image"})
                    continue
                marks.append(f"answer number {len(marks)} of them")
                parts.append({"type": "text", "text": marks[-1]})
            messages.append({"role": role, "content": parts if any(layout) else "".join(p["text"] for p in parts)})
        rest = self._rendered(messages, roles).partition(_ASSISTANT)[2]
        pieces = []
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise ValueError(_cannot_write(roles, "it drops their content"))
            pieces.append(piece)
        encoded = [self._encoded(piece) for piece in (*pieces, rest)]
        images = sum(sum(layout) for _, layout in layouts)
        if self._vision and sum(piece.count(self._vision.token) for piece in encoded) != images:
            raise ValueError(_cannot_write(roles, "it drops their images"))
        return encoded

    def _bare_pieces(self, layouts: Sequence[tuple[str, tuple[bool, ...]]]) -> list[list[int]]:
        """The pieces without a chat template."""
        pieces: list[list[int]] = [[]]
        for is_image in (each for _, layout in layouts for each in layout):
            if not is_image:
                pieces.append([])
            elif self._vision:
                pieces[-1].append(self._vision.token)
        return pieces

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
        except (TemplateError, TypeError) as error:  # TypeError: an expression failed
            raise ValueError(_cannot_write(roles, str(error))) from error


def _cannot_write(roles: Sequence[str], why: str) -> str:
    return (
        f"the tokenizer's chat template cannot write messages of role `{roles[0]}` after the assistant's: {why}; use a "
        "tokenizer whose template can"
    )


def encodable(text: str) -> str:
    """`text` with question marks for unpaired surrogates, which JSON may contain, and tokenizers do not take."""
    return text.encode("utf-8", "replace").decode()
