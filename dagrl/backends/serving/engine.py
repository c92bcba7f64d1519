"""A generator on an inference server, held by the worker on the server's first slot.

Implements `dagrl.backends.base.GenerateEngine`. `responses.py` has the running requests; a backend has the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any, ClassVar

from dagrl.backends.base import NO_WEIGHTS, Completion, GenerationRequest, RequestLimits, SleepReport, TokenOutputs
from dagrl.backends.serving.client import ResponseScores, ServerClient, ServerLostError
from dagrl.backends.serving.gpu_memory import gpu_memory
from dagrl.backends.serving.responses import ResponseReader
from dagrl.backends.serving.running_server import RunningServer
from dagrl.backends.serving.scoring import Row, TokenScorer, topk_columns
from dagrl.backends.serving.section import ServerSpec
from dagrl.backends.serving.share import ServerShare
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, SamplingSpec
from dagrl.data.batch import Batch, Column
from dagrl.model_files.end_tokens import end_tokens
from dagrl.model_files.tokenizer import load_tokenizer
from dagrl.weight_sync.channel import PeerError
from dagrl.weight_sync.exporter import BucketExporter
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.protocol import refuse_unknown_names
from dagrl.weight_sync.receiver import Route
from dagrl.weight_sync.sender import WeightSender

_POLL_S = 5.0
_NO_SAMPLING = SamplingSpec(max_new_tokens=1)


class ServerEngine[Spec: ServerSpec](ABC):
    """One server: float32 on a CPU, bfloat16 on GPUs, unless the pipeline sets another dtype.

    With ``weights_from`` it has no weights before the first update; otherwise it has the initial weights as version 0.
    """

    serializes_calls = False
    kinds: ClassVar[Mapping[Residency, frozenset[str]]]
    """Kinds of memory, by the server's names, that are released at each residency."""
    more_room: ClassVar[str]
    """Advice on enlarging its cache, for messages."""

    def __init__(self, model: ModelSpec, spec: Spec, share: ServerShare) -> None:
        """Start the server. Raises ValueError for an invalid model or argument, ServerError if it fails to start."""
        tokenizer = load_tokenizer(model)
        self.pause = spec.weight_sync.pause
        """Treatment of running requests in an update."""
        self._passes = 2 if spec.weight_sync.checksum else 1
        self._waves = [spec.gpus_per_server // spec.stages] * spec.stages
        """Waves of processes that receive an update together."""
        self._follows = spec.weights_from is not None
        self._timeout_s = share.ranks.timeout_s
        self._gpus = share.gpus
        self._kept_back = spec.scored_tokens_kept_back
        self._gone: frozenset[str] = self.kinds[Residency.AWAKE]
        """Kinds of memory that are released."""
        self.policy_version = NO_WEIGHTS if spec.weights_from else 0
        self._server, self._client = self._start(model, spec, share)
        self._capacity = self._server.run(self._client.capacity(), "report its capacity", self._timeout_s)
        ends = end_tokens(model, tokenizer)
        self._scorer = TokenScorer(self._client, lambda: self.policy_version, self._capacity.requests)
        self._responses = ResponseReader(self._client, lambda: self.policy_version, tokenizer, ends)

    @abstractmethod
    def _start(self, model: ModelSpec, spec: Spec, share: ServerShare) -> tuple[RunningServer, ServerClient]:
        """Start the server, and connect to it."""

    # -- generation

    @property
    def sampled_tokens(self) -> int:
        return self._responses.sampled

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Sample one response per request, yielded as they finish. Calls from several threads share the server.

        Raises ValueError for an empty prompt, or one too long for ``max_new_tokens``; ServerError if the server fails
        or is silent for the timeout of collectives.
        """
        self._check(requests, sampling)
        return self._completions(requests, sampling, self._responses.born)

    def start_generating(
        self, requests: Sequence[GenerationRequest], sampling: SamplingSpec, deliver: Callable[[Completion], None]
    ) -> Future[None]:
        """See `StartsGenerating`. Raises ValueError as `generate` does."""
        self._check(requests, sampling)
        sample = partial(self._responses.sample, requests, sampling, self._responses.born, deliver)
        return self._server.submit(self._watched(sample))

    def abort(self) -> None:
        self._server.run(_called(self._responses.abort), "abort", self._timeout_s)

    def _completions(
        self, requests: Sequence[GenerationRequest], sampling: SamplingSpec, born: int
    ) -> Iterator[Completion]:
        finished: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        begun = time.time()
        sample = partial(self._responses.sample, requests, sampling, born, finished.put)
        sampled = self._server.submit(self._watched(sample))
        sampled.add_done_callback(lambda _: finished.put(None))
        try:
            while (completion := self._wait(finished.get, begun)) is not None:
                yield completion
            sampled.result()
        finally:
            sampled.cancel()

    # -- log-probs of given tokens

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        """See `ScoresTokens.logprobs`. All rows are in the server together, up to the requests that it runs at a time.

        Raises ValueError for rows that the server would reject, and as `generate` does.
        """
        outputs = self.token_outputs(
            batch, TokenOutputs(), temperature=temperature, tokens_per_micro_batch=tokens_per_micro_batch
        )
        return outputs["logprob"]

    def token_outputs(
        self, batch: Batch, outputs: TokenOutputs, *, temperature: float, tokens_per_micro_batch: int
    ) -> dict[str, Column]:
        assert temperature == 1.0 and "temperature" not in batch, "validation refuses other temperatures"
        assert outputs == TokenOutputs(top_k=outputs.top_k), "validation refuses other outputs"
        rows = [(batch["prompt_tokens"][row], batch["response_tokens"][row]) for row in range(len(batch))]
        scored = self._scored(rows, min(outputs.top_k, self._capacity.vocabulary))
        columns = {"logprob": Column.ragged([scores.logprobs for scores in scored], "float32")}
        if not outputs.top_k:
            return columns
        ids, logprobs = [scores.top_ids for scores in scored], [scores.top_logprobs for scores in scored]
        return columns | topk_columns(ids, logprobs, outputs.top_k)

    def _scored(self, rows: Sequence[Row], top_k: int = 0) -> list[ResponseScores]:
        self._check([GenerationRequest(prompt, 0, response) for prompt, response in rows], _NO_SAMPLING)
        longest = max((len(prompt) + len(response) for prompt, response in rows), default=0)
        room = min(self._capacity.context, self._capacity.longest) - self._kept_back
        if longest > room:
            raise ValueError(
                f"a prompt with its response has {longest} tokens, and the server has room for {room}; {self.more_room}"
                ", choose a teacher with a longer context, or lower data.max_prompt_tokens or sampling.max_new_tokens"
            )
        begun = time.time()
        scoring = self._server.submit(self._watched(partial(self._scorer.score, rows, top_k)))
        try:
            return self._wait(scoring.result, begun)
        finally:
            scoring.cancel()

    # -- waits and checks

    async def _watched[Result](self, request: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a request. ServerLostError if the server is silent for the timeout."""
        begun = time.time()
        # Created here, not by the caller, because a dead server closes this coroutine before its first line.
        running = asyncio.ensure_future(request())
        try:
            while not (await asyncio.wait([running], timeout=_POLL_S))[0]:
                self._check_silence(begun)
            return await running
        finally:
            running.cancel()

    def _wait[Result](self, get: Callable[..., Result], begun: float) -> Result:
        """Call ``get(timeout=...)`` until it returns. ServerLostError if the server is silent for the timeout."""
        while True:
            with contextlib.suppress(TimeoutError, queue.Empty):
                return get(timeout=_POLL_S)
            # The server's loop checks this too, unless it is blocked itself.
            self._check_silence(begun)

    def _check_silence(self, begun: float) -> None:
        """Raise ServerLostError if requests that started at `begun` have received nothing for the timeout."""
        if time.time() - max(begun, self._client.heard) > self._timeout_s:
            raise ServerLostError(f"the server has not responded for {self._timeout_s:g} s")

    def _check(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> None:
        """Raise ValueError for requests that a server would reject without a reason, or that would end it."""
        assert self.policy_version != NO_WEIGHTS, "generate before the first weights"
        assert not self._gone, "generate while asleep"
        vocabulary, context = self._capacity.vocabulary, self._capacity.context
        for index, request in enumerate(requests):
            if not len(request.prompt):
                raise ValueError(f"prompt {index} is empty; a model needs at least one token")
            for tokens in (request.prompt, request.begun):
                if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
                    raise ValueError(
                        f"prompt {index} has tokens that the model does not know: they are from {tokens.min()} to "
                        f"{tokens.max()}, and its vocabulary has {vocabulary}; is the tokenizer the model's?"
                    )
        lengths = [(len(request.prompt), (request.sampling or sampling).max_new_tokens) for request in requests]
        prompt, response = max(lengths, key=sum, default=(0, 0))
        if prompt + response > context:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_new_tokens {response} do not fit into the server's context of "
                f"{context}; lower data.max_prompt_tokens or sampling.max_new_tokens"
            )
        self._check_room(prompt + response)

    def _check_room(self, longest: int) -> None:
        if longest > self._capacity.longest:
            raise ValueError(
                f"a sample of up to {longest} tokens does not fit into the server's cache, which holds "
                f"{self._capacity.tokens} and takes one of {self._capacity.longest}; {self.more_room}, or lower "
                "data.max_prompt_tokens or sampling.max_new_tokens"
            )

    # -- weights

    def update_weights(self, route: Route, version: int) -> None:
        """See `ReceivesWeights.update_weights`. ServerError if the server fails. Generation pauses as in `pause`."""
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
        going = self.kinds[residency] - self._gone
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
        coming = self._gone - self.kinds[residency]
        if coming and self._gpus:
            self._server.run(self._client.resume(sorted(coming)), "take memory again", self._timeout_s)
        self._gone -= coming

    def close(self) -> None:
        self._server.close()


async def _called(function: Callable[[], None]) -> None:
    function()
