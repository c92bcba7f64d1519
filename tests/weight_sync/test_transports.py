"""Transports deliver exactly the weights that were sent, and no process waits for one that has died."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from fused_model import HEAD_DIM, HIDDEN, Model, weights

from dagrl.weight_sync import receiver as receiver_module
from dagrl.weight_sync import transports as transports_module
from dagrl.weight_sync.channel import Address, Listener, PeerError, connect
from dagrl.weight_sync.exporter import BucketExporter, IteratedExporter
from dagrl.weight_sync.loader import WeightLoader
from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.protocol import SendReport, refuse_unknown_names
from dagrl.weight_sync.receiver import Route, WeightReceiver
from dagrl.weight_sync.sender import TransportName, WeightSender
from dagrl.weight_sync.staging import ReleasableBuffer

TIMEOUT_S = 30.0
REACHES = ["cuda_ipc", "broadcast"]
Tensors = dict[str, torch.Tensor]


class Source:
    """A sender in the test's process, of tensors that may change between syncs."""

    def __init__(
        self, reach: TransportName, tensors: Tensors, timeout_s: float = TIMEOUT_S, bucket_bytes: int = 700
    ) -> None:
        self.tensors = tensors
        exporter = IteratedExporter(lambda: iter(self.tensors.items()), bucket_bytes, torch.device("cpu"))
        self.sender = WeightSender(exporter, reach, host="127.0.0.1", timeout_s=timeout_s)
        offer = self.sender.offer()
        assert offer is not None
        self.address, self.timeout_s, self.number = offer.address, timeout_s, 0

    def route(self, place: str = "", *, keep_buffers: bool = False) -> Route:
        self.number += 1
        return Route(self.number, {place: self.address}, self.timeout_s, keep_buffers)


class Generator:
    """A process that holds a part of a model, told what to do from here."""

    def __init__(self, rank: int = 0, parts: int = 1, slow: bool = False, poor: bool = False) -> None:
        context = multiprocessing.get_context("fork")
        self.line, theirs = context.Pipe()
        self.process = context.Process(
            target=_generator, args=(self.line, theirs, rank, parts, slow, poor), daemon=True
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.rank, self.parts = rank, parts

    def take(self, route: Route) -> None:
        self.line.send(route.to_json())

    def answer(self) -> dict[str, Any]:
        assert self.line.poll(TIMEOUT_S), "no answer"
        return self.line.recv()

    def assert_holds(self, tensors: Tensors) -> dict[str, Any]:
        answer = self.answer()
        assert answer["failure"] is None
        wanted = Model(self.rank, self.parts)
        wanted.load_weights(tensors.items())
        for name, tensor in wanted.named_parameters():
            assert torch.equal(torch.from_numpy(answer["held"][name]), tensor), name
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _generator(others: Connection, line: Connection, rank: int, parts: int, slow: bool, poor: bool) -> None:
    # Or it would never hear that the test's process has ended.
    others.close()
    gc.freeze()
    torch.set_num_threads(1)
    model = Model(rank, parts)
    calls = 0

    def load(given: Any) -> None:
        nonlocal calls
        calls += 1
        if slow:
            time.sleep(0.15)
        model.load_weights(given)

    receiver = WeightReceiver(
        WeightLoader(lambda: dict(model.named_parameters()), load), torch.device("cpu"), f"part {rank}"
    )
    if poor:
        receiver_module._manifest = without_memory
    while True:
        try:
            route = Route.from_json(line.recv())
        except EOFError:
            os._exit(0)
        failure = None
        calls = 0
        with torch.inference_mode():
            try:
                receiver.receive(route)
            except PeerError as error:
                failure = str(error)
        held = {name: tensor.numpy().copy() for name, tensor in model.named_parameters()}
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        told = {"failure": failure, "held": held, "calls": calls, "files": files}
        told["group"] = receiver._group.name if receiver._group else None
        told["buffer"] = sum(len(buffer.bytes) for buffer in receiver._buffers if buffer.is_allocated)
        line.send(told)


def without_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no memory is left\nand more of that")


@pytest.fixture
def generators() -> Iterator[Callable[..., Generator]]:
    started = []

    def start(*args: Any, **kwargs: Any) -> Generator:
        started.append(Generator(*args, **kwargs))
        return started[-1]

    yield start
    for generator in started:
        generator.end()


@pytest.fixture
def sources() -> Iterator[Callable[..., Source]]:
    made = []

    def make(*args: Any, **kwargs: Any) -> Source:
        made.append(Source(*args, **kwargs))
        return made[-1]

    yield make
    for source in made:
        source.sender.close()


@pytest.mark.parametrize("reach", REACHES)
def test_both_halves_of_a_model_hold_what_was_sent_sync_after_sync(generators, sources, reach):
    halves = [generators(rank, 2) for rank in (0, 1)]
    source = sources(reach, weights())
    groups = set()
    for seed in (0, 1, 2):
        source.tensors = weights(seed)
        route = source.route()
        for half in halves:
            half.take(route)
        sent = source.sender.send(route.number, [2])
        answers = [half.assert_holds(source.tensors) for half in halves]
        assert [answer["calls"] > 0 for answer in answers] == [seed == 0] * 2, "the loader, the first time only"
        groups |= {answer["group"] for answer in answers}
        assert sent.nbytes == sum(tensor.nbytes for tensor in weights().values())
        if seed == 0:
            assert sent.names == tuple(weights()) and sent.used == (1 << len(weights())) - 1
        else:
            assert sent.used is None
    assert len(groups) == 1, "connected once"


@pytest.mark.parametrize("reach", REACHES)
def test_sent_weights_are_compared(generators, sources, reach):
    # An odd number of buckets, so that the second pass begins in the other buffer.
    source, generator = sources(reach, weights(), bucket_bytes=1000), generators()
    assert len(source.sender._exporter.manifest.buckets) % 2
    for seed in (0, 1):
        source.tensors = weights(seed)
        generator.take(route := source.route())
        source.sender.send(route.number, [1], passes=2)
        generator.assert_holds(source.tensors)


@pytest.mark.parametrize("reach", REACHES)
def test_parts_that_cannot_take_weights_together_take_them_in_turns(generators, sources, reach):
    source, stages = sources(reach, weights()), [generators(), generators()]
    for seed in (0, 1):
        source.tensors = weights(seed)
        route = source.route()
        stages[0].take(route)

        def go_on(route: Route = route, tensors: Tensors = source.tensors) -> None:
            stages[0].assert_holds(tensors)
            stages[1].take(route)

        with in_background(go_on):
            source.sender.send(route.number, [1, 1])
        stages[1].assert_holds(source.tensors)


@pytest.mark.parametrize("reach", REACHES)
def test_a_restarted_generator_is_served_like_the_first(generators, sources, reach):
    source, first, second = sources(reach, weights()), generators(0, 2), generators(1, 2)
    serve(source, first, second)
    second.end()
    serve(source, first, generators(1, 2))


@pytest.mark.parametrize("reach", REACHES)
def test_a_restarted_sender_serves_like_the_first(generators, sources, reach):
    generator = generators()
    serve(sources(reach, weights()), generator)
    other = sources(reach, weights(1))
    assert serve(other, generator)[0]["calls"] == 0, "what it sends is known"


def test_a_broadcast_has_one_sender():
    exporter = BucketExporter([[("a", torch.zeros(3))]])
    exporter.manifest = Manifest.cut_by_owner({1: [[("a", torch.float32, (3,))]]}, 64)
    with pytest.raises(AssertionError, match="cannot broadcast"):
        WeightSender(exporter, "broadcast", host="127.0.0.1", timeout_s=TIMEOUT_S)


def test_a_group_is_made_anew_after_a_rest(generators, sources):
    source, generator = sources("broadcast", weights()), generators()
    groups = []
    for _ in range(3):
        groups.append(serve(source, generator)[0]["group"])
        source.sender.disconnect()
    assert len(set(groups)) == 3


@pytest.mark.parametrize("reach", REACHES)
def test_nothing_is_left_over_from_a_sync(generators, sources, reach):
    source, generator = sources(reach, weights()), generators()
    serve(source, generator)
    ours, theirs = (len(os.listdir("/proc/self/fd")), serve(source, generator)[0]["files"])  # noqa: PTH208
    for _ in range(5):
        answer = serve(source, generator)[0]
    assert (len(os.listdir("/proc/self/fd")), answer["files"]) == (ours, theirs)  # noqa: PTH208


# -- what is wrong


def test_buffers_stay_allocated_between_syncs_with_keep_buffers(generators, sources):
    source, generator = sources("broadcast", weights()), generators()
    kept = [serve(source, generator, keep_buffers=keeps)[0]["buffer"] > 0 for keeps in (True, True, False)]
    assert kept == [True, True, False]


@pytest.mark.parametrize("reach", REACHES)
def test_a_tensor_that_does_not_fit_is_named_and_the_others_continue(generators, sources, reach):
    tensors = weights() | {"layers.0.k": torch.zeros(3 * HEAD_DIM, HIDDEN)}
    source, halves = sources(reach, tensors), [generators(rank, 2) for rank in (0, 1)]
    route = source.route()
    for half in halves:
        half.take(route)
    with pytest.raises(ValueError, match=r"part [01]: the server's model could not load layers.0.k \[12, 8\]"):
        source.sender.send(route.number, [2])
    assert [half.answer()["failure"] for half in halves] == [None, None]
    # And both sides are good for another try.
    serve(sources(reach, weights()), *halves)


@pytest.mark.parametrize("reach", REACHES)
def test_tensors_without_a_parameter_are_reported(generators, sources, reach):
    source, generator = sources(reach, weights() | {"layers.1.extra": torch.zeros(2)}), generators()
    generator.take(route := source.route())
    sent = source.sender.send(route.number, [1])
    with pytest.raises(ValueError, match=r"the generator has no parameter for layers\.1\.extra; use the same model"):
        refuse_unknown_names([sent])


def test_a_tensor_with_a_place_in_some_process_is_known():
    names = ("a", "b", "c")
    refuse_unknown_names([SendReport(1, 0b011, names), SendReport(1, None, ()), SendReport(1, 0b100, names)])
    refuse_unknown_names([SendReport(1, None, ())])
    with pytest.raises(ValueError, match="no parameter for b; use"):
        refuse_unknown_names([SendReport(1, None, ()), SendReport(1, 0b001, names), SendReport(1, 0b100, names)])
    with pytest.raises(ValueError, match="no parameter for a, b, d, e, f and 2 more; use"):
        refuse_unknown_names([SendReport(1, 0b100, tuple("abcdefgh"))])


@pytest.mark.parametrize("reach", REACHES)
def test_a_generator_that_dies_ends_the_sync(generators, sources, reach):
    source, generator = sources(reach, weights(), bucket_bytes=2000), generators(slow=True)
    generator.take(route := source.route())
    timer = threading.Timer(0.4, os.kill, (generator.process.pid, signal.SIGKILL))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(PeerError, match="has ended"):
        source.sender.send(route.number, [1])
    assert time.monotonic() - begun < TIMEOUT_S / 2
    timer.join()
    serve(source, generators())


class OneOfSeveral:
    """What a rank sees of the group of all ranks, the first."""

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("reach", REACHES)
def test_a_rank_of_several_goes_through_all_buckets_though_its_generator_is_gone(
    generators, sources, reach, monkeypatch
):
    """The others fill them together with it, and would wait for it."""
    source, generator = sources(reach, weights(), bucket_bytes=2000), generators(slow=True)
    exporter, filled, told = source.sender._exporter, [], []
    fill = exporter.fill

    def note(index: int, buffer: Any) -> None:
        filled.append(index)
        fill(index, buffer)

    exporter.fill = note
    exporter.process_group = OneOfSeveral()
    monkeypatch.setattr(transports_module.dist, "broadcast", lambda buffer, source, group: told.append(len(buffer)))
    generator.take(route := source.route())
    timer = threading.Timer(0.4, os.kill, (generator.process.pid, signal.SIGKILL))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(PeerError, match="has ended"):
        source.sender.send(route.number, [1])
    assert time.monotonic() - begun < TIMEOUT_S / 2
    timer.join()
    buckets = exporter.manifest.buckets
    assert filled == list(range(len(buckets)))
    assert told == ([bucket.nbytes for bucket in buckets] if reach == "cuda_ipc" else [])
    serve(source, generators())


@pytest.mark.parametrize("reach", REACHES)
def test_a_generator_does_not_wait_for_a_sender_that_has_died(generators, sources, reach):
    source, generator = sources(reach, weights(), bucket_bytes=2000), generators(slow=True)
    generator.take(route := source.route())
    exporter = source.sender._exporter
    fill = exporter.fill

    def fail(index: int, buffer: Any) -> None:
        if index == 3:
            raise KeyboardInterrupt
        fill(index, buffer)

    exporter.fill = fail
    with pytest.raises(KeyboardInterrupt):
        source.sender.send(route.number, [1])
    assert "ended" in generator.answer()["failure"]
    exporter.fill = fill
    serve(source, generator)


@pytest.mark.parametrize("reach", REACHES)
def test_generators_that_do_not_come_are_counted(generators, sources, reach):
    source, generator = sources(reach, weights(), timeout_s=5.0), generators()
    generator.take(route := source.route())
    with pytest.raises(PeerError, match=r"waited 5 s for 2 processes of generators .*: 1 of 2 connected"):
        source.sender.send(route.number, [2])
    # Whichever of the two waits was over first.
    assert re.search("the sender of weights has ended|waited 5 s for an answer", generator.answer()["failure"])


@pytest.mark.parametrize("reach", REACHES)
def test_a_generator_without_memory_leaves_the_sync(generators, sources, reach):
    source, well, poor = sources(reach, weights(), timeout_s=10.0), generators(0, 2), generators(1, 2, poor=True)
    route = source.route()
    for generator in (well, poor):
        generator.take(route)
    with pytest.raises(ValueError, match="part 1: no memory is left"):
        source.sender.send(route.number, [2])
    assert [generator.answer()["failure"] is None for generator in (well, poor)] == [False, True]
    poor.end()
    serve(source, well, generators(1, 2))


def test_a_failed_allocation_is_reported(sources, monkeypatch):
    source = sources("cuda_ipc", weights(), timeout_s=10.0)
    receiver = WeightReceiver(WeightLoader(dict, len), torch.device("cpu"), "part 0")
    receiver._buffers = [ReleasableBuffer(64, "cpu")]
    monkeypatch.setattr(receiver._buffers[0], "allocate", without_memory)
    route = source.route()
    with in_background(lambda: receiver.receive(route)), pytest.raises(ValueError, match="part 0: no memory is left"):
        source.sender.send(route.number, [1])


def test_a_generator_on_a_gpu_without_a_trainer_is_an_error(generators, sources):
    source, generator = sources("cuda_ipc", weights()), generators()
    generator.take(route := source.route(place="GPU-1234"))
    with pytest.raises(ValueError, match=r"part 0 is on a CPU, where the trainer has no rank: weight_sync.route cuda_"):
        source.sender.send(route.number, [1])
    assert "choose broadcast" in generator.answer()["failure"]


# -- listeners


@pytest.mark.parametrize(("host", "token"), [(None, "0" * 32), ("127.0.0.1", "0" * 32), (None, "\xe4")])
def test_clients_with_a_wrong_token_are_rejected(host, token):
    listener = Listener(host)
    own = listener.address
    strange = Address(own.path, own.host, own.port, token)
    lines = [
        connect(strange, 5.0, "a listener", sync=1),
        connect(own, 5.0, "a listener", sync=2),
        connect(own, 5.0, "a listener", sync=1),
    ]
    ((channel, hello),) = listener.accept(1, 5.0, "a client", sync=1)
    assert hello == {"sync": 1}
    channel.send(word="welcome")
    assert lines[2].receive(5.0, "a word") == {"word": "welcome"}
    for line in lines[:2]:
        with pytest.raises(PeerError, match="a listener has ended"):
            line.receive(5.0, "a word")
    listener.close()
    with pytest.raises(PeerError, match=r"a listener does not answer at"):
        connect(own, 0.1, "a listener")


def test_a_connection_without_a_hello_is_rejected():
    listener = Listener("127.0.0.1")
    with socket.create_connection((listener.address.host, listener.address.port)) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        line.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError, match="waited 0 s for a client: 0 of 1"):
            listener.accept(1, 0.3, "a client")
    listener.close()


def serve(source: Source, *generators: Generator, keep_buffers: bool = False) -> list[dict[str, Any]]:
    """A sync that goes well."""
    route = source.route(keep_buffers=keep_buffers)
    for generator in generators:
        generator.take(route)
    source.sender.send(route.number, [len(generators)])
    return [generator.assert_holds(source.tensors) for generator in generators]


@contextlib.contextmanager
def in_background(function: Callable[[], None]) -> Iterator[None]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
