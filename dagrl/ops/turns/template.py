"""Writes answers to the policy as tokens, by the chat template; earlier tokens are not tokenised again."""

from __future__ import annotations

import copy
import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.model_files.images import ImageSettings, image_starts
from dagrl.model_files.tokenizer import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT = "\n...\n"


class RenderedText:
    """Hides special tokens of texts from the chat template, and encodes its output. Not thread-safe.

    A mark takes the place of each special token of a text before the template sees it, so that the template's filters
    apply to all of the text, and no text can end a turn or begin one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vision: ImageSettings | None = None) -> None:
        """`vision` is set for a model that takes images."""
        self._vision = vision
        self._tokenizer = tokenizer
        # A copy, because the handling of special tokens is state of the tokenizer, which other threads use.
        self._literal = copy.deepcopy(tokenizer)
        self._image = str(tokenizer.convert_ids_to_tokens(vision.token)) if vision else ""
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._specials = sorted({*added, *tokenizer.all_special_tokens, self._image} - {""}, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")
        """Finds a special token in a text."""
        self._prefix = f"special{secrets.token_hex(8)}n"
        self._marks = re.compile(rf"{self._prefix}(\d+)x")

    def hidden(self, text: str, *, only_images: bool = False) -> str:
        """`text` with marks in place of special tokens, or of image tokens alone."""
        if only_images:
            return encodable(text).replace(self._image, self._mark(self._image)) if self._image else encodable(text)
        return self.special.sub(lambda match: self._mark(match[0]), encodable(text))

    def _mark(self, special: str) -> str:
        return f"{self._prefix}{self._specials.index(special)}x"

    def plain(self, text: str) -> list[int]:
        """Tokens of a text in which special tokens are plain text."""
        return self._literal.encode(encodable(text), add_special_tokens=False, split_special_tokens=True)

    def shortened(self, text: str, longest: int) -> str:
        """`text` without its middle if it has more than `longest` tokens, as plain text."""
        text = encodable(text)
        count = len(self.plain(text))
        if count <= longest:
            return text
        ends = self._ends(text, count)
        # Only if the tokenizer can write dots.
        cut = self.plain(_CUT)
        shown = _CUT if len(cut) < longest and self._tokenizer.unk_token_id not in cut else ""
        for kept in range(longest - (len(cut) if shown else 0), 0, -1):
            head = -(-kept // 2)
            begin, end = text[: ends[head - 1]], text[ends[count - (kept - head) - 1] :]
            # Characters that become adjacent may be tokenised differently.
            if len(self.plain(begin + shown + end)) <= longest:
                return begin + shown + end
        return ""

    def _ends(self, text: str, count: int) -> list[int]:
        """Index of the character after each of the `count` tokens of a text."""
        if not self._literal.is_fast:
            return [len(text) * (token + 1) // count for token in range(count)]
        given = self._literal(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        return [end for _, end in given["offset_mapping"]]

    def encode(self, text: str, images: list[tuple[int, ...]]) -> list[int]:
        """Tokens of the template's text; hidden tokens are plain text.

        An image's placeholder becomes the tokens of the next of `images`, heights and widths, which is removed from the
        list. Raises ValueError if the list is empty.
        """
        tokens: list[int] = []
        for number, piece in enumerate(self._marks.split(text)):
            if number % 2:
                tokens += self.plain(self._specials[int(piece)])
            elif piece:
                tokens += self._with_images(encodable(piece), images)
        return tokens

    def _with_images(self, text: str, images: list[tuple[int, ...]]) -> list[int]:
        if self._vision is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        tokens: list[int] = []
        for number, piece in enumerate(text.split(self._image)):
            if number:
                if not images:
                    raise ValueError("the policy's chat template writes more images than there are")
                tokens += self.image(images.pop(0))
            tokens += self._tokenizer.encode(piece, add_special_tokens=False) if piece else []
        return tokens

    def images_in(self, text: str) -> int:
        return text.count(self._image) if self._image else 0

    def image_starts(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """Index of the first token of each image in `tokens`, which this object encoded, int64 [images]."""
        if self._vision is None or not images:
            return np.zeros(0, dtype=np.int64)
        return image_starts(tokens, np.array([image.shape[:2] for image in images]), self._vision)

    def image(self, size: tuple[int, ...]) -> list[int]:
        assert self._vision is not None, "an image for a policy that does not see"
        return [self._vision.token] * int(self._vision.tokens(np.array(size))[0])


def encodable(text: str) -> str:
    """`text` with question marks for unpaired surrogates, which JSON may contain but tokenizers reject."""
    return text.encode("utf-8", "replace").decode()


_USER = "what it was asked"
_LAYOUTS = 256
"""Number of cached sequences of messages."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A message to the policy."""

    role: str
    """``tool`` or ``user``"""
    text: str
    images: tuple[np.ndarray, ...] = ()
    """Images, uint8 [height, width, 3], resized for the model."""
    places: tuple[int, ...] | None = None
    """Index in the text of each image. Default: all images precede the text."""
    name: str = ""
    """The tool that answers."""
    call_id: str = ""
    """The id of the answered call."""

    @property
    def layout(self) -> _Layout:
        """The properties of a message that determine the template's text around it."""
        return _Layout(self.role, tuple(part is None for part in self.parts()), self.name, self.call_id)

    def parts(self) -> list[str | None]:
        """Pieces of the text in order; None marks an image."""
        if self.places is None:
            return [*[None] * len(self.images), self.text]
        parts: list[str | None] = []
        for begin, end in pairwise([0, *self.places, len(self.text)]):
            parts += [self.text[begin:end]] if end > begin else []
            parts.append(None)
        return parts[:-1]


@dataclass(frozen=True, slots=True)
class _Layout:
    """A message without its texts."""

    role: str
    images: tuple[bool, ...]
    """Whether each part is an image."""
    name: str
    call_id: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """A way of the template to write messages of some layouts."""

    calls: bool
    """Whether the previous turn has the answered calls, or text alone."""
    short_ids: bool = False
    """Whether ids have nine letters and digits."""
    head: str = ""
    """The template's text between the policy's text, or its last call, and the text of the first message."""

    def end_of(self, sampled: str, *, is_added: bool) -> int:
        """Index in the head of the token that ended the policy's turn; -1 if the template ends it otherwise.

        Only an added token of the vocabulary differs from the end of a call.
        """
        if not sampled or (self.calls and not is_added):
            return -1
        place = self.head.find(sampled)
        return place if self.calls or not self.head[: max(place, 0)].strip() else -1


class MessageWriter:
    """Writes answers as the tokens between two turns of the policy.

    The chat template renders the answers after a placeholder for the policy's turn, and the text after that turn is
    tokenised, without the end token that the policy wrote. Special tokens in the answers are plain text, so that an
    answer cannot end a turn or begin one. Without a chat template the texts follow each other.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
        max_tokens: int | None,
        rendered: RenderedText | None = None,
        vision: ImageSettings | None = None,
    ) -> None:
        """`schemas` of the tools, for the template; the text of an answer is truncated to `max_tokens`.

        `rendered` must not be used by another thread. Default: a new one. `vision` is set for a model that takes
        images.
        """
        self._vision = vision
        self._tokenizer = tokenizer
        self._rendered = rendered or RenderedText(tokenizer, vision)
        self._schemas = list(schemas)
        self._max_tokens = max_tokens
        self._said, self._marks = f"said {secrets.token_hex(8)}", f"answer {secrets.token_hex(8)} number"
        self._frames = lru_cache(_LAYOUTS)(self._find_frames)

    def tokens(self, answers: Sequence[Answer], last_token: int) -> np.ndarray:
        """Token ids of the answers after a turn that ended with `last_token`, up to the next turn, int64.

        Raises ValueError if the template cannot write them.
        """
        layouts = tuple(answer.layout for answer in answers)
        sizes = [image.shape[:2] for answer in answers for image in answer.images]
        texts = [part for answer in answers for part in answer.parts() if part is not None]
        if self._max_tokens is not None:
            texts = [self._rendered.shortened(text, self._max_tokens) for text in texts]
        if not self._tokenizer.chat_template:
            return np.array(self._bare_tokens(layouts, texts, sizes), dtype=np.int64)
        # The policy may sample an image's token, which ends no turn.
        sampled = "" if self._vision and last_token == self._vision.token else self._tokenizer.decode([last_token])
        is_added = last_token in self._tokenizer.added_tokens_decoder
        frames = [(frame.end_of(sampled, is_added=is_added), frame) for frame in self._frames(layouts)]
        end, frame = next((candidate for candidate in frames if candidate[0] >= 0), frames[-1])
        rest = self._rest(layouts, [self._rendered.hidden(text) for text in texts], frame)
        if end < 0 and frame.calls and (special := self._rendered.special.search(frame.head)):
            # The policy has written the end of its call, but not the end of its turn.
            rest = rest[special.start() :]
        # Encoded with the end token, because some tokenizers encode the beginning of a text differently.
        tokens = self._rendered.encode(rest[max(end, 0) :], sizes)
        return np.array(tokens[1:] if end >= 0 and tokens[:1] == [last_token] else tokens, dtype=np.int64)

    def image_starts(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        return self._rendered.image_starts(tokens, images)

    def _bare_tokens(
        self, layouts: Sequence[_Layout], texts: Sequence[str], sizes: Sequence[tuple[int, ...]]
    ) -> list[int]:
        tokens: list[int] = []
        left, pixels = iter(texts), iter(sizes)
        for is_image in (is_image for layout in layouts for is_image in layout.images):
            tokens += self._rendered.image(next(pixels)) if is_image else self._rendered.plain(next(left))
        return tokens

    def _find_frames(self, layouts: tuple[_Layout, ...]) -> list[_Frame]:
        """Ways of the template to write messages of these layouts, the best first. Raises ValueError without one.

        Models are trained on answers after the calls, and some templates refuse other answers; others refuse several
        calls.
        """
        texts = sum(not is_image for layout in layouts for is_image in layout.images)
        marks = [f"{self._marks}{number}." for number in range(texts)]
        answers_calls = any(layout.role == "tool" for layout in layouts)
        frames: list[_Frame] = []
        for calls in (True, False) if answers_calls else (False,):
            for short_ids in (False, True):
                frame = _Frame(calls, short_ids)
                try:
                    rest = self._rest(layouts, marks, frame)
                    self._check(rest, marks, layouts)
                except ValueError as error:
                    failure = error
                else:
                    frames.append(replace(frame, head=rest.partition(marks[0])[0] if marks else rest))
                    break
        if not frames:
            raise failure
        return frames

    def _check(self, rest: str, marks: Sequence[str], layouts: Sequence[_Layout]) -> None:
        places = [rest.find(mark) for mark in marks]
        if -1 in places or places != sorted(places):
            raise ValueError(_cannot_write(layouts, "it drops their content"))
        images = sum(sum(layout.images) for layout in layouts)
        if self._vision and self._rendered.images_in(rest) != images:
            raise ValueError(_cannot_write(layouts, "it drops their images"))

    def _rest(self, layouts: Sequence[_Layout], texts: Sequence[str], frame: _Frame) -> str:
        """Return the template's text after the text, or the last call, of a placeholder for the policy's turn."""
        messages, calls, left = [], [], iter(texts)
        for number, layout in enumerate(layouts):
            parts = [{"type": "image"} if image else {"type": "text", "text": next(left)} for image in layout.images]
            content = parts if any(layout.images) else "".join(part["text"] for part in parts)
            message: dict[str, Any] = {"role": layout.role, "content": content}
            if layout.role == "tool":
                call_id = layout.call_id or f"call{number:05d}"
                call_id = nine_characters(call_id) if frame.short_ids else call_id
                name = layout.name or (self._schemas[0]["function"]["name"] if self._schemas else "tool")
                message |= {"tool_call_id": call_id, "name": name}
                function = {"name": name, "arguments": {"said": self._said}}
                calls.append({"id": call_id, "type": "function", "function": function})
            messages.append(message)
        asked: dict[str, Any] = {"role": "user", "content": _USER}
        said = {"content": "", "tool_calls": calls} if frame.calls else {"content": self._said}
        chat = [asked, {"role": "assistant", **said}, *messages]
        try:
            rendered = render_chat(self._tokenizer, chat, self._schemas)
        except ValueError as error:
            raise ValueError(_cannot_write(layouts, str(error))) from error
        _, mark, rest = rendered.rpartition(self._said)
        if not mark:
            raise ValueError(_cannot_write(layouts, "it drops the assistant's text"))
        return rest


def nine_characters(call_id: str) -> str:
    """An id of nine letters and digits, as Mistral's templates require, which is the same for the same id."""
    return call_id if re.fullmatch("[a-zA-Z0-9]{9}", call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _cannot_write(layouts: Sequence[_Layout], why: str) -> str:
    role = layouts[0].role
    return (
        f"the tokenizer's chat template cannot write messages of role `{role}` after the assistant's: {why}; use a "
        "tokenizer whose template can"
    )
