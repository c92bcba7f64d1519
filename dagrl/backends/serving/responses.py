"""The requests that a server is sampling, some of them paused, retracted or aborted.

Runs on the server's event loop, except `born`, which orders calls and aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.runtime.stop_strings import StopSearch, StopStrings
from dagrl.backends.serving.client import NO_LOGPROBS, NO_TOKENS, ServerClient, ServerError, ServerResponse
from dagrl.config.schema import SamplingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AGAIN_S = 0.5
"""Seconds after which requests are aborted again."""
_WORTH_SHARING = 64
"""Length of a prompt, in tokens, from which a group's prompt is computed once while the others wait."""


@dataclass(slots=True, eq=False)
class _Response:
    """A running response."""

    index: int
    request: GenerationRequest
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    logprobs: np.ndarray = field(default_factory=lambda: NO_LOGPROBS)
    finish_reason: str = ""
    version: int | None = None
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    routed_experts: np.ndarray | None = None
    prompt_is_there: asyncio.Event | None = None
    """Set when another request has computed the prompt."""

    @property
    def context(self) -> np.ndarray:
        """Tokens after which to continue, int64."""
        return np.concatenate([self.request.prompt, self.request.begun, self.tokens])

    @property
    def said(self) -> np.ndarray:
        """Tokens of the policy in its turn, int64."""
        return np.concatenate([self.request.begun[self.request.turn_start :], self.tokens])


class ResponseReader:
    """Samples responses, and can be paused. `version` returns the weights' version."""

    def __init__(
        self,
        client: ServerClient,
        version: Callable[[], int],
        tokenizer: PreTrainedTokenizerBase,
        ends: Iterable[int],
    ) -> None:
        """Each of the tokens `ends` ends a response."""
        self._client = client
        self._version = version
        self._stops = tuple(sorted(ends))
        self._stop_strings = lru_cache(maxsize=8)(lambda strings: StopStrings(tokenizer, strings))
        self._names = itertools.count()
        self._under_way: set[str] = set()
        """Ids of the requests in the server."""
        self._nothing_under_way = asyncio.Event()
        self._nothing_under_way.set()
        self._gate = asyncio.Event()
        self._gate.set()
        self._aborts = 0
        self._retracts = 0
        self._sampled = 0

    @property
    def born(self) -> int:
        """Stamp of a new call: only later aborts apply to it."""
        return self._aborts

    @property
    def sampled(self) -> int:
        """Tokens sampled so far in all calls."""
        return self._sampled + sum(map(self._client.tokens_of, tuple(self._under_way)))

    async def sample(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingSpec,
        born: int,
        deliver: Callable[[Completion], None],
    ) -> None:
        """Sample one response per request; they are delivered as they end. The first failure cancels all of them."""
        responses = [_Response(index, request) for index, request in enumerate(requests)]
        if len(responses) == 1:
            await self._respond(responses[0], sampling, born, deliver)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for alike in _alike(responses) if self._client.shares_prompts else ():
                    there = asyncio.Event()
                    for response in alike:
                        response.prompt_is_there = there
                    group.create_task(self._compute_once(alike[0], there, born))
                for response in responses:
                    group.create_task(self._respond(response, sampling, born, deliver))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def abort(self) -> None:
        """End all responses as they are, including ones whose requests have not started."""
        self._aborts += 1
        self._client.abort_all()

    async def stand_still(self, how: Literal["abort", "retract", "in_place"]) -> None:
        """Stop generating until `go_on`. Only ``in_place`` leaves requests in the server."""
        self._gate.clear()
        if how == "in_place":
            await self._client.pause()
            return
        if how == "abort":
            self._aborts += 1
        else:
            self._retracts += 1
        while self._under_way:
            # A request that was just being submitted has missed the abort, and would run to its end.
            self._client.abort_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nothing_under_way.wait(), _AGAIN_S)

    async def go_on(self, how: Literal["abort", "retract", "in_place"]) -> None:
        """Generate again; retracted responses continue after their tokens, and their cache is computed again."""
        if how == "in_place":
            await self._client.go_on()
        self._gate.set()

    # -- one response

    async def _compute_once(self, response: _Response, there: asyncio.Event, born: int) -> None:
        """Fill the server's cache with the common context of several responses, which each would otherwise compute."""
        tokens = response.context.tolist()
        await self._gate.wait()
        try:
            if self._aborts == born:
                with self._request() as rid:
                    await self._client.remember(rid, tokens, str(self._version()), response.request.images)
        finally:
            there.set()

    async def _respond(
        self, response: _Response, sampling: SamplingSpec, born: int, deliver: Callable[[Completion], None]
    ) -> None:
        if response.prompt_is_there is not None:
            await response.prompt_is_there.wait()
        while not response.finish_reason:
            await self._gate.wait()
            request = response.request
            sampling, begun = request.sampling or sampling, len(request.begun) + len(response.tokens)
            left = sampling.max_new_tokens - begun
            if request.limit is not None:
                left = min(left, request.limit - len(response.tokens))
            if self._aborts != born:
                response.finish_reason = "abort"
            elif left <= 0:
                response.finish_reason = "length"
            else:
                parameters = self._client.parameters(sampling, left, request.seed, begun, self._stops)
                search = StopSearch(self._stop_strings(sampling.stop), response.said) if sampling.stop else None
                await self._go_on_with(response, parameters, born, search)
        deliver(
            Completion(
                response.index,
                response.tokens,
                response.logprobs,
                response.finish_reason,
                self._version() if response.version is None else response.version,
                response.routed_experts,
                response.versions,
            )
        )

    async def _go_on_with(self, response: _Response, parameters: object, born: int, search: StopSearch | None) -> None:
        """Run one request of a response until it ends, or is aborted or retracted."""
        version, retracts = self._version(), self._retracts
        prompt = response.context.tolist()
        with self._request() as rid:
            # The version is the cache key, so that a cache of other weights is not used.
            until = search.see if search else None
            answer = await self._client.generate(rid, prompt, parameters, str(version), response.request.images, until)
        self._sampled += len(answer.tokens)
        if search is not None and search.length is not None:
            answer = _stopped(answer, len(prompt), search.length)
        if len(answer.tokens) and response.version is None:
            response.version = version
        # Weights that were updated in place have sampled the last tokens; their number is not known.
        response.versions = np.append(response.versions, np.full(len(answer.tokens), version, dtype=np.int32))
        response.tokens = np.concatenate([response.tokens, answer.tokens])
        response.logprobs = np.concatenate([response.logprobs, answer.logprobs])
        if len(answer.tokens):
            # A request aborted in the queue reports no routes; routes of earlier tokens stay valid.
            response.routed_experts = answer.routed_experts
        if answer.finish_reason != "abort" or self._aborts != born:
            response.finish_reason = answer.finish_reason
        elif self._retracts == retracts:
            raise ServerError(f"the server aborted a response: {answer.message}")

    @contextlib.contextmanager
    def _request(self) -> Iterator[str]:
        """Context with the id of a request in the server, which is aborted if the call is cancelled."""
        # A server may abort all ids that begin with the given one, so none may be a prefix of another.
        rid = f"dagrl-{next(self._names)}."
        self._under_way.add(rid)
        self._nothing_under_way.clear()
        try:
            yield rid
        except asyncio.CancelledError:
            self._client.abort(rid)
            raise
        finally:
            self._under_way.discard(rid)
            if not self._under_way:
                self._nothing_under_way.set()


def _stopped(answer: ServerResponse, prompt: int, length: int) -> ServerResponse:
    """The first `length` tokens of a response to `prompt` tokens, which a stop string ends."""
    routes = answer.routed_experts
    return replace(
        answer,
        finish_reason="stop",
        tokens=answer.tokens[:length],
        logprobs=answer.logprobs[:length],
        routed_experts=None if routes is None else routes[: prompt + length - 1],
    )


def _alike(responses: Sequence[_Response]) -> list[list[_Response]]:
    """Group responses with the same context, if sharing it is worthwhile."""
    groups: dict[Hashable, list[_Response]] = {}
    for response in responses:
        if len(response.context) >= _WORTH_SHARING:
            groups.setdefault(response.request.context_key, []).append(response)
    return [group for group in groups.values() if len(group) > 1]
