"""Real engines that generate, on the CPU, one of each backend that is installed beside the tests.

``make test`` runs them twice: in .venv, which has transformers and SGLang, and in .venv-vllm.
``make test-next`` runs them with the newest servers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from completions import ENDS
from transformers import AutoModelForCausalLM, PreTrainedModel

from dagrl.backends.backend import RankContext
from dagrl.backends.base import GenerationRequest
from dagrl.backends.hf.weights import replace_weights
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.backends.serving.share import ServerShare
from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.library_model import load_hf_config
from dagrl.model_files.tokenizer import load_tokenizer
from dagrl.weight_sync.exporter import IteratedExporter
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.sender import TransportName, WeightSender
from dagrl.workers.listener import listen

MODEL = ModelSpec(
    init={
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # vLLM's attention on CPUs takes no smaller one.
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        # Beside the tokenizer's.
        "eos_token_id": [ENDS[1]],
        # Far from uniform, so that each token has its own log-prob.
        "initializer_range": 0.3,
    },
    tokenizer=TokenizerSpec(kind="characters", alphabet="0123456789+="),
)
RANKS = RankContext(rank=0, world_size=1, master_addr="127.0.0.1", master_port=0, timeout_s=60, seed=5)
REQUESTS_AT_ONCE = 8


def start_sglang(logs: Path, start_timeout_s: float = 600.0, **server: object) -> Any:
    from dagrl.backends.sglang.engine import SglangEngine
    from dagrl.backends.sglang.section import SglangEngineSpec

    spec = SglangEngineSpec(backend="sglang", group="rollout", server=server)
    return SglangEngine(MODEL, spec, share(logs, start_timeout_s))


def start_vllm(logs: Path, start_timeout_s: float = 600.0, model: ModelSpec = MODEL, **server: object) -> Any:
    from dagrl.backends.vllm.engine import VllmEngine
    from dagrl.backends.vllm.fields import VllmFields
    from dagrl.backends.vllm.section import VllmEngineSpec

    tested = {name: server.pop(name) for name in list(server) if name in VllmFields.model_fields}
    spec = VllmEngineSpec(backend="vllm", group="rollout", server=tested, extra={"server": server})
    return VllmEngine(model, spec, share(logs, start_timeout_s))


def share(logs: Path, start_timeout_s: float) -> ServerShare:
    """A whole server on the CPU."""
    with listen("127.0.0.1") as free:
        ranks = replace(RANKS, master_port=free.getsockname()[1])
    return ServerShare("generator/0", 0, 0, 1, (), ranks, logs, start_timeout_s, sleeps=True)


def start_hf(logs: Path) -> Any:
    from dagrl.backends.hf.engine import HfEngine
    from dagrl.backends.hf.section import HfEngineSpec

    return HfEngine(MODEL, HfEngineSpec(backend="hf", group="rollout"), RANKS)


SERVERS = {"sglang": start_sglang, "vllm": start_vllm}
ROOM = {
    "sglang": {"max_running_requests": REQUESTS_AT_ONCE},
    "vllm": {"max_num_seqs": REQUESTS_AT_ONCE, "enable_return_routed_experts": True},
}
INSTALLED = [name for name in SERVERS if importlib.util.find_spec(name)]


class Engines:
    """Engines that were started, by their backend."""

    def __init__(self, logs: Callable[[str], Path]) -> None:
        self._logs = logs
        self._running: dict[str, Any] = {}
        self._folders: dict[str, Path] = {}

    def get(self, backend: str) -> Any:
        """The one of this backend, with its own weights: started now, if there is none."""
        if backend not in self._running:
            start = start_hf if backend == "hf" else SERVERS[backend]
            self._folders[backend] = self._logs(f"{backend}-logs")
            self._running[backend] = start(self._folders[backend], **ROOM.get(backend, {}))
        return self._running[backend]

    def running(self, backend: str) -> bool:
        """Whether there is one of this backend."""
        return backend in self._running

    def log(self, backend: str) -> str:
        """What the server of this backend has printed."""
        return next(self._folders[backend].glob("generator-*[0-9].log")).read_text()

    def discard(self, backend: str) -> None:
        """Close the one of this backend."""
        if backend in self._running:
            self._running.pop(backend).close()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp)
    yield made
    for backend in ("hf", *SERVERS):
        made.discard(backend)


@pytest.fixture(scope="session", params=["hf", *INSTALLED])
def backend(request: pytest.FixtureRequest) -> str:
    """Each installed backend that generates."""
    return request.param


@pytest.fixture(scope="session", params=INSTALLED)
def server_backend(request: pytest.FixtureRequest) -> str:
    """Each installed backend that generates on servers."""
    return request.param


@pytest.fixture
def engine(engines: Engines, backend: str) -> Iterator[Any]:
    """An engine with room for eight requests at once, and its start weights before and after the test."""
    engine = engines.get(backend)
    yield engine
    restore(engine)


@pytest.fixture
def server(engines: Engines, server_backend: str) -> Iterator[Any]:
    """An `engine` on a server."""
    engine = engines.get(server_backend)
    yield engine
    if engines.running(server_backend):
        restore(engine)


@pytest.fixture
def routing(engines: Engines, server_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that reports the experts of each token: for vLLM the shared one, as a start takes long.

    SGLang's has dagrl's sampler, whose kernel runs in Triton's interpreter.
    """
    if server_backend == "vllm":
        yield engines.get("vllm")
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    engine = SERVERS[server_backend](tmp_path, enable_return_routed_experts=True, sampling_backend="fused")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def start_engine(server_backend: str) -> Callable[..., Any]:
    """``start_engine(logs, start_timeout_s, **server)`` starts a server with these arguments."""
    return SERVERS[server_backend]


def restore(engine: Any) -> None:
    engine.pause = "abort"
    if engine.policy_version != 0:
        engine.load_weights(iter([weights(RANKS.seed)]), 0)


@pytest.fixture(scope="session")
def model() -> ModelSpec:
    """The model of all engines."""
    return MODEL


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


@pytest.fixture(scope="session")
def decode() -> Callable[[np.ndarray], str]:
    """The text of tokens of `MODEL`."""
    return load_tokenizer(MODEL).decode
