"""A generator inside the worker's own process, on a Hugging Face model: small models, and machines without a GPU.

Implements `dagrl.engines.base.GenerateEngine`; `decoding.py` decodes a batch and `weights.py` takes new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dagrl.data.tokenizer import load_tokenizer
from dagrl.engines.base import Bucket, Completion, GenerationRequest, RankContext
from dagrl.engines.hf.decoding import decode
from dagrl.engines.hf.weights import replace_weights
from dagrl.engines.model_source import load_hf_config, weight_source
from dagrl.spec.schema import HfEngineSpec, ModelSpec, SamplingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_WEIGHTS = -1
"""Policy version of an engine that waits for its first weights."""


class HfEngine:
    """One replica of the model: float32 on a CPU, bfloat16 on a GPU.

    An engine that follows another holds nothing of use until `load_weights`; one that does not has the start weights,
    as version 0.
    """

    def __init__(self, model: ModelSpec, spec: HfEngineSpec, ranks: RankContext) -> None:
        """Build the model. ValueError where its config, tokenizer or weights are missing or do not fit together."""
        self._max_batch_size = spec.max_batch_size
        self._eos_token_id = load_tokenizer(model).eos_token_id
        self._model = _build(model)
        self.policy_version = NO_WEIGHTS
        if spec.follows is None:
            source = weight_source(model, ranks.seed)
            replace_weights(self._model, ((name, source.get(name)) for name in source.names()))
            self.policy_version = 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Sample one response to each request, yielded as they finish; at most `max_batch_size` are decoded at once.

        The same prompt, seed and weights draw the same tokens in any batch, up to the last bits of a float: only a draw
        that falls within rounding of the border between two tokens can differ. ValueError for an empty prompt, or one
        too long to be followed by ``max_new_tokens``.
        """
        assert self.policy_version != NO_WEIGHTS, "generate before the first load_weights"
        assert not any(len(request.begun) for request in requests), "this engine begins every response anew"
        prompts = [np.asarray(request.prompt, dtype=np.int64) for request in requests]
        self._check_lengths(prompts, sampling)
        return self._batches(prompts, [request.seed for request in requests], sampling)

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights, and with them the version.

        ValueError where a name is unknown, doubled or missing, or a shape differs; then both stay as they were.
        """
        replace_weights(self._model, (item for bucket in buckets for item in bucket))
        self.policy_version = version

    def close(self) -> None:
        """Free the model."""
        del self._model

    def _batches(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingSpec
    ) -> Iterator[Completion]:
        stops = [*sampling.stop_token_ids]
        if not sampling.ignore_eos and self._eos_token_id is not None:
            stops.append(self._eos_token_id)
        for start in range(0, len(prompts), self._max_batch_size):
            batch = slice(start, start + self._max_batch_size)
            for completion in decode(self._model, prompts[batch], seeds[batch], sampling, stops, self.policy_version):
                yield replace(completion, index=start + completion.index)

    def _check_lengths(self, prompts: Sequence[np.ndarray], sampling: SamplingSpec) -> None:
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {index} is empty; a model needs at least one token to go on from")
        longest = max((len(prompt) for prompt in prompts), default=0)
        context = self._model.config.max_position_embeddings
        if longest + sampling.max_new_tokens > context:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens {sampling.max_new_tokens} do not fit into the "
                f"model's {context} positions; lower data.max_prompt_tokens or sampling.max_new_tokens"
            )


def _build(model: ModelSpec) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    # Its own random weights are of no use, and drawing them must not move the process's random stream.
    with torch.random.fork_rng(), torch.device(device):
        built = AutoModelForCausalLM.from_config(load_hf_config(model), dtype=dtype)
    return built.eval().requires_grad_(False)
