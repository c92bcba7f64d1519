"""What dagrl asks of a server, in SGLang 0.5.17's words. A later version differs here, and in `server.py`.

All of it runs on the server's loop. Traps of this version that shape what is here:

- An update that flushes the cache kills the server where anything is still under way. So the cache is flushed by a
  request of its own, which waits until nothing is.
- Pausing by ``abort`` sleeps a second. So `responses.py` aborts, and knows itself when all have ended.
- Memory that is resumed twice kills the server, and so does memory that is released under a request. `engine.py` keeps
  the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dagrl.backends.sglang.args import WEIGHT_LOADER
from dagrl.backends.sglang.layout import kept_of_cache
from dagrl.backends.sglang.server import ServerError

NO_TOKENS, NO_LOGPROBS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
_FIRST = operator.itemgetter(0)
_FLUSH_S = 60.0
"""How long it may take until nothing is under way."""


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """What one request has come to."""

    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    message: str
    """Why it was aborted."""
    tokens: np.ndarray
    """Int64 [tokens]."""
    logprobs: np.ndarray
    """Float32 [tokens]."""
    routed_experts: np.ndarray | None
    """Int16 [tokens of the request and the answer - 1, layers, experts per token]."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a server has room for."""

    requests: int
    """That run at once."""
    tokens: int
    """That its cache holds, or its caches together: with attention by data each copy has one."""
    longest: int
    """Tokens of a prompt and its response. SGLang would cut the response of a longer one without a word."""

    @classmethod
    def of(cls, states: Sequence[Mapping[str, Any]]) -> Capacity:
        """As the schedulers tell of it, one for each cache."""
        caches = [state["memory_usage"]["token_capacity"] for state in states]
        # A decode context is spread over several caches.
        rooms = [
            cache * state["dcp_size"] - kept_of_cache(state["page_size"])
            for cache, state in zip(caches, states, strict=True)
        ]
        return cls(sum(state["effective_max_running_requests_per_dp"] for state in states), sum(caches), min(rooms))


class Client:
    """Requests to one server. `routing` is layers and experts per token, where it tells of routed experts."""

    def __init__(self, engine: Any, routing: tuple[int, int] | None) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._routing = routing

    # -- generation

    async def generate(self, rid: str, tokens: list[int], sampling: dict[str, Any], cache_key: str) -> ServerResponse:
        """Go on behind `tokens`; what is cached of them is used where it was made under the same `cache_key`."""
        from sglang.srt.managers.tokenizer_manager import RequestAbortedError

        try:
            answer = await self._asked(
                rid=rid,
                input_ids=tokens,
                sampling_params=sampling,
                return_logprob=True,
                logprob_start_len=-1,
                return_routed_experts=self._routing is not None,
                extra_key=cache_key,
            )
        except RequestAbortedError as error:
            return ServerResponse("abort", str(error), NO_TOKENS, NO_LOGPROBS, None)
        meta, sampled = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]
        # Each with its token and a text. One that was aborted in the queue has none, as it has no tokens.
        logprobs = meta.get("output_token_logprobs") or ()
        assert len(logprobs) == len(sampled), "a log-prob for each token"
        return ServerResponse(
            reason["type"],
            reason.get("message") or "",
            np.array(sampled, dtype=np.int64),
            np.fromiter(map(_FIRST, logprobs), np.float32, len(logprobs)),
            self._experts(meta),
        )

    @property
    def shares_prompts(self) -> bool:
        """Whether what one request has computed of its prompt is there for others."""
        arguments = self._engine.server_args
        # Copies within a server have a cache each, and requests go to them in turns.
        return arguments.dp_size == 1 and not arguments.disable_radix_cache

    async def remember(self, rid: str, tokens: list[int], cache_key: str) -> None:
        """Have the server's cache hold `tokens`, for requests with that `cache_key`. An abort ends it early."""
        from sglang.srt.managers.tokenizer_manager import RequestAbortedError

        with contextlib.suppress(RequestAbortedError):
            await self._asked(rid=rid, input_ids=tokens, sampling_params={"max_new_tokens": 0}, extra_key=cache_key)

    async def _asked(self, **request: Any) -> dict[str, Any]:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        try:
            # To the generator's end: one that is dropped takes a task to be closed, and holds SGLang's lock till then.
            (answer,) = [each async for each in self._manager.generate_request(GenerateReqInput(**request), None)]
        except HTTPException as error:
            raise ServerError(f"SGLang refused a request: {error.detail}") from error
        return answer

    def abort(self, rid: str) -> None:
        """End one request where it is, and all others whose names begin with its name."""
        self._manager.abort_request(rid=rid)

    def abort_all(self) -> None:
        """End all requests where they are."""
        self._manager.abort_request(abort_all=True)

    def tokens_of(self, rid: str) -> int:
        """Tokens of a request under way that have come in so far; they come some dozens at a time."""
        state = self._manager.rid_to_state.get(rid)
        return len(state.output_ids) if state is not None else 0

    def _experts(self, meta: dict[str, Any]) -> np.ndarray | None:
        if self._routing is None or not meta.get("routed_experts"):
            return None
        import pybase64

        layers, experts = self._routing
        raw = np.frombuffer(pybase64.b64decode(meta["routed_experts"]), dtype=np.int32)
        return raw.reshape(-1, layers, experts).astype(np.int16)

    # -- pauses

    async def pause(self) -> None:
        """Stand still with everything where it is."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))

    async def go_on(self) -> None:
        """End a pause."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def flush(self, timeout_s: float) -> None:
        """Forget all that is cached, once nothing is under way any more."""
        result = await self._manager.flush_cache(timeout_s=timeout_s)
        if not result.success:
            raise ServerError(f"SGLang could not flush its cache: {result.message or 'something is under way'}")

    # -- weights and memory

    async def update(self, payload: bytes, version: int, *, flush: bool) -> None:
        """Have our loader called in each process that holds a part of the model: (model, [(name, uint8 payload)]).

        With `flush`, all that is cached is forgotten before.
        """
        flushing = [self.flush(_FLUSH_S)] if flush else []
        # The server gets them in this order, without anybody waiting for the first one's answer.
        await asyncio.gather(*flushing, self._update(payload, str(version)))

    async def meet(self) -> None:
        """Wait until all processes have done what they were asked before.

        The first one's answer stands for all of them, and only at the end of an update do they wait for each other.
        """
        await self._update(b"", None)

    async def _update(self, payload: bytes, version: str | None) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        data = pickle.dumps([("payload", _Bytes(payload))], protocol=5)
        success, message = await self._manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[data] * self._engine.server_args.tp_size,
                load_format=WEIGHT_LOADER,
                flush_cache=False,
                weight_version=version,
            )
        )
        if not success:
            raise ServerError(f"SGLang could not take new weights: {message}")

    async def release(self, tags: Sequence[str]) -> None:
        """Give the memory of these kinds back, on all GPUs when this returns: others come to them."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)))
        arguments = self._engine.server_args
        # Copies within a server take no updates.
        if arguments.tp_size > 1 and (arguments.dp_size == 1 or arguments.enable_dp_attention):
            await self.meet()

    async def resume(self, tags: Sequence[str]) -> None:
        """Take memory of these kinds again, which was released."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)))

    async def capacity(self) -> Capacity:
        """What it has room for; told between two steps of generation."""
        return Capacity.of(await self._manager.get_internal_state())


class _Bytes:
    """Arrives as a tensor, uint8 [bytes], pickled with all bytes in it.

    SGLang's own way to send a tensor shares memory, which needs a live sender. Torch's pickles are others once the
    process has imported Megatron, and SGLang refuses those.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, (list(self._content),)
