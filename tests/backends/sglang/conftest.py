"""A real SGLang server on the CPU, one for all tests: it takes half a minute to start, and three GiB."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dagrl.backends.backend import RankContext
from dagrl.backends.base import GenerationRequest
from dagrl.backends.hf.weights import replace_weights
from dagrl.backends.model_source import load_hf_config, weight_source
from dagrl.backends.sglang.engine import SglangEngine
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.share import ServerShare
from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.weight_sync.exporter import IteratedExporter
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.sender import TransportName, WeightSender

MODEL = ModelSpec(
    init={
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        # Far from uniform, so that each token has its own log-prob.
        "initializer_range": 0.3,
    },
    tokenizer=TokenizerSpec(kind="characters", alphabet="0123456789+="),
)
RANKS = RankContext(rank=0, world_size=1, master_addr="127.0.0.1", master_port=0, timeout_s=60, seed=5)


StartEngine = Callable[..., SglangEngine]


@pytest.fixture(scope="session")
def start_engine() -> StartEngine:
    """Starts an engine on a server on the CPU, with these fields of ServerArgs, that prints into `logs`."""

    def start(logs: Path, start_timeout_s: float = 200.0, **server: object) -> SglangEngine:
        spec = SglangEngineSpec(backend="sglang", group="rollout", server=server)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        share = ServerShare("generator/0", 0, 0, 1, (), "127.0.0.1", port, logs, start_timeout_s)
        return SglangEngine(MODEL, spec, RANKS, share, sleeps=True)

    return start


@pytest.fixture(scope="module")
def server(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """One engine for all tests of a module, with room for eight requests at once."""
    engine = start_engine(tmp_path_factory.mktemp("sglang-logs"), max_running_requests=8)
    yield engine
    engine.close()


@pytest.fixture
def restored(server: SglangEngine) -> Iterator[SglangEngine]:
    """The engine, to be given other weights: it gets its own ones back."""
    yield server
    server.pause = "abort"
    server.load_weights(iter([weights(RANKS.seed)]), 0)


def weights(seed: int) -> Bucket:
    """All start weights for a seed."""
    source = weight_source(MODEL, seed)
    return [(name, source.get(name)) for name in source.names()]


@pytest.fixture(scope="session")
def weights_of() -> Callable[[int], Bucket]:
    return weights


@pytest.fixture(scope="session")
def model_of() -> Callable[[int], PreTrainedModel]:
    """The model that a seed stands for, as transformers alone would build it."""

    @cache
    def build(seed: int) -> PreTrainedModel:
        with torch.random.fork_rng():
            model = AutoModelForCausalLM.from_config(load_hf_config(MODEL), dtype=torch.float32).eval()
        replace_weights(model, weights(seed))
        return model

    return build


@pytest.fixture(scope="session")
def requests() -> list[GenerationRequest]:
    """Eight prompts of different lengths, two of them equal."""
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 15, size=size) for size in (1, 2, 3, 5, 8, 13, 21)]
    return [GenerationRequest(prompt, seed) for seed, prompt in enumerate([*prompts, prompts[3]])]


@pytest.fixture
def sender_of() -> Iterator[Callable[[TransportName, Bucket], WeightSender]]:
    """``sender_of(reach, tensors)``: a sender in the test's process."""
    made: list[WeightSender] = []

    def make(reach: TransportName, tensors: Bucket) -> WeightSender:
        exporter = IteratedExporter(lambda: iter(tensors), 8000, torch.device("cpu"))
        made.append(WeightSender(exporter, reach, host="127.0.0.1", timeout_s=30.0))
        return made[-1]

    yield make
    for sender in made:
        sender.close()
