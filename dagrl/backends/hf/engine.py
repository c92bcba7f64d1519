"""A generator in the worker process, on a Hugging Face model, for small models and machines without a GPU.

Implements `dagrl.backends.base.GenerateEngine`; `decoding.py` decodes a batch and `weights.py` loads weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import batched

import numpy as np

from dagrl.backends.backend import RankContext
from dagrl.backends.base import NO_WEIGHTS, Completion, GenerationRequest, RequestLimits, SleepReport
from dagrl.backends.hf.decoding import decode
from dagrl.backends.hf.model import unset_model
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.hf.sleep import SleepingWeights
from dagrl.backends.hf.weights import replace_weights
from dagrl.backends.runtime.device_memory import device_gib_used
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.backends.runtime.stop_strings import StopStrings
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, SamplingSpec
from dagrl.model_files.end_tokens import end_tokens
from dagrl.model_files.images import image_settings
from dagrl.model_files.library_model import auto_class, load_hf_config, model_imports, published_tensors
from dagrl.model_files.tensor_names import check_names
from dagrl.model_files.tokenizer import load_tokenizer
from dagrl.weight_sync.manifest import Bucket


class HfEngine:
    """One replica: float32 on a CPU, bfloat16 on a GPU.

    With ``weights_from`` it has no weights before `load_weights`; otherwise it has the initial weights as version 0.
    """

    serializes_calls = True

    def __init__(self, model: ModelSpec, spec: HfEngineSpec, ranks: RankContext) -> None:
        """Build the model. Raises ValueError if its config, tokenizer or weights are missing or inconsistent."""
        used_by_others = device_gib_used()
        self._max_batch_size = spec.max_batch_size
        self._tokenizer = load_tokenizer(model)
        self._ends = sorted(end_tokens(model, self._tokenizer))
        with model_imports(model):
            config = load_hf_config(model)
            self._model = unset_model(auto_class(config), config)
        self._vision = image_settings(model)
        self._follows = spec.weights_from is not None
        self._weights = SleepingWeights(
            lambda: self._model.parameters(), keep=not self._follows, gib_used_by_others=used_by_others
        )
        self._turn = threading.Lock()
        """Held by the call that is decoding."""
        self._aborts = 0
        self.policy_version = NO_WEIGHTS
        self.sampled_tokens = 0
        if not self._follows:
            source, wanted = weight_source(model, ranks.seed), published_tensors(self._model).keys()
            check_names(source.names(), wanted, self._model.config)
            names = (name for name in source.names() if name in wanted)
            replace_weights(self._model, ((name, source.get(name)) for name in names))
            self.policy_version = 0

    def request_limits(self, longest: int) -> RequestLimits:
        """See `GenerateEngine.request_limits`: one batch, and another that waits."""
        return RequestLimits(self._max_batch_size, 2 * self._max_batch_size)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Sample one response per request, yielded as they finish; at most `max_batch_size` are decoded at once.

        Calls from several threads are serialized. Prompt, seed and weights determine the tokens, independent of the
        batch, up to rounding. ValueError for an empty prompt, or one too long for ``max_new_tokens``.
        """
        self._weights.refuse_asleep()
        assert self.policy_version != NO_WEIGHTS, "generate before the first load_weights"
        alike: dict[SamplingSpec, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(request.sampling or sampling, []).append(index)
        for own, indices in alike.items():
            self._check_lengths([requests[index].prompt for index in indices], own)
        return self._batches(requests, alike, self._aborts)

    def abort(self) -> None:
        self._aborts += 1

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights and set the version. ValueError if they do not fit; the old ones are kept then."""
        self._weights.refuse_asleep()
        replace_weights(self._model, (item for bucket in buckets for item in bucket))
        self.policy_version = version

    def sleep(self, residency: Residency) -> SleepReport:
        slept = self._weights.sleep(residency)
        if self._follows and self._weights.asleep:
            self.policy_version = NO_WEIGHTS
        return slept

    def wake(self, residency: Residency) -> None:
        self._weights.wake(residency)

    def close(self) -> None:
        del self._model

    def _batches(
        self, requests: Sequence[GenerationRequest], alike: Mapping[SamplingSpec, Sequence[int]], aborts: int
    ) -> Iterator[Completion]:
        """Decode requests with the same sampling, batch after batch, until an abort beyond the first `aborts`."""

        def goes_on(sampled: int) -> bool:
            self.sampled_tokens += sampled
            return self._aborts == aborts

        with self._turn:
            for sampling, indices in alike.items():
                stops = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._ends)]
                strings = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
                for chosen in batched(indices, self._max_batch_size):
                    version, vision = self.policy_version, self._vision
                    if not goes_on(0):
                        for index in chosen:
                            yield Completion(index, np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", version)
                        continue
                    batch = [requests[index] for index in chosen]
                    for completion in decode(self._model, batch, sampling, stops, version, goes_on, vision, strings):
                        yield replace(completion, index=chosen[completion.index])

    def _check_lengths(self, prompts: Sequence[np.ndarray], sampling: SamplingSpec) -> None:
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {index} is empty; a model needs at least one token")
        longest = max((len(prompt) for prompt in prompts), default=0)
        context = self._model.config.get_text_config().max_position_embeddings
        if longest + sampling.max_new_tokens > context:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens {sampling.max_new_tokens} do not fit into the "
                f"model's {context} positions; lower data.max_prompt_tokens or sampling.max_new_tokens"
            )
