"""The step that `overhead` times, as a plain loop over Ray's actors: what is left of it where nothing orchestrates.

The same engines' times, rows and calls, written for this one pipeline: who samples and who computes what is known from
the beginning. There are no metrics, checks, files, clocks of stages or failures. As with dagrl, columns go through the
object store: a driver that hands them on itself is quicker with a few workers, and in the way of many.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from timed_engines import Timings
from timed_steps import Shape, critical_s

_OBJECT_STORE_BYTES = 2**30
_MOST_THROUGH_DRIVER = 4096
"""Bytes of a result that is no column: Ray would pass up to 100 KiB through the caller."""


def bare_ray_ms(shape: Shape, timings: Timings, *, warmup: int, steps: int) -> float:
    """Milliseconds of a step beyond its critical path, the median of `steps`, by the trainers' own clocks."""
    ray.init(
        address="local",
        num_cpus=shape.workers + 1,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"max_direct_call_object_size": _MOST_THROUGH_DRIVER},
    )
    try:
        loop = _Loop(shape, timings)
        ends = [loop.step() for _ in range(warmup + steps + 1)][warmup:]
    finally:
        ray.shutdown()
    critical = critical_s(shape, timings)
    return 1000 * statistics.median(end - begin - critical for begin, end in pairwise(ends))


class _Loop:
    def __init__(self, shape: Shape, timings: Timings) -> None:
        self._shape = shape
        server, trainer, host = ray.remote(_Server), ray.remote(_Trainer), ray.remote(_Host)
        self._servers = [server.remote(shape, timings) for _ in range(shape.generators)]
        self._trainers = [trainer.remote(timings, rank, shape.trainers) for rank in range(shape.trainers)]
        self._host = host.remote()
        self._portions = -(-shape.prompts * shape.n // timings.portion)

    def step(self) -> float:
        """From a weight sync to an update; when the last trainer was through with that, seconds since the epoch."""
        ray.get([trainer.send.remote() for trainer in self._trainers])
        ray.get([server.receive.remote() for server in self._servers])
        rows: list[Any] = []
        computed: list[list[Any]] = [[] for _ in self._trainers]
        for shard in self._shards():
            rows += [*shard, self._host.advantage.remote(*shard)]
            for mine, trainer in zip(computed, self._trainers, strict=True):
                mine.append(trainer.logprobs.remote(*shard))
        each_with_its_own = zip(self._trainers, computed, strict=True)
        return max(ray.get([trainer.update.remote(*rows, *mine) for trainer, mine in each_with_its_own]))

    def _shards(self) -> Iterator[list[Any]]:
        """The portions of each shard, once they are all there."""
        streams = [each.rollout.options(num_returns="streaming").remote() for each in self._servers]
        servers = {id(stream): server for server, stream in enumerate(streams)}
        came = [0] * len(streams)
        each_shard = max(1, self._portions // self._shape.shards)
        shards: dict[int, list[Any]] = {}
        while streams:
            (stream,), _ = ray.wait(streams, num_returns=1)
            try:
                portion = next(stream)
            except StopIteration:
                streams.remove(stream)
                continue
            server = servers[id(stream)]
            shard = (came[server] * len(self._servers) + server) // each_shard
            came[server] += 1
            shards.setdefault(shard, []).append(portion)
            if len(shards[shard]) == each_shard:
                yield shards.pop(shard)
        yield from shards.values()


class _Server:
    def __init__(self, shape: Shape, timings: Timings) -> None:
        self._timings = timings
        self._size = (timings.portion, shape.response_tokens)

    def receive(self) -> None:
        time.sleep(self._timings.receive_s)

    def rollout(self) -> Iterator[dict[str, np.ndarray]]:
        """Its portions, once the last response of each is there."""
        began = time.monotonic()
        for response in range(1, self._timings.responses + 1):
            due = began + self._timings.rollout_s * response / self._timings.responses
            time.sleep(max(0.0, due - time.monotonic()))
            if response % self._timings.portion == 0 or response == self._timings.responses:
                yield {"tokens": np.zeros(self._size, np.int64), "logprobs": np.zeros(self._size, np.float32)}


class _Trainer:
    def __init__(self, timings: Timings, rank: int, ranks: int) -> None:
        self._timings, self._mine = timings, slice(rank, None, ranks)

    def send(self) -> None:
        time.sleep(self._timings.send_s)

    def logprobs(self, *portions: dict[str, np.ndarray]) -> np.ndarray:
        """Of its share of each portion's rows."""
        tokens = np.concatenate([portion["tokens"][self._mine] for portion in portions])
        time.sleep(self._timings.logprob_s)
        return np.zeros(tokens.shape, np.float32)

    def update(self, *rows: Any) -> float:
        """With its share of everything."""
        _ = [np.ascontiguousarray(each["tokens"][self._mine]) for each in rows if isinstance(each, dict)]
        time.sleep(self._timings.update_s)
        return time.time()


class _Host:
    def advantage(self, *portions: dict[str, np.ndarray]) -> np.ndarray:
        """One for each response."""
        return np.zeros(sum(len(portion["tokens"]) for portion in portions), np.float32)
