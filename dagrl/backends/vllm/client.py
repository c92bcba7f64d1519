"""Requests to one vLLM engine, through its Python interface. All of it runs on the engine's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

import numpy as np

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
from dagrl.backends.vllm.adapters import adapter_request
from dagrl.config.schema import SamplingSpec
from dagrl.config.schema.engine import SentAdapter
from dagrl.model_files.images import ImageSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class Client:
    """Requests to `engine`.

    `keeps_weights`: whether a sleep must keep them. `adapter`: the adapters that arrive in their place. `vision` is set
    for a vision model.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        keeps_weights: bool,
        adapter: SentAdapter | None = None,
        vision: ImageSettings | None = None,
    ) -> None:
        self._vision = vision
        self._engine = engine
        self._adapter, self._request = adapter, adapter and adapter_request()
        self._keeps_weights = keeps_weights
        self._tokens: dict[str, int] = {}
        """Id of each running request -> tokens received so far."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self.heard = time.time()
        """Time of the engine's last message."""

    @property
    def _copies(self) -> int:
        """Copies of attention, which step together as long as any has requests."""
        return int(self._engine.vllm_config.parallel_config.data_parallel_size)

    @property
    def shares_prompts(self) -> bool:
        # Copies have separate caches.
        return self._copies == 1 and bool(self._engine.vllm_config.cache_config.enable_prefix_caching)

    def parameters(
        self, sampling: SamplingSpec, left: int, seed: int, begun: int, stops: Sequence[int]
    ) -> SamplingParams:
        """See `ServerClient.parameters`. Each request draws by its seed."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=left,
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else stops)],
            ignore_eos=sampling.ignore_eos,
            seed=_seed_after(begun, seed) % 2**63,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    async def generate(
        self,
        rid: str,
        tokens: list[int],
        sampling: SamplingParams,
        cache_key: str,
        images: Images = (),
        until: Until | None = None,
    ) -> ServerResponse:
        sampled: list[int] = []
        logprobs: list[float] = []
        reason, experts = "abort", None
        self._tokens[rid] = 0
        try:
            prompt = {"cache_salt": cache_key, **self._prompt(tokens, images)}
            async for output in self._engine.generate(prompt, sampling, rid, lora_request=self._request):
                self.heard = time.time()
                (part,) = output.outputs
                # All of them come with the last part.
                experts = part.routed_experts
                if part.token_ids:
                    sampled += part.token_ids
                    # One entry per token, because no others were asked for.
                    logprobs += part.logprobs.logprobs[-len(part.token_ids) :]
                self._tokens[rid] = len(sampled)
                if until is not None and until(part.token_ids):
                    until = None
                    self.abort(rid)
                reason = part.finish_reason or reason
        finally:
            self._tokens.pop(rid, None)
        if not sampled:
            return ServerResponse(reason, "", NO_TOKENS, NO_LOGPROBS, None)
        assert len(logprobs) == len(sampled), "a log-prob for each token"
        routed = None if experts is None else experts.astype(np.int16)
        return ServerResponse(reason, "", np.array(sampled, np.int64), np.array(logprobs, np.float32), routed)

    def _prompt(self, tokens: list[int], images: Images) -> dict[str, object]:
        """A prompt with one token for each image, which vLLM repeats, and images in a size that it keeps."""
        if not images:
            return {"prompt_token_ids": tokens}
        from PIL import Image

        assert self._vision is not None, "images for a model of text"
        sizes = [image.shape[0] * image.shape[1] for image in images]
        return {
            "prompt_token_ids": unexpanded(tokens, images, self._vision),
            "multi_modal_data": {"image": [Image.fromarray(image) for image in images]},
            "mm_processor_kwargs": {"min_pixels": min(sizes), "max_pixels": max(sizes)},
        }

    async def remember(self, rid: str, tokens: list[int], cache_key: str, images: Images = ()) -> None:
        """See `ServerClient.remember`. vLLM samples at least one token."""
        once = self.parameters(SamplingSpec(max_new_tokens=1, temperature=0.0), 1, 0, 0, ())
        await self.generate(rid, tokens, once, cache_key, images)

    async def score(
        self, rid: str, tokens: list[int], start: int, cache_key: str, top_k: int = 0
    ) -> ResponseScores | None:
        """See `ServerClient.score`. vLLM samples one token, which is not returned, and does not use its cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        once = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last: RequestOutput | None = None
        async for output in self._engine.generate({"prompt_token_ids": tokens, "cache_salt": cache_key}, once, rid):
            self.heard, last = time.time(), output
        if last is None or last.prompt_logprobs is None or last.outputs[0].finish_reason == "abort":
            return None
        # The first token has no log-prob; each other one has its own, and the likeliest tokens'.
        flat, columns = last.prompt_logprobs, top_k + 1
        ids = np.array(flat.token_ids, np.int64).reshape(-1, columns)[start - 1 :]
        values = np.array(flat.logprobs, np.float32).reshape(-1, columns)[start - 1 :]
        return ResponseScores(ids[:, 0], values[:, 0], ids[:, 1:].astype(np.int32), values[:, 1:])

    def tokens_of(self, rid: str) -> int:
        return self._tokens.get(rid, 0)

    def abort(self, rid: str) -> None:
        self._start(self._engine.abort(rid))

    def abort_all(self) -> None:
        if self._tokens:
            self._start(self._engine.abort(list(self._tokens)))

    def _start(self, coroutine: Coroutine[object, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- pauses, weights and memory

    async def pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        self._paused = True

    async def go_on(self) -> None:
        await self._engine.resume_generation()
        self._paused = False

    async def flush(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await self._engine.reset_prefix_cache():
                    await asyncio.sleep(0.01)
                return
        raise ServerError(f"vLLM could not flush its cache within {timeout_s:g} s: requests are running")

    async def update(self, payload: bytes, version: int, *, flush: bool) -> None:
        if flush:
            await self._engine.reset_prefix_cache()
        # A copy that receives weights and a copy that steps would wait for each other.
        pauses = self._copies > 1 and not self._paused
        if pauses:
            await self.pause()
        alpha = self._adapter and self._adapter.alpha
        await self._engine.collective_rpc("dagrl_update_weights", args=(payload.decode(), alpha))
        if self._vision is not None:
            # vLLM caches the tower's outputs, and would reuse them for later requests with the same images.
            await self._engine.reset_encoder_cache()
        if pauses:
            await self.go_on()
        self.heard = time.time()

    async def release(self, kinds: Sequence[str]) -> None:
        """See `ServerClient.release`. vLLM frees both kinds together; weights that must stay are restored at once."""
        both = "weights" in kinds
        await self._engine.sleep(level=2 if both and not self._keeps_weights else 1, mode="abort")
        self._paused = True
        if not both:
            await self._engine.wake_up(["weights"])

    async def resume(self, kinds: Sequence[str]) -> None:
        await self._engine.wake_up(sorted(kinds))
        if "kv_cache" in kinds:
            self._paused = False
            await self._engine.reset_prefix_cache()

    async def capacity(self) -> Capacity:
        config = self._engine.vllm_config
        cache, longest = config.cache_config, config.model_config.max_model_len
        # Blocks of all copies of attention.
        tokens = cache.num_gpu_blocks * cache.block_size
        requests = config.scheduler_config.max_num_seqs * self._copies
        vocabulary = config.model_config.get_vocab_size()
        return Capacity(requests, tokens, min(tokens // self._copies, longest), longest, vocabulary)


def unexpanded(tokens: Sequence[int], images: Images, settings: ImageSettings) -> list[int]:
    """Tokens in which the first image tokens, as many as `images` take, are one token for each image."""
    counts = iter([int(count) for image in images for count in settings.tokens(np.array(image.shape[:2]))])
    kept: list[int] = []
    left = 0
    for token in tokens:
        if token != settings.token:
            kept.append(token)
        elif left:
            left -= 1
        else:
            # Tokens of a response are kept.
            left = next(counts, 1) - 1
            kept.append(token)
    return kept


def _seed_after(begun: int, seed: int) -> int:
    """The seed of a request that continues a response: vLLM draws its random numbers anew for each request."""
    return int(np.random.SeedSequence([seed, begun]).generate_state(1, np.uint64)[0]) if begun else seed
