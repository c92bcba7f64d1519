"""A tiny model, an engine on it, and the same model as transformers alone would build it."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dagrl.backends.backend import RankContext
from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.hf.engine import HfEngine
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec, SamplingSpec, TokenizerSpec
from dagrl.model_files.library_model import load_hf_config

SEED = 11


@pytest.fixture
def model() -> ModelSpec:
    return model_spec()


@pytest.fixture
def tied_model() -> ModelSpec:
    return model_spec(tie_word_embeddings=True)


@pytest.fixture
def build_engine() -> Callable[..., HfEngine]:
    def build(model: ModelSpec, **fields: object) -> HfEngine:
        spec = HfEngineSpec(backend="hf", group="rollout", **fields)
        return HfEngine(model, spec, RankContext(0, 1, "127.0.0.1", 0, 10.0, SEED))

    return build


@pytest.fixture
def reference(model: ModelSpec) -> PreTrainedModel:
    source = weight_source(model, SEED)
    reference = AutoModelForCausalLM.from_config(load_hf_config(model), dtype=torch.float32).eval()
    reference.load_state_dict({name: source.get(name) for name in source.names()})
    return reference


@pytest.fixture
def complete() -> Callable[..., list[Completion]]:
    def complete(
        engine: HfEngine, prompts: Sequence[Sequence[int]], sampling: SamplingSpec, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Completions in the order of the prompts; seeds 0, 1, 2, ... where none are given."""
        requests = [
            GenerationRequest(np.array(prompt), seed)
            for prompt, seed in zip(prompts, seeds or range(len(prompts)), strict=True)
        ]
        done = list(engine.generate(requests, sampling))
        assert sorted(completion.index for completion in done) == list(range(len(prompts)))
        return sorted(done, key=lambda completion: completion.index)

    return complete


def model_spec(**fields: object) -> ModelSpec:
    init = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        # Wide enough that the next token depends visibly on those before it.
        "initializer_range": 0.4,
    }
    tokenizer = TokenizerSpec(kind="characters", alphabet="0123456789+=")
    return ModelSpec(init={**init, **fields}, tokenizer=tokenizer)
