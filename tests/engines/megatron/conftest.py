"""Ranks of a megatron engine in one test, forked from the test process, and tiny Hugging Face models for them."""

import datetime
import functools
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

TIMEOUT_S = 90.0

MODELS = ("qwen2", "qwen3", "qwen3_tied", "llama", "llama_scaled")
"""Names that `tiny_hf_model` knows."""


@pytest.fixture(scope="session")
def tiny_hf_model() -> Callable[..., Any]:
    """``tiny_hf_model(name)``: a Hugging Face model of few thousand random weights, float32, the same at each call.

    Its 59 tokens are no multiple of anything, and its norms and biases are not those of a fresh model.
    """
    return _tiny_hf_model


@functools.cache
def _tiny_hf_model(name: str) -> Any:
    import torch
    import transformers

    family, _, variant = name.partition("_")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
    if variant == "scaled":
        rope |= {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    if family == "qwen3":
        sizes["head_dim"] = 12
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=59,
        num_hidden_layers=2,
        max_position_embeddings=64,
        rope_parameters=rope,
        tie_word_embeddings=variant == "tied",
        attn_implementation="sdpa",
        **sizes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, mean, 0.1, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(world_size, function, *args)``: what ``function(rank, *args)`` returned on each rank, in rank order.

    The ranks are joined by gloo, unless ``joined=False``; the function initialises megatron itself. Anything may be
    passed, closures too; results must pickle. A rank's exception fails the test, with its traceback; the other ranks are then ended.
    """
    import torch

    import dagrl.engines.megatron  # noqa: F401 - imported before the fork, so that the ranks need not

    torch.set_num_threads(1)
    return _run_ranks


def _run_ranks(world_size: int, function: Callable[..., Any], *args: Any, joined: bool = True) -> list[Any]:
    import torch
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("fork")
    # This process holds the store, on a port that the system chooses: no rank can find it taken.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if joined else None
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, pipes[rank][1], function, args), daemon=True)
        for rank in range(world_size)
    ]
    for rank, (_, sending) in zip(ranks, pipes, strict=True):
        with warnings.catch_warnings():
            # The store's thread does not follow into the ranks, and they do not need it there.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            rank.start()
        sending.close()
    try:
        return _collect([receiving for receiving, _ in pipes])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _rank(
    rank: int, world_size: int, port: int | None, sending: Connection, function: Callable[..., Any], args: Any
) -> None:
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    try:
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
