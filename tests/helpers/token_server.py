"""Answers of a server that scores given tokens over OpenAI's protocol, for the fixture ``chat_server``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TokenServer:
    """Has the log-prob -1 for the second token of a prompt, -2 for the next, and so on; none for the first."""

    def __init__(self, server: Any, texts: Callable[[list[int]], list[str]] | None = None) -> None:
        """`server`: a `ChatServer`. With `texts`, tokens are told by these, and without ids."""
        self.texts = texts
        self.lie: Callable[[list[float | None]], list[float | None]] = lambda values: values
        """What becomes of the log-probs of an answer."""
        server.completion = self._answer

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body["prompt"]
        values = self.lie([None, *(-float(place) for place in range(1, len(tokens)))])
        logprobs = {"token_logprobs": values, "tokens": self.texts(tokens) if self.texts else ["?"] * len(values)}
        return {"choices": [{"logprobs": logprobs, "prompt_token_ids": None if self.texts else tokens}]}
