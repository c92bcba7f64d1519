"""Engines that only wait: what `overhead` puts in the place of the real ones, so that all else can be measured.

`timed_run` has the run's workers made of `TimedWorker`. In its process this module stands for those of dagrl's that
need torch, all of them engines' work. Rows, columns, messages, objects and their sizes are those of a real run.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dagrl
from dagrl.backends.base import NO_WEIGHTS, Completion, GenerationRequest, RequestLimits
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import OpInput, Output
from dagrl.ops.work import TaskWork
from dagrl.workers.messages import SendResult, StartEngine, UpdateWeightsRequest, Usage
from dagrl.workers.worker import Worker

TIMINGS = "timings.json"
"""Beside the pipeline file."""
_STANDS_FOR = (
    "dagrl.workers.engine_factory",
    "dagrl.workers.meter",
    "dagrl.workers.profiling",
    "dagrl.workers.weight_transfer",
    "dagrl.algorithms.objective",
)


@dataclass(frozen=True, slots=True)
class Timings:
    """How long engines take, in seconds, and how much they make."""

    rollout_s: float
    """A server's responses come evenly over this time, each prompt's together."""
    logprob_s: float
    """For a shard, whatever its rows."""
    update_s: float
    send_s: float
    receive_s: float
    responses: int
    """Responses of a server in a step."""
    response_tokens: int
    portion: int
    """Responses that a server takes at a time."""

    def write(self, folder: Path) -> None:
        """Put them where the workers look."""
        (folder / TIMINGS).write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Timings:
        """Read what `write` has written."""
        return Timings(**json.loads((folder / TIMINGS).read_text()))


class TimedWorker(Worker):
    """A worker whose engine waits: this module replaces the modules that need torch."""

    def __init__(self) -> None:
        super().__init__()
        for name in _STANDS_FOR:
            sys.modules[name] = sys.modules[__name__]


class TimedTrainer:
    """A rank of a trainer that waits."""

    policy_version = 0

    def __init__(self, timings: Timings) -> None:
        self.timings = timings

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        """Zeros, one for each response token."""
        time.sleep(self.timings.logprob_s)
        tokens = batch["response_tokens"]
        return Column(np.zeros(len(tokens.values), dtype=np.float32), tokens.offsets)

    def update(
        self,
        mini_batches: Sequence[Batch],
        objective: PolicyObjective,
        *,
        tokens_per_micro_batch: int,
        begins: bool = True,
        ends: bool = True,
    ) -> dict[str, Stat]:
        """As many metrics as a policy has."""
        time.sleep(self.timings.update_s * len(mini_batches))
        self.policy_version += ends
        return {name: Stat.of([0.0]) for name in ("loss/policy", "kl/ref", "entropy", "ratio/mean", "grad_norm", "lr")}

    def start_weights(self) -> AbstractContextManager[None]:
        """Nothing has to be swapped in."""
        return nullcontext()

    def save(self, folder: Path, *, asynchronous: bool = False) -> None:
        """There is nothing to be saved."""
        folder.mkdir(parents=True, exist_ok=True)

    def finish_save(self, *, wait: bool) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Nothing is held."""


class TimedGenerator:
    """A server that waits: the q-th response that it is asked for in a step is there when its time has come."""

    def __init__(self, timings: Timings) -> None:
        self.timings = timings
        self.policy_version = NO_WEIGHTS
        self.sampled_tokens = 0
        self._lock = threading.Lock()
        self._asked, self._began = 0, 0.0
        self._tokens = np.zeros(timings.response_tokens, dtype=np.int64)
        self._logprobs = np.zeros(timings.response_tokens, dtype=np.float32)

    def begin_step(self, version: int) -> None:
        """New weights are there: count from the beginning."""
        self.policy_version, self._asked = version, 0

    def request_limits(self, longest: int) -> RequestLimits:
        """A portion at a time, all of them at once."""
        return RequestLimits(self.timings.portion, self.timings.responses)

    def generate(self, requests: Sequence[GenerationRequest], sampling: Any) -> Iterator[Completion]:
        """Zeros, in the order in which they were asked for."""
        with self._lock:
            if not self._asked:
                self._began = time.monotonic()
            before, began = self._asked, self._began
            self._asked += len(requests)
        for index in range(len(requests)):
            due = began + self.timings.rollout_s * (before + index + 1) / self.timings.responses
            time.sleep(max(0.0, due - time.monotonic()))
            self.sampled_tokens += len(self._tokens)
            yield Completion(index, self._tokens, self._logprobs, "length", self.policy_version)

    def abort(self) -> None:
        """Nobody asks for that here."""

    def close(self) -> None:
        """Nothing is held."""


@dagrl.node(reads=["policy_version"], writes=["reward"])
def score(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A reward that costs nothing, for the host's ops are no engines."""
    return {"reward": np.zeros(len(batch["policy_version"]), dtype=np.float32)}


# -- what stands for dagrl's modules of the same names


def make_engine(setup: StartEngine, listen_fd: int | None) -> TimedTrainer | TimedGenerator:
    """The engine of a worker."""
    assert setup.folder is not None and setup.engine is not None
    timings = Timings.read(setup.folder)
    generates = isinstance(setup.pipeline.engines[setup.engine], HfEngineSpec)
    return TimedGenerator(timings) if generates else TimedTrainer(timings)


def make_profiler(setup: StartEngine) -> None:
    """Nobody looks into the nodes."""


class Meter:
    """Reports tokens, and nothing of operations and devices. The last part of a worker that starts."""

    def __init__(self, pipeline: Any) -> None:
        if "torch" in sys.modules:
            raise ValueError("a worker of timed engines has imported torch: its start and its memory are not measured")

    def begin(self, work: TaskWork, parts: Sequence[OpInput], *, first: bool = True) -> object:
        """Counts nothing."""
        return self

    def settle(self) -> None:
        """Nothing is queued."""

    def usage(self, count: object, output: Output) -> Usage:
        """As on a machine without GPUs."""
        return Usage(output.sampled, None, None, None)


class WeightTransfer:
    """Takes the time of sending weights."""

    def __init__(self, engine: TimedTrainer, rank: int, route: object, timeout_s: float) -> None:
        self._send_s = engine.timings.send_s

    def offer(self) -> None:
        """Weights go through the object store."""

    def send(self, sync: int) -> SendResult:
        """Wait."""
        time.sleep(self._send_s)
        return SendResult(self._send_s, 0)

    def close(self) -> None:
        """Nothing is held."""


def update_weights(
    engine: TimedGenerator, rank: int, request: UpdateWeightsRequest, sent: SendResult | None, timeout_s: float
) -> float:
    """Take the time of receiving weights."""
    time.sleep(engine.timings.receive_s)
    engine.begin_step(request.version)
    return engine.timings.receive_s


class PolicyObjective:
    """Nobody computes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options
