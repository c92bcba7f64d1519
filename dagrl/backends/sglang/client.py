"""Requests to a server, through SGLang's Python interface; `versions.py` holds the differences between versions.

All of it runs on the server's event loop. Restrictions of SGLang:

- An update that flushes the cache kills the server while requests are running. So the cache is flushed by a separate
  request, which waits until it is idle.
- Pausing with ``abort`` sleeps a second. So `responses.py` aborts, and tracks when all requests have ended.
- Resuming memory twice, or releasing it during a request, kills the server. `engine.py` tracks the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dagrl.backends.runtime.vision import patches
from dagrl.backends.serving.client import (
    NO_LOGPROBS,
    NO_TOKENS,
    Capacity,
    Images,
    ResponseScores,
    ServerError,
    ServerResponse,
    Until,
)
from dagrl.backends.sglang.adapters import NAME, adapter_reference
from dagrl.backends.sglang.args import ADAPTER_LOADER, WEIGHT_LOADER
from dagrl.backends.sglang.layout import KEPT_BACK, kept_of_cache
from dagrl.backends.sglang.versions import aborted_error, weight_update
from dagrl.config.schema import SamplingSpec
from dagrl.config.schema.engine import SentAdapter
from dagrl.model_files.images import ImageSettings

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

_FIRST, _SECOND = operator.itemgetter(0), operator.itemgetter(1)
_LOOK_EVERY = 16
"""Number of tokens after which a response is searched for stop strings."""
_FLUSH_S = 60.0
"""Timeout until the server is idle."""


class Client:
    """Requests to one server.

    `routing` is the number of layers and experts per token if it reports routed experts. `adapter`: the adapters that
    arrive in place of weights. `vision` is set for a vision model.
    """

    def __init__(
        self,
        engine: Engine,
        routing: tuple[int, int] | None,
        adapter: SentAdapter | None = None,
        vision: ImageSettings | None = None,
    ) -> None:
        self._engine = engine
        self._vision = vision
        self._manager = engine.tokenizer_manager
        self._routing = routing
        self._adapter = adapter

    @property
    def heard(self) -> float:
        return float(self._manager.last_receive_tstamp)

    # -- generation

    def parameters(
        self, sampling: SamplingSpec, left: int, seed: int, begun: int, stops: Sequence[int]
    ) -> dict[str, object]:
        """See `ServerClient.parameters`. SGLang draws by the seed and a token's position."""
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": left,
            "stop_token_ids": [*sampling.stop_token_ids, *stops],
            "ignore_eos": sampling.ignore_eos,
            # Used with `enable_deterministic_inference`, where all would otherwise draw the same.
            "sampling_seed": seed % 2**63,
        }

    async def generate(
        self,
        rid: str,
        tokens: list[int],
        sampling: Mapping[str, Any],
        cache_key: str,
        images: Images = (),
        until: Until | None = None,
    ) -> ServerResponse:
        try:
            answer = await self._asked(
                until,
                rid=rid,
                input_ids=tokens,
                sampling_params=sampling if until is None else {**sampling, "stream_interval": _LOOK_EVERY},
                return_logprob=True,
                logprob_start_len=-1,
                return_routed_experts=self._routing is not None,
                extra_key=cache_key,
                image_data=self._image_data(images),
            )
        except aborted_error() as error:
            return ServerResponse("abort", str(error), NO_TOKENS, NO_LOGPROBS, None)
        meta, sampled = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]
        # SGLang looks for them only before the last token that it may sample.
        ends = sampled and sampled[-1] in sampling["stop_token_ids"] and not sampling["ignore_eos"]
        # One entry per token; missing for a request that was aborted in the queue.
        logprobs = meta.get("output_token_logprobs") or ()
        assert len(logprobs) == len(sampled), "a log-prob for each token"
        return ServerResponse(
            "stop" if ends and reason["type"] == "length" else reason["type"],
            reason.get("message") or "",
            np.array(sampled, dtype=np.int64),
            np.fromiter(map(_FIRST, logprobs), np.float32, len(logprobs)),
            self._experts(meta),
        )

    @property
    def shares_prompts(self) -> bool:
        arguments = self._engine.server_args
        # Data-parallel replicas have separate caches, and requests alternate between them.
        return arguments.dp_size == 1 and not arguments.disable_radix_cache

    async def remember(self, rid: str, tokens: list[int], cache_key: str, images: Images = ()) -> None:
        with contextlib.suppress(aborted_error()):
            await self._asked(
                None,
                rid=rid,
                input_ids=tokens,
                sampling_params={"max_new_tokens": 0},
                extra_key=cache_key,
                image_data=self._image_data(images),
            )

    async def score(
        self, rid: str, tokens: list[int], start: int, cache_key: str, top_k: int = 0
    ) -> ResponseScores | None:
        try:
            answer = await self._asked(
                None,
                rid=rid,
                input_ids=tokens,
                sampling_params={"max_new_tokens": 0},
                return_logprob=True,
                # SGLang has no log-prob of the first of these.
                logprob_start_len=start - 1,
                top_logprobs_num=top_k,
                # As arrays: lists of 64 candidates for each token take longer than the prefill.
                return_flat_raw_top_logprobs=top_k > 0,
                return_flat_raw_top_logprobs_b64=top_k > 0,
                extra_key=cache_key,
            )
        except aborted_error():
            return None
        meta = answer["meta_info"]
        if meta["finish_reason"] and meta["finish_reason"]["type"] == "abort":
            return None
        scored = meta["input_token_logprobs"][1:]
        named = np.fromiter(map(_SECOND, scored), np.int64, len(scored))
        if len(named) == len(tokens) - start:
            # SGLang writes id 0 for the vocabulary's last token, with the right log-prob.
            last = self._manager.model_config.vocab_size - 1
            named[(named == 0) & (np.array(tokens[start:]) == last)] = last
        return ResponseScores(
            named,
            np.fromiter(map(_FIRST, scored), np.float32, len(scored)),
            _candidates(meta, "idx", np.int32) if top_k else np.zeros((len(scored), 0), np.int32),
            _candidates(meta, "val", np.float32) if top_k else np.zeros((len(scored), 0), np.float32),
        )

    def _image_data(self, images: Images) -> list[dict[str, object]] | None:
        """Images in the form of SGLang's processor, so that SGLang keeps tokens and sizes."""
        if not images:
            return None
        assert self._vision is not None, "images for a model of text"
        pixels, grids = patches(images, self._vision, torch.device("cpu"), torch.float32)
        return [{"format": "processor_output", "pixel_values": pixels, "image_grid_thw": grids}]

    async def _asked(self, until: Until | None, rid: str, **request: object) -> dict[str, Any]:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        try:
            # The generator is exhausted, because closing an unfinished one takes a task, which holds SGLang's lock
            # until then.
            adapter = NAME if self._adapter is not None else None
            asked = GenerateReqInput(rid=rid, lora_path=adapter, stream=until is not None, **request)
            answer: dict[str, Any] = {}
            seen = 0
            async for answer in self._manager.generate_request(asked, None):
                # Parts of a response hold all tokens so far.
                if until is not None and until(answer["output_ids"][seen:]):
                    until = None
                    self.abort(rid)
                seen = len(answer["output_ids"]) if until is not None else 0
        except HTTPException as error:
            raise ServerError(f"SGLang rejected a request: {error.detail}") from error
        return answer

    def abort(self, rid: str) -> None:
        """Abort a request, and all others whose ids begin with `rid`."""
        self._manager.abort_request(rid=rid)

    def abort_all(self) -> None:
        self._manager.abort_request(abort_all=True)

    def tokens_of(self, rid: str) -> int:
        """Tokens of a running request received so far; they arrive dozens at a time."""
        state = self._manager.rid_to_state.get(rid)
        return len(state.output_ids) if state is not None else 0

    def _experts(self, meta: Mapping[str, Any]) -> np.ndarray | None:
        if self._routing is None or not meta.get("routed_experts"):
            return None
        import pybase64

        layers, experts = self._routing
        raw = np.frombuffer(pybase64.b64decode(meta["routed_experts"]), dtype=np.int32)
        return raw.reshape(-1, layers, experts).astype(np.int16)

    # -- pauses

    async def pause(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))

    async def go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def flush(self, timeout_s: float) -> None:
        result = await self._manager.flush_cache(timeout_s=timeout_s)
        if not result.success:
            raise ServerError(f"SGLang could not flush its cache: {result.message or 'requests are running'}")

    # -- weights and memory

    async def update(self, payload: bytes, version: int, *, flush: bool) -> None:
        """Call our loader in each process with a part of the model: (model, [(name, uint8 payload)]).

        With `flush`, the cache is dropped before.
        """
        flushing = [self.flush(_FLUSH_S)] if flush else []
        if self._adapter is not None:
            payload = f"{self._adapter.alpha}\n".encode() + payload
        loader = WEIGHT_LOADER if self._adapter is None else ADAPTER_LOADER
        # Both are sent at once; the server handles them in this order.
        await asyncio.gather(*flushing, self._update(payload, str(version), loader))
        registry = self._manager.lora_registry
        if self._adapter is not None and not registry.num_registered_loras:
            await registry.register(adapter_reference())

    async def meet(self) -> None:
        """Wait until all processes have handled earlier requests.

        SGLang returns the first process's answer, and processes synchronise only at the end of an update.
        """
        await self._update(b"", None)

    async def _update(self, payload: bytes, version: str | None, loader: str = WEIGHT_LOADER) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        data = pickle.dumps([("payload", _Bytes(payload))], protocol=5)
        async with weight_update(self._manager, changes_weights=loader == WEIGHT_LOADER and bool(payload)):
            success, message = await self._manager.update_weights_from_tensor(
                UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=[data] * self._engine.server_args.tp_size,
                    load_format=loader,
                    flush_cache=False,
                    weight_version=version,
                )
            )
        if not success:
            raise ServerError(f"SGLang could not load new weights: {message}")

    async def release(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)))
        arguments = self._engine.server_args
        # Data-parallel replicas do not support updates.
        if arguments.tp_size > 1 and (arguments.dp_size == 1 or arguments.enable_dp_attention):
            await self.meet()

    async def resume(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)))

    async def capacity(self) -> Capacity:
        """The server's capacity; answered between two steps of generation."""
        config = self._manager.model_config
        context, vocabulary = config.context_len - KEPT_BACK, config.vocab_size
        return capacity_of(await self._manager.get_internal_state(), context=context, vocabulary=vocabulary)


def capacity_of(states: Sequence[Mapping[str, Any]], *, context: int, vocabulary: int) -> Capacity:
    """From the schedulers' states, one for each cache."""
    caches = [state["memory_usage"]["token_capacity"] for state in states]
    # SGLang would silently cut a longer response. With decode context parallelism a context spans several caches.
    rooms = [
        cache * state["dcp_size"] - kept_of_cache(state["page_size"])
        for cache, state in zip(caches, states, strict=True)
    ]
    requests = sum(state["effective_max_running_requests_per_dp"] for state in states)
    return Capacity(requests, sum(caches), min(rooms), context, vocabulary)


def _candidates(meta: Mapping[str, Any], name: str, dtype: type[np.generic]) -> np.ndarray:
    """Ids, or log-probs, of the likeliest tokens: [tokens, candidates], without the first token's."""
    import pybase64

    raw = pybase64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"])
    # The first token, which has no log-prob, is already omitted or has a separate row.
    table = np.frombuffer(raw, dtype).reshape(meta["input_top_logprobs_shape"])
    return table[1 - meta["input_top_logprobs_null_prefix"] :]


class _Bytes:
    """Unpickles as a tensor, uint8 [bytes].

    SGLang's own transport of tensors shares memory, which needs the sender to stay alive. Torch's pickles change when
    the process has imported Megatron, and SGLang rejects those.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[object, ...]:
        return torch.ByteTensor, (list(self._content),)
