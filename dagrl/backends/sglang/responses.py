"""The responses that a server is sampling: each a request of its own, some of them paused, retracted or aborted.

Everything here runs on the server's loop, but for `born`, which says which aborts a call is older than.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.sglang.client import NO_LOGPROBS, NO_TOKENS, Client
from dagrl.backends.sglang.server import ServerError
from dagrl.config.schema import SamplingSpec

_AGAIN_S = 0.5
"""How long requests have to end that were aborted, before they are told again."""
_WORTH_SHARING = 64
"""Tokens of a prompt from which on it pays to compute it once for a group, and to let the group wait for that."""


@dataclass(slots=True, eq=False)
class _Response:
    """One response under way."""

    index: int
    request: GenerationRequest
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    logprobs: np.ndarray = field(default_factory=lambda: NO_LOGPROBS)
    finish_reason: str = ""
    version: int | None = None
    routed_experts: np.ndarray | None = None
    prompt_is_there: asyncio.Event | None = None
    """To be waited for, where another request computes the prompt."""

    @property
    def context(self) -> np.ndarray:
        """All that it goes on behind, int64."""
        return np.concatenate([self.request.prompt, self.request.begun, self.tokens])


class ResponseReader:
    """Samples responses and lets others stop that for a while. `version` tells that of the weights."""

    def __init__(self, client: Client, version: Callable[[], int], stops: Sequence[int]) -> None:
        """`stops` are the tokens that end a response, beside those that the model's own config names."""
        self._client = client
        self._version = version
        self._stops = tuple(stops)
        self._names = itertools.count()
        self._under_way: set[str] = set()
        """Names of the requests in the server."""
        self._nothing_under_way = asyncio.Event()
        self._nothing_under_way.set()
        self._gate = asyncio.Event()
        self._gate.set()
        self._aborts = 0
        self._retracts = 0
        self._sampled = 0

    @property
    def born(self) -> int:
        """For a new call: later aborts are meant for it."""
        return self._aborts

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, in all calls."""
        return self._sampled + sum(map(self._client.tokens_of, tuple(self._under_way)))

    async def sample(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingSpec,
        born: int,
        deliver: Callable[[Completion], None],
    ) -> None:
        """Sample a response to each request; they are delivered as they end. The first failure ends all of them."""
        try:
            responses = [_Response(index, request) for index, request in enumerate(requests)]
            async with asyncio.TaskGroup() as group:
                for alike in _alike(responses) if self._client.shares_prompts else ():
                    there = asyncio.Event()
                    for response in alike:
                        response.prompt_is_there = there
                    group.create_task(self._compute_once(alike[0].context.tolist(), there, born))
                for response in responses:
                    group.create_task(self._respond(response, sampling, born, deliver))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def abort(self) -> None:
        """Let all responses end as they are, those too whose requests have not begun."""
        self._aborts += 1
        self._client.abort_all()

    async def stand_still(self, how: Literal["abort", "retract", "in_place"]) -> None:
        """Generate nothing until `go_on`. Nothing but ``in_place`` leaves requests in the server."""
        self._gate.clear()
        if how == "in_place":
            await self._client.pause()
            return
        if how == "abort":
            self._aborts += 1
        else:
            self._retracts += 1
        while self._under_way:
            # One that is on its way into the server meanwhile has not heard of it, and would go on to its end.
            self._client.abort_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nothing_under_way.wait(), _AGAIN_S)

    async def go_on(self, how: Literal["abort", "retract", "in_place"]) -> None:
        """Generate again; what was retracted begins behind its tokens, and fills its cache anew."""
        if how == "in_place":
            await self._client.go_on()
        self._gate.set()

    # -- one response

    async def _compute_once(self, tokens: list[int], there: asyncio.Event, born: int) -> None:
        """Have the server hold what several responses go on behind: asked together, each would compute it itself."""
        await self._gate.wait()
        try:
            if self._aborts == born:
                with self._request() as rid:
                    await self._client.remember(rid, tokens, cache_key=str(self._version()))
        finally:
            there.set()

    async def _respond(
        self, response: _Response, sampling: SamplingSpec, born: int, deliver: Callable[[Completion], None]
    ) -> None:
        if response.prompt_is_there is not None:
            await response.prompt_is_there.wait()
        while not response.finish_reason:
            await self._gate.wait()
            left = sampling.max_new_tokens - len(response.request.begun) - len(response.tokens)
            if self._aborts != born:
                response.finish_reason = "abort"
            elif left <= 0:
                response.finish_reason = "length"
            else:
                await self._go_on_with(response, self._parameters(sampling, left, response.request.seed), born)
        deliver(
            Completion(
                response.index,
                response.tokens,
                response.logprobs,
                response.finish_reason,
                self._version() if response.version is None else response.version,
                response.routed_experts,
            )
        )

    async def _go_on_with(self, response: _Response, parameters: dict[str, object], born: int) -> None:
        """One request of a response: to its end, or until somebody aborts or retracts it."""
        version, retracts = self._version(), self._retracts
        prompt = response.context.tolist()
        with self._request() as rid:
            # What is cached under other weights is not theirs.
            answer = await self._client.generate(rid, prompt, parameters, cache_key=str(version))
        self._sampled += len(answer.tokens)
        if len(answer.tokens) and response.version is None:
            response.version = version
        response.tokens = np.concatenate([response.tokens, answer.tokens])
        response.logprobs = np.concatenate([response.logprobs, answer.logprobs])
        if len(answer.tokens):
            # One that was aborted in the queue knows of none, and those of what was sampled before still hold.
            response.routed_experts = answer.routed_experts
        if answer.finish_reason != "abort" or self._aborts != born:
            response.finish_reason = answer.finish_reason
        elif self._retracts == retracts:
            raise ServerError(f"SGLang ended a response by itself: {answer.message}")

    @contextlib.contextmanager
    def _request(self) -> Iterator[str]:
        """The name of a request that is in the server within the context; a call that is given up takes it along."""
        # SGLang ends all whose names begin with the one that it is told: none may begin another.
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

    def _parameters(self, sampling: SamplingSpec, left: int, seed: int) -> dict[str, object]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": left,
            "stop_token_ids": [*sampling.stop_token_ids, *self._stops],
            "ignore_eos": sampling.ignore_eos,
            # Heeded with `enable_deterministic_inference`: then all would draw alike without it.
            "sampling_seed": seed % 2**63,
        }


def _alike(responses: Sequence[_Response]) -> list[list[_Response]]:
    """Those that go on behind the same tokens, several to each list, where it is worth to share them."""
    groups: dict[bytes, list[_Response]] = {}
    for response in responses:
        context = response.context
        if len(context) >= _WORTH_SHARING:
            groups.setdefault(context.tobytes(), []).append(response)
    return [group for group in groups.values() if len(group) > 1]
