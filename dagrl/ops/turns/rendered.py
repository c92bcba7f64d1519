"""Tokens of what a chat template has written, in which special tokens of other people's texts are plain text."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dagrl.model_files.images import ImageSettings, image_starts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT = "\n...\n"


class RenderedText:
    """Hides special tokens of texts from the chat template, and encodes what it writes. Not thread-safe.

    A mark takes the place of each special token of a text before the template sees it, so that the template's filters
    apply to all of the text, and no text can end a turn or begin one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vision: ImageSettings | None = None) -> None:
        """`vision` is set for a model that takes images."""
        self._vision = vision
        self._tokenizer = tokenizer
        # A copy, because handling of special tokens is a state of the tokenizer, which other threads use.
        self._literal = copy.deepcopy(tokenizer)
        self._image = str(tokenizer.convert_ids_to_tokens(vision.token)) if vision else ""
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._specials = sorted({*added, *tokenizer.all_special_tokens, self._image} - {""}, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")
        """Finds a special token in a text."""
        self._prefix = f"special{secrets.token_hex(8)}n"
        self._marks = re.compile(rf"{self._prefix}(\d+)x")

    def hidden(self, text: str, *, only_images: bool = False) -> str:
        """`text` with marks in place of special tokens, or of those of images alone."""
        if only_images:
            return encodable(text).replace(self._image, self._mark(self._image)) if self._image else encodable(text)
        return self.special.sub(lambda found: self._mark(found[0]), encodable(text))

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
            # Characters that are next to each other now may be tokenised in another way.
            if len(self.plain(begin + shown + end)) <= longest:
                return begin + shown + end
        return ""

    def _ends(self, text: str, count: int) -> list[int]:
        """For each of the `count` tokens of a text the index of the character after it."""
        if not self._literal.is_fast:
            return [len(text) * (token + 1) // count for token in range(count)]
        given = self._literal(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        return [end for _, end in given["offset_mapping"]]

    def encode(self, text: str, images: list[tuple[int, ...]]) -> list[int]:
        """Tokens of what the template has written; hidden tokens are plain text.

        An image's placeholder becomes the tokens of the next of `images`, heights and widths, which is taken out of the
        list. Raises ValueError if there is none.
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
        """How many images the template has written."""
        return text.count(self._image) if self._image else 0

    def image_starts(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """Index in `tokens`, which this has encoded, of the first token of each image, int64 [images]."""
        if self._vision is None or not images:
            return np.zeros(0, dtype=np.int64)
        return image_starts(tokens, np.array([image.shape[:2] for image in images]), self._vision)

    def image(self, size: tuple[int, ...]) -> list[int]:
        """Tokens of an image of this height and width."""
        assert self._vision is not None, "an image for a policy that does not see"
        return [self._vision.token] * int(self._vision.tokens(np.array(size))[0])


def encodable(text: str) -> str:
    """`text` with question marks for unpaired surrogates, which JSON may contain, and tokenizers do not take."""
    return text.encode("utf-8", "replace").decode()
