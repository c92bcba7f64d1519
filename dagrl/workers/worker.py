"""The actor shell around one engine rank, or around the host's ops: fetches rows, runs the op, publishes what it made.

Every method that takes time is called by `dagrl.orchestrator.driver` through `dagrl.workers.groups.worker_group`.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from dagrl.backends.base import NO_WEIGHTS, Appetite, Slept
from dagrl.config.residency import Residency
from dagrl.data.batch import Batch
from dagrl.imports import lean_imports
from dagrl.ops.base import Context, Op, Output, Part, Resources
from dagrl.ops.registry import load_op
from dagrl.workers.background_iterator import Pump
from dagrl.workers.heartbeat import INTERVAL_S, Pulse
from dagrl.workers.messages import (
    Beat,
    Block,
    Effort,
    Handed,
    Span,
    StartEngine,
    Take,
    TaskWork,
    Told,
    Whereabouts,
)
from dagrl.workers.object_cache import Blocks
from dagrl.workers.objects import get_within
from dagrl.workers.serialization import pack, unpack
from dagrl.workers.version_gate import Arrivals

if TYPE_CHECKING:
    from dagrl.scheduler.weight_route import WeightRoute
    from dagrl.weight_sync.protocol import Offer
    from dagrl.workers.meter import Meter
    from dagrl.workers.profiling import Profiler
    from dagrl.workers.weight_transfer import HandingOut


class Worker:
    """One process of an executor. Where it generates, several of its methods may run at once, in threads of Ray's."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._meter: Meter | None = None
        self._profiler: Profiler | None = None
        self._resources: Resources | None = None
        self._blocks: Blocks | None = None
        self._replica = 0
        self._listener: socket.socket | None = None
        self._rank, self._timeout_s = 0, 0.0
        self._handing_out: dict[str, HandingOut] = {}
        """Where the engine is followed: its half of weight syncs, by follower."""
        self._lock = threading.Lock()
        """For what several shares of a run use: `_streaming`."""
        self._weights = Arrivals()
        self._streaming: tuple[int, str, int, int] | None = None
        """Step, task, round and attempt of the newest run that streams."""
        self._aborted: tuple[int, str, int, int] | None = None
        self._pulse = Pulse()

    def call(self, data: bytes, refs: list[ray.ObjectRef]) -> Any:
        """Call the method that a parcel names, with the arguments in it: they are pickled once for all ranks."""
        method, args = unpack(data, refs)
        return getattr(self, method)(*args)

    def describe(self) -> Whereabouts:
        """Where this worker is, with a port that it listens on from now on."""
        address = ray.util.get_node_ip_address()
        self._listener = socket.create_server((address, 0))
        port = self._listener.getsockname()[1]
        machine = ray.get_runtime_context().get_node_id()
        return Whereabouts(
            socket.gethostname(), address, port, os.getpid(), tuple(map(str, ray.get_gpu_ids())), machine
        )

    def start(self, setup: StartEngine) -> None:
        """Become the rank that `setup` describes. Collective over the executor's ranks."""
        self._resources = Resources(setup.pipeline, setup.folder, setup.run_dir)
        self._rank, self._replica = setup.rank, setup.replica
        # These waits are over before the driver's, who knows less of what it waits for.
        self._timeout_s = 0.95 * setup.pipeline.run.node_timeout_s
        self._blocks = Blocks(self._timeout_s, keep=setup.engine is not None)
        if setup.engine is not None:
            with lean_imports():
                # The driver and the host's worker do without torch.
                from dagrl.workers.engine_factory import make_engine
                from dagrl.workers.meter import Meter
                from dagrl.workers.profiling import make_profiler

            self._profiler = make_profiler(setup)
            self._engine = make_engine(setup, self._hand_over_listener(setup))
            self._meter = Meter(setup.pipeline)
        # An engine that sleeps looks for garbage. What is here now stays, and to look through it takes half a second.
        gc.collect()
        gc.freeze()

    def _hand_over_listener(self, setup: StartEngine) -> int | None:
        """The listening socket, which belongs to the engine from now on, where others meet at it."""
        assert self._listener is not None, "start before describe"
        if self._listener.getsockname() != (setup.master_addr, setup.master_port):
            return None
        return self._listener.detach()

    def run(self, work: TaskWork) -> Iterator[Block]:
        """Run one task on this rank's rows; yields a block whenever the op has an output."""
        op, context = self._prepare(work)
        with self._profiler.around(work) if self._profiler else nullcontext():
            yield from self._outputs(op, work, context)

    # What these two hand back, and Ray keeps in its store, is the driver's, which has asked, and outlives the worker.

    @ray.method(num_returns=2)
    def run_whole(self, data: bytes, refs: list[ray.ObjectRef]) -> tuple[bytes, Batch | None]:
        """`run`: a message with all of its blocks, and their columns as one batch, if there are any."""
        work: TaskWork = unpack(data, refs)
        blocks = list(self.run(work))
        batches = [block.ref for block in blocks if block.ref is not None]
        columns = Batch.concat(batches) if len(batches) > 1 else batches[0] if batches else None
        message, _ = pack([block if block.ref is None else replace(block, ref=columns) for block in blocks])
        if work.keeps_as and columns is not None:
            assert self._blocks is not None, "run before start"
            self._blocks.keep(work.step, work.keeps_as, columns)
        return message, columns

    @ray.method(num_returns="streaming")
    def run_streamed(self, data: bytes, refs: list[ray.ObjectRef]) -> Iterator[Batch | bytes | None]:
        """`stream`: before each message the columns that are in it, or None.

        Columns whose message does not come any more were never told of.
        """
        for told in self.stream(unpack(data, refs)):
            message, batches = pack(told)
            (columns,) = batches or (None,)
            yield columns
            yield message

    def _prepare(self, work: TaskWork) -> tuple[Op, Context]:
        """The op and what it is told; lets go of blocks of steps that are over."""
        resources, blocks = self._resources, self._blocks
        assert resources is not None and blocks is not None, "run before start"
        blocks.forget(work.committed)
        context = Context(
            node=resources.pipeline.nodes[work.node] if work.node else None,
            step=work.step,
            validation=work.validation,
            position=work.position,
            shards=work.shards,
            resources=resources,
            engine=self._engine,
            frozen=work.frozen,
            replica=self._replica,
            carried=work.carried,
            first_group=work.first_group,
            prompts=work.prompts,
            begins=work.begins,
            ends=work.ends,
            sampled_by=work.sampled_by,
            kl_weight=work.kl_weight,
            version=work.weights.version if work.weights else NO_WEIGHTS,
            begun={group: blocks.begun(begun, work.outputs) for group, begun in work.begun.items()},
        )
        return load_op(work.op, resources.folder), context

    def _parts(self, work: TaskWork) -> list[Part]:
        assert self._blocks is not None, "run before start"
        return self._blocks.parts(work.step, work.parts)

    def _outputs(self, op: Op, work: TaskWork, context: Context) -> Iterator[Block]:
        begin = time.time()
        parts = self._parts(work)
        account = self._meter.begin(work, parts) if self._meter else None
        for output in op(parts, context):
            if self._meter:
                self._meter.settle()
            span = Span(begin, time.time())
            effort = self._meter.effort(account, output) if self._meter and account else None
            yield self._publish(work, output, span, effort)
            begin = time.time()

    def stream(self, work: TaskWork) -> Iterator[Told]:
        """Run one task that streams: what the op has made whenever there is something, and signs of life between."""
        op, context = self._prepare(work)
        run = (work.step, work.task, work.round, work.attempt)
        if self._aborted == run:
            return
        with self._lock:
            first, self._streaming = self._streaming != run, run
        assert self._meter is not None, "only engines stream"
        parts = self._parts(work)
        made_of = op(parts, context)
        sync = work.weights.sync if work.weights else 0
        while not self._weights.wait_for(sync, INTERVAL_S, unless=lambda: self._aborted == run):
            # How long that may take is for those to say who bring them.
            yield Told(())
        if self._aborted == run:
            return
        begin = time.time()
        account = self._meter.begin(work, parts, first=first)
        # One trace of a rank at a time: that of its first share.
        watched = self._profiler.around(work) if self._profiler and first else nullcontext()

        def outputs() -> Iterator[Output]:
            with watched:
                yield from made_of

        def sampled_tokens() -> int:
            return self._engine.sampled_tokens

        pump = Pump(outputs())
        # The next share may come: this one is before it.
        yield Told((Beat(sampled_tokens()),))
        while (made := pump.take(INTERVAL_S, work.gather_s)) is not None:
            if self._aborted == run:
                # Again: what the op had not asked for yet when the abort came has begun since then.
                self._engine.abort()
            told: list[Block | Beat] = []
            for unfinished in (False, True):
                if alike := [output for output in made if output.unfinished == unfinished]:
                    if told:
                        yield Told(tuple(told))
                    output = Output.together(alike)
                    effort = self._meter.effort(account, output)
                    told = [self._publish(work, output, Span(begin, time.time()), effort)]
            if beat := self._pulse.beat(sampled_tokens, last=pump.ended):
                told.append(beat)
            if told:
                yield Told(tuple(told), last=pump.ended)
                if pump.ended:
                    return
        if beat := self._pulse.beat(sampled_tokens, last=True):
            yield Told((beat,), last=True)

    def abort(self, step: int, task: str, round_: int, attempt: int) -> None:
        """End a run that streams: its shares come out as they are, and further ones at once and empty."""
        self._aborted = (step, task, round_, attempt)
        self._weights.look_again()
        self._engine.abort()

    def appetite(self, longest: int) -> Appetite:
        """See `GenerateEngine.appetite`."""
        return self._engine.appetite(longest)

    def _publish(self, work: TaskWork, output: Output, span: Span, effort: Effort | None) -> Block:
        if not work.hands_in:
            return Block(np.zeros(0, dtype=np.int64), None, None, span, output.shards, effort=effort)
        columns = {work.outputs[name]: column for name, column in output.columns.items() if name in work.outputs}
        prefix = ("val/" if work.validation else "") + work.told_as
        return Block(
            output.rows,
            Batch(output.rows, columns) if columns else None,
            None if output.unfinished else _tokens(output, work.outputs),
            span,
            output.shards,
            {prefix + name: stat for name, stat in output.stats.items()},
            dict(output.facts),
            effort,
            output.positions,
            output.unfinished,
        )

    def offer_weights(self, follower: str, route: WeightRoute) -> Offer | None:
        """Where a follower's processes find this rank, if they need it; the same at every sync."""
        return self._hand_out_to(follower, route).offer()

    def send_weights(self, follower: str, route: WeightRoute, number: int) -> Handed:
        """Hand the engine's weights out to a follower, for sync `number`. Collective."""
        return self._hand_out_to(follower, route).hand_out(number)

    def receive_weights(self, take: Take) -> float:
        """Take the weights that `send_weights` hands out, meanwhile or before; how many seconds that took."""
        handed = None
        if take.handed is not None:
            (handed,) = get_within([take.handed], self._timeout_s, "the trainer's weights")
        seconds = self._take_in(take, handed)
        self._weights.arrived(take.number)
        return seconds

    def _take_in(self, take: Take, handed: Handed | None) -> float:
        from dagrl.workers.weight_transfer import take_in

        return take_in(self._engine, self._rank, take, handed, self._timeout_s)

    def _hand_out_to(self, follower: str, route: WeightRoute) -> HandingOut:
        from dagrl.workers.weight_transfer import HandingOut

        if follower not in self._handing_out:
            self._handing_out[follower] = HandingOut(self._engine, self._rank, route, self._timeout_s)
        return self._handing_out[follower]

    def sleep(self, residency: Residency) -> Slept:
        """Give the engine's device memory back, down to `residency`. Collective."""
        if residency is Residency.ASLEEP:
            for handing_out in self._handing_out.values():
                handing_out.rest()
        return self._engine.sleep(residency)

    def wake(self, residency: Residency) -> None:
        """Bring the engine back up to `residency`. Collective."""
        self._engine.wake(residency)

    def save(self, folder: Path, asynchronous: bool = False) -> None:
        """Write the engine's state, or begin to. Collective."""
        self._engine.save(folder, asynchronous=asynchronous)

    def finish_save(self) -> bool:
        """Whether the state is written."""
        return self._engine.finish_save(wait=False)

    def load(self, folder: Path) -> None:
        """Bring back the engine's state. Collective."""
        self._engine.load(folder)

    def close(self) -> None:
        """Free what the engine holds."""
        for handing_out in self._handing_out.values():
            handing_out.close()
        if self._profiler is not None:
            self._profiler.close()
        if self._engine is not None:
            self._engine.close()


def _tokens(output: Output, published: Mapping[str, str]) -> np.ndarray | None:
    """Token ids that the published columns add to each row: the ragged columns of whole numbers hold them."""
    added = [
        column.lengths
        for name, column in output.columns.items()
        if name in published and name not in output.uncounted
        if column.offsets is not None and column.values.dtype == np.int64
    ]
    return np.sum(added, axis=0) if added else None
