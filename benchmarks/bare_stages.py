"""The stages of a GRPO step on the bare libraries: what a whole step of dagrl's is held against."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from bare_sglang import BareServer
from pipelines import Load, prompt_texts
from ranks import Meetings
from workload import Workload

_START_S = 240.0


def bare_stages(
    model: Path,
    load: Load,
    server: dict[str, Any],
    *,
    mini_batches: int,
    rows_per_micro_batch: int,
    warmup: int,
    rounds: int,
    trainers: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each stage on a step's worth of one GPU, `load`: ``rollout``, ``old``, ``update``, ``sync`` (a copy).

    Generator and trainer start at the same time and work in turn. With several `trainers`, data-parallel ranks on a GPU
    each, all of them have such a load; the generator is one.
    """
    workload = Workload(
        row_tokens=load.row_tokens,
        rows_per_micro_batch=rows_per_micro_batch,
        micro_batches=load.samples // mini_batches // rows_per_micro_batch,
    )
    assert workload.rows * mini_batches == load.samples, "micro-batches must be of whole rows, and alike"
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    stages = (model, workload, mini_batches, warmup, rounds)
    meetings = Meetings(1)
    ranks = [context.Process(target=_rank, args=(there, meetings, rank, trainers, stages)) for rank in range(trainers)]
    for rank in ranks:
        rank.start()
    try:
        bare = BareServer(model, server)
        try:
            texts = prompt_texts(load, warmup + rounds)
            steps = [texts[each : each + load.prompts] for each in range(0, len(texts), load.prompts)]
            _wait_for(here, ranks, "to build its model")
            seconds = {"rollout": [bare.generate(each, load) for each in steps][warmup:]}
            here.send("your turn")
            return seconds | _wait_for(here, ranks, "to measure its stages")
        finally:
            bare.close()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _wait_for(connection: Connection, ranks: Sequence[BaseProcess], what: str) -> Any:
    deadline = time.monotonic() + _START_S
    while not connection.poll(0.5):
        if ended := [rank for rank in ranks if not rank.is_alive()]:
            raise RuntimeError(f"the bare trainer ended with exit code {ended[0].exitcode} instead {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_START_S:.0f} s for the bare trainer {what}")
    return connection.recv()


def _rank(
    connection: Connection, meetings: Meetings, rank: int, ranks: int, stages: tuple[Path, Workload, int, int, int]
) -> None:
    """A process: build the model, wait for a sign, measure; the first rank sends the seconds of each stage."""
    from bare_step import BareStep

    from dagrl.backends.megatron.engine import distributed
    from dagrl.backends.megatron.section import ParallelSpec

    model, workload, mini_batches, warmup, rounds = stages
    distributed.start(next(meetings.join(rank, ranks)), ParallelSpec())
    step = BareStep(model, workload)
    copies = [torch.empty_like(weights) for weights in step.model.parameters()]

    def copy_weights() -> None:
        torch._foreach_copy_(copies, [weights.detach() for weights in step.model.parameters()])

    def times(count: int, stage: Callable[[], object]) -> Callable[[], object]:
        return lambda: [stage() for _ in range(count)]

    if rank == 0:
        connection.send("ready")
        connection.recv()
    torch.distributed.barrier()
    measured = {"old": times(mini_batches, step.logprobs), "update": times(mini_batches, step), "sync": copy_weights}
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(warmup + rounds):
        for name, stage in measured.items():
            seconds[name].append(_timed(stage))
    if rank == 0:
        connection.send({name: taken[warmup:] for name, taken in seconds.items()})
    # Whoever is gone is missed by those who are not done yet.
    torch.distributed.barrier()
    while True:
        time.sleep(1)


def _timed(stage: Callable[[], object]) -> float:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    stage()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
