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
        choice = {"logprobs": logprobs, "prompt_token_ids": None if self.texts else tokens}
        if count := body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [
                None,
                *(likeliest(value, token, count) for value, token in zip(values[1:], tokens[1:], strict=False)),
            ]
        return {"choices": [choice]}


def likeliest(value: float | None, token: int, count: int) -> dict[str, dict[str, Any]]:
    """As vLLM: the place's own token first, then tokens 0, 1, ... with the log-probs -0.5, -1, ..."""
    others = {str(each): {"logprob": -0.5 * (each + 1), "rank": each + 1} for each in range(count)}
    return {str(token): {"logprob": value, "rank": 99}} | others
