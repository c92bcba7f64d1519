"""The worker: one Ray actor, which holds one rank of an engine or runs ops on the CPU."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from dagrl.backends.base import AnyEngine, GenerateEngine, RequestLimits, SleepReport, TrainEngine
from dagrl.backends.registry import backend_of
from dagrl.backends.serving.gpu_memory import gpu_names
from dagrl.config.loading.hub import download
from dagrl.config.residency import Residency
from dagrl.config.schema import Pipeline
from dagrl.data.batch import Batch
from dagrl.data.column_store import ColumnStore, StoredBlock
from dagrl.log_ends import keep_ends_of_output
from dagrl.ops.base import Context, Op, Output, Resources
from dagrl.ops.custom import load_op
from dagrl.ops.work import (
    EngineWork,
    PartialRollout,
    RolloutId,
    RolloutWork,
    TaskWork,
    TrainWork,
)
from dagrl.plugins.calls import record_calls
from dagrl.workers.listener import listen
from dagrl.workers.messages import (
    BUCKET_BYTES,
    Block,
    ColumnsToStore,
    Heartbeat,
    SendResult,
    StartEngine,
    StreamMessage,
    UpdateWeightsRequest,
    WorkerInfo,
    block_of,
)
from dagrl.workers.object_cache import ObjectCache, get_objects
from dagrl.workers.serialization import deserialize, serialize
from dagrl.workers.streaming import HEARTBEAT_S, BackgroundIterator, HeartbeatLimiter, WeightVersionGate

if TYPE_CHECKING:
    from dagrl.scheduler.weight_route import WeightRoute
    from dagrl.weight_sync.protocol import Offer, WeightDigests
    from dagrl.workers.meter import Meter
    from dagrl.workers.profiling import NvtxRanges, TorchTraces
    from dagrl.workers.weight_transfer import WeightTransfer


class Worker:
    """One process of an executor. On a generator several methods run at once, in threads of Ray.

    The driver calls methods through `dagrl.orchestrator.groups.worker_handle`, which sends the function itself:
    ``handle.call("...", Worker.sleep, residency)``.
    """

    def __init__(self) -> None:
        self._engine: AnyEngine | None = None
        self._meter: Meter | None = None
        self._profiler: TorchTraces | NvtxRanges | None = None
        self._resources: Resources
        self._cache: ObjectCache
        self._at_close: list[Callable[[], None]] = []
        self._listener: socket.socket | None = None
        self._rank, self._engine_name, self._timeout_s = 0, "", 0.0
        self._transfers: dict[str, WeightTransfer] = {}
        """Generator -> this rank's side of its weight syncs."""
        self._lock = threading.Lock()
        """Guards `_streaming`, which several chunks of a rollout use."""
        self._weights = WeightVersionGate()
        self._streaming: RolloutId | None = None
        """The newest rollout."""
        self._aborted: RolloutId | None = None
        self._interrupted: RolloutId | None = None
        """The newest rollout that a further attempt continues."""
        self._heartbeats = HeartbeatLimiter()

    # The driver calls a trainer's methods on trainers only, and a generator's on generators.

    @property
    def _trainer(self) -> TrainEngine:
        return cast(TrainEngine, self._engine)

    @property
    def _generator(self) -> GenerateEngine:
        return cast(GenerateEngine, self._engine)

    # -- what Ray calls

    def call(self, data: bytes, refs: list[ray.ObjectRef]) -> Any:
        """Call the method in the message with its arguments."""
        method, args, kwargs = deserialize(data, refs)
        return method(self, *args, **kwargs)

    # The driver owns the results of these two methods, so that columns outlive the worker.

    @ray.method(num_returns=2)
    def run_task(self, data: bytes, refs: list[ray.ObjectRef]) -> tuple[bytes, Batch | None]:
        """`run`: one message with all blocks, and their columns as one batch, if there are any."""
        work: TaskWork = deserialize(data, refs)
        blocks = list(self.run(work))
        batches = [block.ref for block in blocks if block.ref is not None]
        columns = Batch.concat(batches) if len(batches) > 1 else batches[0] if batches else None
        message, _ = serialize([block if block.ref is None else replace(block, ref=columns) for block in blocks])
        if isinstance(work, EngineWork) and work.cache_as and columns is not None:
            self._cache.put(work.step, work.cache_as, columns)
        return message, columns

    @ray.method(num_returns="streaming")
    def stream_task(self, data: bytes, refs: list[ray.ObjectRef]) -> Iterator[Batch | bytes | None]:
        """`stream`: pairs of columns (or None) and the message that names them.

        If the worker dies between the two, the driver does not receive the columns.
        """
        for message in self.stream(deserialize(data, refs)):
            data, batches = serialize(message)
            (columns,) = batches or (None,)
            yield columns
            yield data

    # -- start

    def describe(self) -> WorkerInfo:
        """The place of this worker, which listens on the port from now on."""
        address = ray.util.get_node_ip_address()
        self._listener = listen(address)
        port = self._listener.getsockname()[1]
        gpus = tuple(map(str, ray.get_gpu_ids()))
        (name, *_) = gpu_names(gpus) or [""]
        return WorkerInfo(socket.gethostname(), address, port, os.getpid(), gpus, name)

    def preload(self, pipeline: Pipeline, engine: str) -> None:
        """Import the libraries of `start`. Uses no device, because other engines may be measuring their memory."""
        section = pipeline.engines[engine]
        # Scanning thousands of new modules again and again takes a fifth of the time of the imports.
        gc.disable()
        try:
            backend_of(section).preload(section)
        finally:
            gc.freeze()
            gc.enable()

    def start(self, setup: StartEngine) -> None:
        """Become the rank that `setup` describes. Collective over the executor's ranks.

        A worker that has lost its engine builds it again. Its programs and environments live on, and wait.
        """
        if self._engine is not None:
            self._engine.close()
            self._engine = self._made_engine(setup)
            return
        # On machines where `dagrl launch` did not start, the first worker fetches the model.
        download(setup.pipeline)
        self._resources = Resources(setup.pipeline, setup.folder, setup.run_dir, setup.rank)
        record_calls(setup.run_dir, socket.gethostname())
        keep_ends_of_output()
        self._at_close = self._resources.at_close
        self._rank, self._engine_name = setup.rank, setup.engine or ""
        # Less than the driver's timeout: the worker's error is more specific.
        self._timeout_s = 0.95 * setup.pipeline.run.node_timeout_s
        self._cache = ObjectCache(self._timeout_s, keep=setup.engine is not None)
        if setup.engine is not None:
            # The driver and CPU workers do not import torch.
            from dagrl.workers.meter import Meter
            from dagrl.workers.profiling import make_profiler

            self._profiler = make_profiler(setup)
            self._engine = self._made_engine(setup)
            self._meter = Meter(setup.pipeline)
        # Engines collect garbage when they sleep. Freezing the existing objects saves half a second of scanning.
        gc.collect()
        gc.freeze()

    def _made_engine(self, setup: StartEngine) -> AnyEngine:
        from dagrl.workers.engine_factory import make_engine

        assert self._listener is not None, "start before describe"
        # The other ranks meet at this one: from now on, the engine owns the socket.
        is_meeting_point = self._listener.getsockname() == (setup.master_addr, setup.master_port)
        return make_engine(setup, self._listener.detach() if is_meeting_point else None)

    # -- tasks

    def run(self, work: TaskWork) -> Iterator[Block]:
        """Run one task on this rank's rows; yields a block for each output of the op."""
        op, context = self._prepare(work)
        with self._profiler.around(work) if self._profiler else nullcontext():
            begin = time.time()
            parts = self._cache.parts(work.step, work.parts)
            account = self._meter.begin(work, parts) if self._meter else None
            for output in op(parts, context):
                if self._meter:
                    self._meter.settle()
                usage = self._meter.usage(account, output) if self._meter and account else None
                yield block_of(work, output, begin, usage)
                begin = time.time()
            if isinstance(work, TrainWork) and work.publish:
                self.publish_weights(work.publish)

    def stream(self, work: RolloutWork) -> Iterator[StreamMessage]:
        """Run one chunk of a rollout; yields outputs as soon as there are any, and heartbeats in between."""
        op, context = self._prepare(work)
        rollout = work.rollout
        if self._aborted == rollout:
            return
        with self._lock:
            is_first, self._streaming = self._streaming != rollout, rollout
        assert self._meter is not None, "only engines stream"
        parts = self._cache.parts(work.step, work.parts)
        iterator = op(parts, context)
        sync = work.weights.sync if work.weights else 0
        while not self._weights.wait_for(sync, HEARTBEAT_S, unless=lambda: self._aborted == rollout):
            # The sync has a timeout itself.
            yield StreamMessage(())
        if self._aborted == rollout:
            return
        begin = time.time()
        account = self._meter.begin(work, parts, first=is_first)
        # One trace of a rank at a time: that of the first chunk.
        trace = self._profiler.around(work) if self._profiler and is_first else nullcontext()

        def outputs() -> Iterator[Output]:
            with trace:
                yield from iterator

        def sampled_tokens() -> int:
            return self._generator.sampled_tokens

        background = BackgroundIterator(outputs())
        # Signals that the driver may send the next chunk, which keeps chunks in order.
        yield StreamMessage((Heartbeat(sampled_tokens()),))
        while (made := background.take(HEARTBEAT_S, work.gather_s)) is not None:
            if self._aborted == rollout:
                # Again: the op may have sent requests since the first abort.
                self._generator.abort()
            items: list[Block | Heartbeat] = []
            for unfinished in (False, True):
                if alike := [output for output in made if output.unfinished == unfinished]:
                    if items:
                        yield StreamMessage(tuple(items))
                    output = Output.together(alike)
                    usage = self._meter.usage(account, output)
                    items = [block_of(work, output, begin, usage)]
            if heartbeat := self._heartbeats.next(sampled_tokens, last=background.ended):
                items.append(heartbeat)
            if items:
                yield StreamMessage(tuple(items), last=background.ended)
                if background.ended:
                    return
        if heartbeat := self._heartbeats.next(sampled_tokens, last=True):
            yield StreamMessage((heartbeat,), last=True)

    def abort(self, rollout: RolloutId, *, interrupted: bool = False) -> None:
        """End a rollout: its chunks return their responses so far, and later chunks return nothing.

        `interrupted`: a further attempt will continue the conversations, which wait for it.
        """
        if interrupted:
            self._interrupted = rollout
        self._aborted = rollout
        self._weights.recheck()
        self._generator.abort()

    def request_limits(self, longest: int) -> RequestLimits:
        return self._generator.request_limits(longest)

    def _prepare(self, work: TaskWork) -> tuple[Op, Context]:
        self._cache.forget(work.committed)
        context = Context(work, self._resources, self._engine)
        if isinstance(work, RolloutWork):
            partial = {group: rollout for group, rollout in work.begun.items() if isinstance(rollout, PartialRollout)}
            begun = {group: self._cache.partial_rollout(rollout, work.outputs) for group, rollout in partial.items()}
            context = replace(
                context,
                begun=begun,
                aborted=lambda: self._aborted == work.rollout,
                interrupted=lambda: self._interrupted == work.rollout,
            )
        return load_op(work.op, self._resources.folder), context

    # -- weights

    def offer_weights(self, follower: str, route: WeightRoute) -> Offer | None:
        """The endpoint where a generator's processes reach this rank, if they need one. It never changes."""
        return self._transfer_to(follower, route).offer()

    def send_weights(self, follower: str, route: WeightRoute, sync: int) -> SendResult:
        """Send the engine's weights to a generator. Collective."""
        return self._transfer_to(follower, route).send(sync)

    def receive_weights(self, request: UpdateWeightsRequest) -> float:
        """Load the weights that `send_weights` sends; returns the seconds taken."""
        from dagrl.workers.weight_transfer import update_weights

        sent: list[SendResult] = get_objects(request.send_results, self._timeout_s, "the trainer's weights")
        seconds = update_weights(self._generator, self._rank, request, sent, self._timeout_s)
        self._weights.open(request.sync)
        return seconds

    def publish_weights(self, folder: str) -> None:
        """Write the engine's weights as a Hugging Face folder. Collective. Raises OSError."""
        from dagrl.workers.weight_transfer import write_weights

        model = self._resources.pipeline.model_of(self._engine_name)
        write_weights(self._trainer, model, Path(folder), writes=self._rank == 0)

    def load_published(self, folder: str, version: int) -> None:
        """Load the weights written by another run's `publish_weights`. Raises OSError, ValueError."""
        from dagrl.workers.weight_transfer import read_weights

        read_weights(self._generator, Path(folder), version)

    def _transfer_to(self, follower: str, route: WeightRoute) -> WeightTransfer:
        from dagrl.workers.weight_transfer import WeightTransfer

        if follower not in self._transfers:
            self._transfers[follower] = WeightTransfer(self._trainer, self._rank, route, self._timeout_s)
        return self._transfers[follower]

    # -- memory and state

    def sleep(self, residency: Residency) -> SleepReport:
        """Offload the engine's device memory down to `residency`. Collective."""
        if residency is Residency.ASLEEP:
            for transfer in self._transfers.values():
                transfer.release()
        assert self._engine is not None, "only engines sleep"
        return self._engine.sleep(residency)

    def wake(self, residency: Residency) -> None:
        """Onload the engine up to `residency`. Collective."""
        assert self._engine is not None, "only engines sleep"
        self._engine.wake(residency)

    def save(self, folder: Path, asynchronous: bool = False) -> None:
        """Write the engine's state, or start writing it. Collective."""
        self._trainer.save(folder, asynchronous=asynchronous)

    def finish_save(self) -> bool:
        return self._trainer.finish_save(wait=False)

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)

    # -- records

    def store_columns(self, folder: Path, wanted: Sequence[ColumnsToStore]) -> list[StoredBlock]:
        """Store columns of objects in a folder. Raises OSError, ObjectTimeoutError."""
        store = ColumnStore(folder)
        # One after the other, because together they may exceed the memory.
        return [
            store.put_block(get_objects([columns.ref], self._timeout_s, "columns to record")[0], columns.names)
            for columns in wanted
        ]

    def copy_weights(self, source: Worker, version: int) -> None:
        """Load the weights of a trained engine in this process."""
        self._generator.load_weights(source._trainer.export_weights(BUCKET_BYTES), version)

    def weight_digests(self) -> WeightDigests:
        """The digests of the engine's weights, on rank 0. Collective."""
        from dagrl.weight_sync.digest import weight_digests

        return weight_digests(self._trainer.export_weights(BUCKET_BYTES))

    def close(self) -> None:
        for end in self._at_close:
            end()
        for transfer in self._transfers.values():
            transfer.close()
        if self._profiler is not None:
            self._profiler.close()
        if self._engine is not None:
            self._engine.close()
