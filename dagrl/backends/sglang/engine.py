"""A generator on a SGLang server, held by the worker on the server's first slot.

Implements `dagrl.backends.base.GenerateEngine`. `server.py` has the processes, `responses.py` the running requests.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from dagrl.backends.backend import RankContext
from dagrl.backends.base import NO_WEIGHTS, Completion, GenerationRequest, RequestLimits, SleepReport
from dagrl.backends.model_source import load_hf_config
from dagrl.backends.sglang.client import Client
from dagrl.backends.sglang.gpu_memory import gpu_memory
from dagrl.backends.sglang.layout import KEPT_BACK, gpus_per_server
from dagrl.backends.sglang.responses import ResponseReader
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.server import ServerLostError
from dagrl.backends.sglang.share import ServerShare
from dagrl.backends.sglang.start import start_server
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, SamplingSpec
from dagrl.data.tokenizer import load_tokenizer
from dagrl.weight_sync.channel import PeerError
from dagrl.weight_sync.exporter import BucketExporter
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.protocol import refuse_unknown_names
from dagrl.weight_sync.receiver import Route
from dagrl.weight_sync.sender import WeightSender

_POLL_S = 5.0
_KINDS = {
    Residency.AWAKE: frozenset[str](),
    Residency.WEIGHTS: frozenset({"kv_cache", "cuda_graph"}),
    Residency.ASLEEP: frozenset({"kv_cache", "cuda_graph", "weights"}),
}
"""Kinds of memory, by SGLang's names, that are released at each residency."""


class SglangEngine:
    """One server: float32 on a CPU, bfloat16 on GPUs, unless the pipeline sets another dtype.

    With ``weights_from`` it has no weights before the first update; otherwise it has the initial weights as version 0.
    """

    serializes_calls = False

    def __init__(
        self, model: ModelSpec, spec: SglangEngineSpec, ranks: RankContext, share: ServerShare, *, sleeps: bool
    ) -> None:
        """Start the server. Raises ValueError for an invalid model or argument, ServerError if it fails to start."""
        self.pause = spec.weight_sync.pause
        """Treatment of running requests in an update."""
        self._passes = 2 if spec.weight_sync.checksum else 1
        # Pipeline stages are updated one after the other.
        stages = spec.server.get("pp_size", 1)
        self._waves = [gpus_per_server(spec.server) // stages] * stages
        self._follows = spec.weights_from is not None
        self._timeout_s = ranks.timeout_s
        self._gpus = share.gpus
        self._gone: frozenset[str] = _KINDS[Residency.AWAKE]
        """Kinds of memory that are released."""
        self.policy_version = NO_WEIGHTS if spec.weights_from else 0
        eos = load_tokenizer(model).eos_token_id
        routing = _routing(model) if spec.server.get("enable_return_routed_experts") else None
        self._server = start_server(model, spec, share, seed=ranks.seed, sleeps=sleeps)
        self._client = client = Client(self._server.engine, routing)
        self._capacity = self._server.run(client.capacity(), "tell what it can hold", self._timeout_s)
        self._responses = ResponseReader(client, lambda: self.policy_version, [] if eos is None else [eos])

    # -- generation

    @property
    def sampled_tokens(self) -> int:
        return self._responses.sampled

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Sample one response per request, yielded as they finish. Calls from several threads share the server.

        Raises ValueError for an empty prompt, or one too long for ``max_new_tokens``; ServerError if the server fails
        or is silent for the timeout of collectives.
        """
        assert self.policy_version != NO_WEIGHTS, "generate before the first weights"
        assert not self._gone, "generate while asleep"
        self._check(requests, sampling)
        return self._completions(requests, sampling, self._responses.born)

    def abort(self) -> None:
        self._server.run(_called(self._responses.abort), "abort", self._timeout_s)

    def _completions(
        self, requests: Sequence[GenerationRequest], sampling: SamplingSpec, born: int
    ) -> Iterator[Completion]:
        finished: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        sampled = self._server.submit(self._responses.sample(requests, sampling, born, finished.put))
        sampled.add_done_callback(lambda _: finished.put(None))
        try:
            while (completion := self._next(finished)) is not None:
                yield completion
            sampled.result()
        finally:
            sampled.cancel()

    def _next(self, finished: queue.SimpleQueue[Completion | None]) -> Completion | None:
        begun = time.time()
        while True:
            try:
                return finished.get(timeout=_POLL_S)
            except queue.Empty:
                if self._server.silent_s(begun) > self._timeout_s:
                    raise ServerLostError(f"SGLang has not responded for {self._timeout_s:g} s") from None

    def _check(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> None:
        """Raise ValueError for requests that SGLang would reject without a reason, or die of."""
        config = self._server.engine.tokenizer_manager.model_config
        for index, request in enumerate(requests):
            if not len(request.prompt):
                raise ValueError(f"prompt {index} is empty; a model needs at least one token")
            for tokens in (request.prompt, request.begun):
                if len(tokens) and not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
                    raise ValueError(
                        f"prompt {index} has tokens that the model does not know: they are from {tokens.min()} to "
                        f"{tokens.max()}, and its vocabulary has {config.vocab_size}; is the tokenizer the model's?"
                    )
        longest = max((len(request.prompt) for request in requests), default=0)
        context = config.context_len - KEPT_BACK
        if longest + sampling.max_new_tokens > context:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens {sampling.max_new_tokens} do not fit into the "
                f"server's context of {context}; lower data.max_prompt_tokens or sampling.max_new_tokens"
            )
        self._check_room(longest + sampling.max_new_tokens)

    def _check_room(self, longest: int) -> None:
        if longest > self._capacity.longest:
            raise ValueError(
                f"a sample of up to {longest} tokens does not fit into the server's cache, which holds "
                f"{self._capacity.tokens} and takes one of {self._capacity.longest}; raise mem_fraction_static or "
                "max_total_tokens, use more GPUs per server (tp_size), or lower data.max_prompt_tokens or "
                "sampling.max_new_tokens"
            )

    # -- weights

    def update_weights(self, route: Route, version: int) -> None:
        """See `GenerateEngine.update_weights`. ServerError if the server fails. Generation pauses as in `pause`."""
        self._server.run(self._update(route, version), "take weights", self._timeout_s)

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """See `GenerateEngine.load_weights`, with shared host memory to the server's processes.

        Raises ServerError if the server fails. After an error the engine must not be used.
        """
        with closing(
            WeightSender(BucketExporter(list(buckets)), "cuda_ipc", host="", timeout_s=self._timeout_s)
        ) as sender:
            offer = sender.offer()
            assert offer is not None, "a sender that is near has an address"
            update = self._server.submit(self._update(Route(version, {"": offer.address}, self._timeout_s), version))
            # Receivers of a dead server never connect.
            update.add_done_callback(lambda ended: sender.close() if ended.cancelled() or ended.exception() else None)
            try:
                refuse_unknown_names([sender.send(version, self._waves, passes=self._passes)])
            except PeerError as error:
                self._server.check()
                raise ServerLostError(str(error)) from error
            except ValueError:
                update.result(self._timeout_s)
                self.policy_version = NO_WEIGHTS
                raise
            update.result(self._timeout_s)

    async def _update(self, route: Route, version: int) -> None:
        """Update weights while generation is paused, on the server's event loop."""
        how = self.pause
        await self._responses.stand_still(how)
        try:
            flush = how != "in_place" and not self._gone
            await self._client.update(route.to_json().encode(), version, flush=flush)
            self.policy_version = version
        finally:
            await self._responses.go_on(how)

    # -- sleep and close

    def request_limits(self, longest: int) -> RequestLimits:
        """See `GenerateEngine.request_limits`: as many as fit in the cache at half their longest length.

        Raises ValueError if the cache cannot hold one request of the longest length.
        """
        self._check_room(longest)
        running = max(1, min(self._capacity.requests, self._capacity.tokens // max(1, longest // 2)))
        return RequestLimits(chunk=max(1, running // 4), max_inflight=running + -(-running // 4))

    def sleep(self, residency: Residency) -> SleepReport:
        """See `GenerateEngine.sleep`. Without a GPU no memory is released."""
        before = gpu_memory(self._gpus[:1])
        going = _KINDS[residency] - self._gone
        if going and self._gpus:
            if "kv_cache" in going:
                # Releasing memory during a request would kill the server.
                self._server.run(self._client.flush(self._timeout_s), "be idle", self._timeout_s)
            self._server.run(self._client.release(sorted(going)), "give memory back", self._timeout_s)
        self._gone |= going
        if "weights" in going and self._follows:
            self.policy_version = NO_WEIGHTS
        held = before[0].used_gib if before else 0.0
        after = gpu_memory(self._gpus[:1])
        return SleepReport(held - after[0].used_gib if after else 0.0, held)

    def wake(self, residency: Residency) -> None:
        coming = self._gone - _KINDS[residency]
        if coming and self._gpus:
            self._server.run(self._client.resume(sorted(coming)), "take memory again", self._timeout_s)
        self._gone -= coming

    def close(self) -> None:
        """Stop the server and all its processes."""
        self._server.close()


def _routing(model: ModelSpec) -> tuple[int, int]:
    """Number of layers, and of experts per token."""
    config = load_hf_config(model)
    return config.num_hidden_layers, config.num_experts_per_tok


async def _called(function: Callable[[], None]) -> None:
    function()
