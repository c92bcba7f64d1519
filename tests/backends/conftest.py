"""Ranks of a megatron engine in one test, forked from the test process, and tiny Hugging Face models for them."""

import datetime
import faulthandler
import gc
import os
import pickle
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import pytest
from tiny_models import DENSE, MIXTURES, tiny_hf_model
from weighted_likelihood import WeightedLikelihood

from dagrl.imports import UNUSED, import_transformers, without_packages

# Models of all kinds share a test's process, while a worker leaves out what its own does not need.
import_transformers()
with without_packages(*UNUSED):
    import transformers.image_utils
    import transformers.modeling_utils
    import transformers.processing_utils
    import transformers.video_processing_utils  # noqa: F401

if TYPE_CHECKING:
    from dagrl.backends.megatron.section import MegatronEngineSpec
    from dagrl.config.schema import ModelSpec
    from dagrl.data.batch import Batch

TIMEOUT_S = 300.0


@pytest.fixture(scope="session", params=DENSE)
def hf_model(request: pytest.FixtureRequest) -> Any:
    """A Hugging Face model of a few thousand random weights, float32; one of each dense family and variant.

    Its 59 tokens are no multiple of anything, and its norms and biases are not those of a fresh model.
    """
    return tiny_hf_model(request.param)


@pytest.fixture(scope="session", params=MIXTURES)
def hf_mixture(request: pytest.FixtureRequest) -> Any:
    """The same for mixtures of experts."""
    return tiny_hf_model(request.param)


@pytest.fixture(scope="session", params=(*DENSE, *MIXTURES))
def hf_any(request: pytest.FixtureRequest) -> Any:
    """An `hf_model` or an `hf_mixture`."""
    return tiny_hf_model(request.param)


@pytest.fixture(scope="session")
def qwen3() -> Any:
    """The `hf_model` of a single family, for what does not depend on it."""
    return tiny_hf_model("qwen3")


@pytest.fixture(scope="session")
def hf_model_of() -> Callable[[str], Any]:
    """``hf_model_of(name)``: the `hf_model` or `hf_mixture` of that name."""
    return tiny_hf_model


@pytest.fixture(scope="session")
def megatron_spec() -> Callable[..., "MegatronEngineSpec"]:
    """``megatron_spec(tp, sequence_parallel, pp=, vpp=, cp=, ep=, etp=, head=, **transformer)``."""
    from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec

    def make(
        tp: int = 1,
        sequence_parallel: bool = False,
        *,
        pp: int = 1,
        vpp: int | None = None,
        cp: int = 1,
        ep: int = 1,
        etp: int = 1,
        head: Any = "lm",
        **transformer: Any,
    ) -> MegatronEngineSpec:
        parallel = ParallelSpec(
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        return MegatronEngineSpec(
            backend="megatron", group="all", parallel=parallel, transformer=transformer, head=head
        )

    return make


class ModelWeights:
    """A weight source: the weights of a Hugging Face model, some of them left out, changed or added."""

    def __init__(self, hf_model: Any, **changes: Any) -> None:
        weights = published_weights(hf_model) | changes
        self.tensors = {name: tensor for name, tensor in weights.items() if tensor is not None}

    def names(self) -> list[str]:
        return list(self.tensors)

    def get(self, name: str) -> Any:
        if name not in self.tensors:
            raise ValueError(f"no tensor {name!r}")
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.get(name).shape)


def published_weights(hf_model: Any) -> dict[str, Any]:
    """All that a checkpoint of the model holds, by its names: what is tied once, and each expert by itself."""
    from dagrl.model_files.library_model import published_tensors

    weights = {name: tensor.detach() for name, tensor in published_tensors(hf_model).items()}
    if hf_model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


@pytest.fixture(scope="session")
def weight_recorder() -> Callable[[Any], Any]:
    """``weight_recorder(hf_model)``: a source of its weights, with the names of those that were read in ``read``."""

    class Recorder(ModelWeights):
        def __init__(self, hf_model: Any) -> None:
            super().__init__(hf_model)
            self.read: set[str] = set()

        def get(self, name: str) -> Any:
            self.read.add(name)
            return self.tensors[name]

        def shape(self, name: str) -> tuple[int, ...]:
            return tuple(self.tensors[name].shape)

    return Recorder


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Any], dict[str, Any]]:
    """``weights_of(hf_model)``: its tensors by the names of published checkpoints."""
    return published_weights


@pytest.fixture(scope="session")
def load_chunks() -> Callable[..., list[Any]]:
    """``load_chunks(hf_model, spec, **changes)``, called on a rank: the Megatron model with the weights of `hf_model`.

    `changes` are tensors to put in place of its own; None leaves one out.
    """

    def load(hf_model: Any, spec: "MegatronEngineSpec", **changes: Any) -> list[Any]:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        from dagrl.backends.megatron.engine.config import transformer_config
        from dagrl.backends.megatron.engine.megatron_engine import converter
        from dagrl.backends.megatron.engine.model import build_model

        sizes = spec.parallel.model_dump(exclude={"sequence_parallel"})
        parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(1)
        chunks = build_model(hf_model.config, spec, transformer_config(hf_model.config, spec))
        load_hf_weights, _ = converter(hf_model.config, spec)
        load_hf_weights(chunks, hf_model.config, ModelWeights(hf_model, **changes))
        return chunks

    return load


@pytest.fixture(scope="session")
def export_chunks() -> Callable[..., list[Any]]:
    """``export_chunks(chunks, hf_model, bucket_bytes, head)``, on all ranks: the weights, in buckets."""

    def export(chunks: list[Any], hf_model: Any, bucket_bytes: int, head: str = "lm") -> list[Any]:
        import torch.distributed as dist

        from dagrl.backends.megatron.engine.megatron_engine import converter
        from dagrl.backends.megatron.section import MegatronEngineSpec
        from dagrl.weight_sync.exporter import exported

        _, make_exporter = converter(hf_model.config, MegatronEngineSpec(backend="megatron", group="all", head=head))
        exporter = make_exporter(chunks, hf_model.config, bucket_bytes)
        return list(exported(exporter, is_root=dist.get_rank() == 0))

    return export


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(world_size, function, *args)``: what ``function(rank, *args)`` returned on each rank, in rank order.

    The ranks are joined by gloo, unless ``joined=False``; the function initialises megatron itself. Anything may be
    passed, closures too; results must pickle. A rank's exception fails the test, with its traceback; the other ranks
    are then ended.
    """
    import torch

    with warnings.catch_warnings():
        # pytest has its own filters in place of those that the package sets.
        warnings.simplefilter("ignore")
        # Imported before the fork, so that the ranks need not.
        import dagrl.backends.megatron.engine.megatron_engine  # noqa: F401
    torch.set_num_threads(1)
    return _run_ranks


def _run_ranks(world_size: int, function: Callable[..., Any], *args: Any, joined: bool = True) -> list[Any]:
    import torch
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("fork")
    ranks, answers, ports = [], [], []
    for rank in range(world_size):
        # Made one by one, so that no rank holds another's sending end: the pipe breaks when its rank dies.
        receiving, sending = context.Pipe(duplex=False)
        told, telling = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_rank, args=(rank, world_size, told, sending, function, args), daemon=True))
        with warnings.catch_warnings():
            # Threads of earlier tests do not follow into the ranks, and they do not need them there.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            ranks[-1].start()
        sending.close()
        told.close()
        answers.append(receiving)
        ports.append(telling)
    # This process holds the store, on a port that the system chooses: no rank can find it taken. Its thread must not
    # run while ranks are forked: they would inherit what it holds just then.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if joined else None
    for telling in ports:
        telling.send(store.port if store else None)
        telling.close()
    try:
        return _collect(answers)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        # A failed test keeps this frame: a later rank that collects it would wait for the store's thread, for ever.
        del store


def _rank(
    rank: int, world_size: int, told: Connection, sending: Connection, function: Callable[..., Any], args: Any
) -> None:
    import torch.distributed as dist

    # What was there before the fork is not the rank's to collect: looking at it would copy the test process's memory.
    gc.freeze()
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    # A rank that hangs says where, on stderr, before the test gives it up.
    faulthandler.dump_traceback_later(TIMEOUT_S - 5)
    try:
        port = told.recv()
        if port is not None:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        answer = pickle.dumps((True, function(rank, *args)))
        if dist.is_initialized():
            # A rank that leaves early would break the connections of those still at work.
            dist.barrier()
    except BaseException:  # noqa: BLE001 - whatever it is, the test has to hear of it
        answer = pickle.dumps((False, traceback.format_exc()))
    sending.send_bytes(answer)
    # Past the exit handlers of the test process, which this one inherited.
    os._exit(0)


def _collect(receiving: list[Connection]) -> list[Any]:
    """One answer from each rank; fails the test at the first exception, at a rank that dies, and after the timeout."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(answers) < len(receiving):
        waiting = [pipe for rank, pipe in enumerate(receiving) if rank not in answers]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"only ranks {sorted(answers)} of {len(receiving)} answered within {TIMEOUT_S:.0f} s")
        for pipe in ready:
            rank = receiving.index(pipe)
            try:
                succeeded, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                pytest.fail(f"rank {rank} died without a word")
            if not succeeded:
                pytest.fail(f"rank {rank}:\n{answer}", pytrace=False)
            answers[rank] = answer
    return [answers[rank] for rank in range(len(receiving))]


# -- a tiny engine, and something to train it on --------------------------------------------------------------------


@pytest.fixture(scope="session")
def objective() -> WeightedLikelihood:
    return WeightedLikelihood()


@pytest.fixture(scope="session")
def tiny_model() -> "ModelSpec":
    from dagrl.config.schema import ModelSpec

    # 61 tokens: the vocabulary is padded. A padding token would have no gradient in Hugging Face's model.
    special = {"pad_token_id": None}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return ModelSpec.model_validate(
        {
            "init": {"model_type": "qwen3", "vocab_size": 61, "initializer_range": 0.15, **special, **shape, **heads},
            "tokenizer": {"kind": "characters", "alphabet": "ab"},
        }
    )


@pytest.fixture(scope="session")
def samples() -> "Batch":
    """12 rows of 2 to 19 tokens, ids 100 to 111; one response is masked, one is a single token."""
    import numpy as np

    from dagrl.data.batch import Batch, Column

    random = np.random.default_rng(5)
    prompts, responses = random.integers(1, 9, 12), random.integers(1, 11, 12)
    responses[4] = 1
    masks = [np.ones(n) for n in responses]
    masks[7][:] = 0
    return Batch(
        np.arange(100, 112),
        {
            "prompt_tokens": Column.ragged([random.integers(0, 61, n) for n in prompts], "int64"),
            "response_tokens": Column.ragged([random.integers(0, 61, n) for n in responses], "int64"),
            "response_mask": Column.ragged(masks, "float32"),
            "advantage": Column.ragged([random.normal(size=n) for n in responses], "float32"),
            "reward": Column(random.normal(size=12).astype("float32")),
        },
    )


@pytest.fixture(scope="session")
def run_engine(run_ranks: Callable[..., list[Any]], tiny_model: "ModelSpec") -> Callable[..., list[Any]]:
    """``run_engine(world_size, function, **spec)``: ``function(engine)`` on each rank of a `MegatronEngine`.

    Keyword arguments are fields of MegatronEngineSpec, or of the engine.
    """
    from dagrl.backends.backend import RankContext
    from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine
    from dagrl.backends.megatron.section import MegatronEngineSpec
    from dagrl.backends.runtime.initial_weights import weight_source

    # Imports Hugging Face's model before the fork, so that no rank has to.
    weight_source(tiny_model, 3).names()

    def run(world_size: int, function: Callable[[Any], Any], **fields: Any) -> list[Any]:
        own: dict[str, Any] = {"model": tiny_model, "train_steps": 10, "trainable": True}
        own |= {"keep_start_weights": False, "moving_average": None, "teacher": None}
        options = {name: fields.pop(name, value) for name, value in own.items()}
        spec = MegatronEngineSpec.model_validate({"backend": "megatron", "group": "train", **fields})

        def on_rank(rank: int) -> Any:
            # Rank 0 has inherited the socket: nobody else can take its port meanwhile.
            listen_fd = listener.detach() if rank == 0 else None
            ranks = RankContext(rank, world_size, "127.0.0.1", port, 60.0, 3, listen_fd)
            engine = MegatronEngine(spec=spec, ranks=ranks, **options)
            return function(engine)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            return run_ranks(world_size, on_rank, joined=False)

    return run
