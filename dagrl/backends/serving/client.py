"""The requests of `ServerEngine` to an inference server, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dagrl.backends.base import EngineLostError
from dagrl.config.schema import SamplingSpec

Images = Sequence[np.ndarray]
"""Images of a prompt, uint8 [height, width, 3], resized for the model."""
Until = Callable[[Sequence[int]], bool]
"""Receives the next tokens of a response, and returns whether it is complete."""
NO_TOKENS, NO_LOGPROBS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)


class ServerError(OSError):
    """A server did not start, has died, or does not answer."""


class ServerLostError(ServerError, EngineLostError):
    """A running server has died or stopped responding."""


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """Result of one request."""

    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    message: str
    """Reason of an abort."""
    tokens: np.ndarray
    """Int64 [tokens]."""
    logprobs: np.ndarray
    """Float32 [tokens]."""
    routed_experts: np.ndarray | None
    """Int16 [tokens of prompt and response - 1, layers, experts per token]."""


@dataclass(frozen=True, slots=True)
class ResponseScores:
    """Log-probs of given tokens, each given all previous ones. T tokens, k candidates."""

    tokens: np.ndarray
    """The tokens in the server's reply, int64 [T]."""
    logprobs: np.ndarray
    """Float32 [T]."""
    top_ids: np.ndarray
    """The likeliest tokens at each place, the likeliest first, int32 [T, k]."""
    top_logprobs: np.ndarray
    """Float32 [T, k]."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a server."""

    requests: int
    """Requests that run at the same time."""
    tokens: int
    """Tokens in its cache, or in all of its caches: with data-parallel attention each replica has one."""
    longest: int
    """Longest prompt with response in tokens that its cache can hold."""
    context: int
    """Longest prompt with response, in tokens, that the model supports."""
    vocabulary: int


class ServerClient(Protocol):
    """Requests to one server. All methods run on its event loop."""

    @property
    def heard(self) -> float:
        """Time of the server's last message, as in `time.time`; a generating server sends messages."""

    @property
    def shares_prompts(self) -> bool:
        """Whether requests share the cache of a common prompt."""

    def parameters(self, sampling: SamplingSpec, left: int, seed: int, begun: int, stops: Sequence[int]) -> Any:
        """Sampling parameters of a request for up to `left` tokens of a response that has `begun` tokens already.

        The random numbers of a `seed` must not repeat after these. `stops` end a response, too.
        """

    async def generate(
        self,
        rid: str,
        tokens: list[int],
        sampling: Any,
        cache_key: str,
        images: Images = (),
        until: Until | None = None,
    ) -> ServerResponse:
        """Continue after `tokens`, whose image tokens represent `images`; only cache entries with the same `cache_key`
        are reused.

        `until` gets the tokens as they arrive. Once it returns True, the request is aborted; further tokens may follow.
        """

    async def remember(self, rid: str, tokens: list[int], cache_key: str, images: Images = ()) -> None:
        """Fill the cache with `tokens` and `images` for requests with that `cache_key`. An abort ends it early."""

    async def score(
        self, rid: str, tokens: list[int], start: int, cache_key: str, top_k: int = 0
    ) -> ResponseScores | None:
        """Log-probs of ``tokens[start:]`` at temperature 1, by prefill; None if the request was aborted.

        `start` is at least 1. Only given tokens are returned.
        """

    def tokens_of(self, rid: str) -> int:
        """Tokens of a running request received so far."""

    def abort(self, rid: str) -> None:
        """Abort a request."""

    def abort_all(self) -> None:
        """Abort all requests."""

    async def pause(self) -> None:
        """Pause generation in place."""

    async def go_on(self) -> None:
        """End a pause."""

    async def update(self, payload: bytes, version: int, *, flush: bool) -> None:
        """Have each process that holds a part of the model receive weights; with `flush`, drop the cache before.

        `payload` is a `dagrl.weight_sync.receiver.Route` as JSON.
        """

    async def flush(self, timeout_s: float) -> None:
        """Drop the cache as soon as the server is idle."""

    async def release(self, kinds: Sequence[str]) -> None:
        """Release memory of these kinds on all GPUs; it is free when this returns."""

    async def resume(self, kinds: Sequence[str]) -> None:
        """Allocate released memory of these kinds again."""

    async def capacity(self) -> Capacity:
        """The server's capacity."""
