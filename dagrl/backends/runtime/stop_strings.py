"""Finds the token with which a response has written a stop string.

Servers get token ids only, and have no tokenizer, so that engines look for the strings themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SILENT_TOKENS = 4
"""Most tokens without text among the tokens of a stop string."""


class StopStrings:
    """Strings that end a response. Thread-safe if the tokenizer is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        # A token has at least one byte.
        self._window = max((len(string.encode()) for string in strings), default=0) + _SILENT_TOKENS
        self._lasts = {string[-1] for string in strings}
        # Tokenizers drop space at the beginning of a text.
        self._any_may_end = any(last.isspace() for last in self._lasts)
        self._may_end: dict[int, bool] = {}

    def end_with(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` completes a string."""
        return self._may_complete(tokens[-1]) and any(
            string in text for text in [self._tokenizer.decode(tokens[-self._window :])] for string in self._strings
        )

    def _may_complete(self, token: int) -> bool:
        """Whether a token may have the last character of a string, or a part of it."""
        if token not in self._may_end:
            text = self._tokenizer.decode([token])
            self._may_end[token] = self._any_may_end or "\ufffd" in text or any(last in text for last in self._lasts)
        return self._may_end[token]


class StopSearch:
    """Looks for stop strings in one response, as its tokens arrive."""

    def __init__(self, strings: StopStrings, before: Iterable[int]) -> None:
        """`before` are earlier tokens of the policy, without a stop string."""
        self._strings, self._tokens = strings, [int(token) for token in before]
        self._before = len(self._tokens)
        self.length: int | None = None
        """Number of tokens up to the one that completes a string, without `before`; None until then."""

    def see(self, tokens: Iterable[int]) -> bool:
        """Take the next tokens; returns whether a string is complete."""
        for token in tokens:
            if self.length is not None:
                break
            self._tokens.append(int(token))
            if self._strings.end_with(self._tokens):
                self.length = len(self._tokens) - self._before
        return self.length is not None
