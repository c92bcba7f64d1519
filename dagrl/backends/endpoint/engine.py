"""A generator whose responses a model behind an OpenAI endpoint writes.

Prompts and responses are the tokens of ``tokenizer: {kind: messages}``: bytes of UTF-8. Log-probs are not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from dagrl.backends.base import Completion, GenerationRequest, RequestLimits, SleepReport
from dagrl.backends.endpoint.section import EndpointEngineSpec
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, SamplingSpec
from dagrl.endpoint import Endpoint
from dagrl.model_files.tokenizer import load_tokenizer
from dagrl.weight_sync.manifest import Bucket


class EndpointEngine:
    """One client. Implements `dagrl.backends.base.GenerateEngine`."""

    serializes_calls = False
    policy_version = 0

    def __init__(self, spec: EndpointEngineSpec, model: ModelSpec) -> None:
        """Raises ValueError if the environment has no such key."""
        self._endpoint = Endpoint(
            spec.url, spec.model_name, api_key_env=spec.api_key_env, retries=spec.retries, timeout_s=spec.timeout_s
        )
        self._concurrency = spec.concurrency
        self._threads = ThreadPoolExecutor(spec.concurrency, "endpoint")
        self._tokenizer = load_tokenizer(model)
        self._aborts = 0
        self.sampled_tokens = 0

    def request_limits(self, longest: int) -> RequestLimits:
        return RequestLimits(1, self._concurrency)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Ask for each reply. Raises EndpointError if one does not come, after all retries.

        ``max_new_tokens`` are the model's own tokens, and a response has as many tokens as bytes.
        """
        aborts = self._aborts
        asked = {
            self._threads.submit(self._reply, request, request.sampling or sampling, aborts): index
            for index, request in enumerate(requests)
        }
        for reply in as_completed(asked):
            tokens, reason = reply.result()
            self.sampled_tokens += len(tokens)
            yield Completion(asked[reply], tokens, np.zeros(len(tokens), np.float32), reason, 0)

    def _reply(self, request: GenerationRequest, sampling: SamplingSpec, aborts: int) -> tuple[np.ndarray, str]:
        if self._aborts != aborts:
            return np.zeros(0, np.int64), "abort"
        if request.limit is not None:
            sampling = sampling.model_copy(update={"max_new_tokens": min(request.limit, sampling.max_new_tokens)})
        seed = {"seed": request.seed % 2**31} if sampling.temperature else {}
        reply = self._endpoint.ask(self._messages([*request.prompt, *request.begun]), sampling, seed)
        tokens = self._tokenizer.encode(reply.text, add_special_tokens=False)
        # A row has a token at least.
        ends = [] if reply.cut else [self._tokenizer.eos_token_id]
        return np.array([*tokens, *ends] or [self._tokenizer.eos_token_id], np.int64), "length" if reply.cut else "stop"

    def _messages(self, tokens: Sequence[int]) -> list[Mapping[str, Any]]:
        text = self._tokenizer.decode(tokens)
        try:
            messages = json.loads(text)
        except ValueError:  # a prompt of plain text, without the chat template
            messages = None
        return messages if isinstance(messages, list) else [{"role": "user", "content": text}]

    def abort(self) -> None:
        self._aborts += 1

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        raise ValueError("an endpoint takes no weights")

    def sleep(self, residency: Residency) -> SleepReport:
        return SleepReport(0.0, 0.0)

    def wake(self, residency: Residency) -> None:
        pass

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._endpoint.close()
