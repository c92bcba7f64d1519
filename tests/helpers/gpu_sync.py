"""Check on GPUs what only they can show of weight syncs: CUDA IPC, NCCL, memory, speed. Prints a line for each case.

    python tests/helpers/gpu_sync.py --gpus 1          # and 2, and 4

Trainers are Megatron engines; what takes the weights are processes that hold parts of a Qwen as SGLang does. Each
process sees its own GPU, as under Ray. Without GPUs everything runs on the CPU, by shared memory and gloo.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_workers import TIMEOUT_S, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
BUCKET = 4 << 20
LARGE_BUCKET = 256 << 20
CYCLES = 200
LARGEST_GROWTH_MIB = 48.0
LEAST_OF_NCCL = 0.7
"""Bytes a second of a whole sync, its messages and first and last copies included, as a part of NCCL's own."""


class Worker:
    """A process on one GPU."""

    def __init__(self, kind: str, gpu: int, **environment: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, kind), daemon=True)
        with _environment(CUDA_VISIBLE_DEVICES=_visible(gpu), **environment):
            self.process.start()
        theirs.close()

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._line.send((method, args, kwargs))

    def end(self) -> Any:
        assert self._line.poll(3 * TIMEOUT_S), "a process does not answer"
        succeeded, result = self._line.recv()
        if not succeeded:
            raise RuntimeError(result)
        return result

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.begin(method, *args, **kwargs)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@dataclass
class Fleet:
    """Processes on the GPUs there are: trainers, and receivers on the GPUs that a case names."""

    trainers: dict[int, Worker] = field(default_factory=dict)
    receivers: dict[int, Worker] = field(default_factory=dict)
    number: int = 0

    def trainers_on(self, gpus: list[int]) -> list[Worker]:
        self.trainers |= {gpu: Worker("trainer", gpu) for gpu in gpus if gpu not in self.trainers}
        return [self.trainers[gpu] for gpu in gpus]

    def receivers_on(self, gpus: list[int]) -> list[Worker]:
        self.receivers |= {gpu: Worker("receiver", gpu) for gpu in gpus if gpu not in self.receivers}
        return [self.receivers[gpu] for gpu in gpus]

    def kill(self) -> None:
        for worker in (*self.trainers.values(), *self.receivers.values()):
            worker.kill()


@dataclass
class Pair:
    """A trainer and a generator."""

    fleet: Fleet
    trainers: list[Worker]
    receivers: list[Worker]
    senders: list[dict[str, Any]]
    """Of each receiver."""
    waves: list[list[int]]
    """Which receivers come together, wave by wave."""
    near: bool

    def sync(self, passes: int = 1) -> tuple[float, float, int, Any]:
        """Seconds of sending and of taking, bytes, and what rank 0 sent."""
        self.fleet.number += 1
        number = self.fleet.number
        for rank, trainer in enumerate(self.trainers):
            if self.near:
                counts = [int(rank in wave) for wave in self.waves]
            else:
                counts = [len(wave) if rank == 0 else 0 for wave in self.waves]
            trainer.begin("send", number, counts, passes)
        took = []
        for wave in self.waves:
            for place in wave:
                self.receivers[place].begin("take", number, self.senders[place])
            took += [self.receivers[place].end() for place in wave]
        sent = [trainer.end() for trainer in self.trainers]
        from dagrl.weight_sync.protocol import refuse_unknown_names

        refuse_unknown_names([each for *_, each in sent])
        return sent[0][0], max(took), sent[0][1], sent[0][2]


@contextlib.contextmanager
def megatron_pair(
    fleet: Fleet,
    trainer_gpus: list[int],
    receiver_gpus: list[int],
    *,
    size: str = "tiny",
    parts: int = 1,
    waves: list[list[int]] | None = None,
    **parallel: Any,
) -> Iterator[Pair]:
    """A Megatron engine on some GPUs, and generators of `parts` GPUs each on some; near where those are the same."""
    near = trainer_gpus == receiver_gpus
    trainers, receivers = fleet.trainers_on(trainer_gpus), fleet.receivers_on(receiver_gpus)
    ports = [trainer.call("listen") for trainer in trainers]
    for rank, trainer in enumerate(trainers):
        reach = "cuda_ipc" if near else "broadcast"
        trainer.begin("start", rank, len(trainers), ports[0], size, reach, parallel, BUCKET)
    offers = [trainer.end() for trainer in trainers]
    for place, receiver in enumerate(receivers):
        receiver.call("start", size, place % parts, parts)
    try:
        yield Pair(fleet, trainers, receivers, _senders(offers, receivers), waves or [[*range(len(receivers))]], near)
    finally:
        for trainer in trainers:
            trainer.begin("stop")
        for trainer in trainers:
            trainer.end()


@contextlib.contextmanager
def plain_pair(fleet: Fleet, trainer_gpu: int, receiver_gpu: int, size: str) -> Iterator[Pair]:
    """Weights of any size on one GPU, and a generator on one."""
    near = trainer_gpu == receiver_gpu
    [trainer], [receiver] = fleet.trainers_on([trainer_gpu]), fleet.receivers_on([receiver_gpu])
    offer = trainer.call("start_plain", size, "cuda_ipc" if near else "broadcast", LARGE_BUCKET)
    receiver.call("start", size, 0, 1)
    try:
        yield Pair(fleet, [trainer], [receiver], _senders([offer], [receiver]), [[0]], near)
    finally:
        trainer.call("stop")


def _senders(offers: list[Any], receivers: list[Worker]) -> list[dict[str, Any]]:
    there = [offer for offer in offers if offer is not None]
    if all(offer.gpu for offer in there):
        return [{offer.gpu: offer.address for offer in there}] * len(receivers)
    return [{"": there[place if len(there) > 1 else 0].address} for place in range(len(receivers))]


# -- cases ------------------------------------------------------------------------------------------------------------


def weights_arrive(fleet: Fleet, trainer_gpus: list[int], receiver_gpus: list[int], **options: Any) -> str:
    """Three syncs of weights that change, the first two compared; after a sleep of the trainer too."""
    with megatron_pair(fleet, trainer_gpus, receiver_gpus, **options) as pair:
        factor = 1.0
        for passes in (2, 2, 1):
            pair.sync(passes)
            for receiver in pair.receivers:
                receiver.call("check", factor)
            factor *= 2
            for trainer in pair.trainers:
                trainer.call("scale", 2.0)
        for trainer in pair.trainers:
            trainer.begin("sleep_and_wake")
        for trainer in pair.trainers:
            trainer.end()
        send, take, nbytes, _ = pair.sync()
        for receiver in pair.receivers:
            receiver.call("check", factor)
    return f"{nbytes / 1e6:.0f} MB in {1000 * send:.1f} ms after a sleep ({1000 * take:.1f} ms to take)"


def memory_stays(fleet: Fleet, trainer_gpus: list[int], receiver_gpus: list[int]) -> str:
    """Nothing grows over many syncs."""
    with megatron_pair(fleet, trainer_gpus, receiver_gpus) as pair:
        workers = [*pair.trainers, *pair.receivers]
        for _ in range(5):
            pair.sync()
        before = [worker.call("memory") for worker in workers]
        begun = time.monotonic()
        for _ in range(CYCLES):
            pair.sync()
        seconds = time.monotonic() - begun
        after = [worker.call("memory") for worker in workers]
    growth = {
        name: max(late[name] - early[name] for late, early in zip(after, before, strict=True)) for name in before[0]
    }
    for name, more in growth.items():
        assert more <= (LARGEST_GROWTH_MIB if name.endswith("mib") else 0), f"{name} grew by {more:.0f}"
    return f"{CYCLES} syncs of {1000 * seconds / CYCLES:.1f} ms; " + ", ".join(
        f"{n} +{g:.0f}" for n, g in growth.items()
    )


def speed(fleet: Fleet, trainer_gpu: int, receiver_gpu: int, size: str, limit_ms: float | None = None) -> str:
    """How long a sync of a whole model takes; far away, as a part of NCCL's own rate on these GPUs."""
    with plain_pair(fleet, trainer_gpu, receiver_gpu, size) as pair:
        first, *_ = pair.sync(2)
        times = [pair.sync() for _ in range(8)][2:]
    send = statistics.median(each[0] for each in times)
    take = statistics.median(each[1] for each in times)
    nbytes = times[0][2]
    told = f"{nbytes / 1e9:.2f} GB in {1000 * max(send, take):.1f} ms, {nbytes / max(send, take) / 1e9:.0f} GB/s"
    told += f" (send {1000 * send:.1f}, take {1000 * take:.1f}, first with comparison {first:.2f} s)"
    if trainer_gpu != receiver_gpu:
        two = fleet.trainers_on([trainer_gpu, receiver_gpu])
        port = two[0].call("listen")
        for rank, worker in enumerate(two):
            worker.begin("nccl_rate", rank, port, nbytes, LARGE_BUCKET)
        rate = max(worker.end() for worker in two)
        share = nbytes / max(send, take) / rate
        assert share >= LEAST_OF_NCCL or not _gpus(), f"{told}; {share:.2f} of NCCL's {rate / 1e9:.0f} GB/s"
        return f"{told}; {share:.2f} of NCCL's {rate / 1e9:.0f} GB/s"
    assert limit_ms is None or not _gpus() or 1000 * max(send, take) <= limit_ms, told
    return told


def a_death_is_noticed(fleet: Fleet, trainer_gpu: int, receiver_gpu: int) -> str:
    """A receiver that dies before it has taken all ends the sync soon, and a new one is served."""
    with megatron_pair(fleet, [trainer_gpu], [receiver_gpu]) as pair:
        pair.sync()
        receiver = pair.receivers[0]
        pair.fleet.number += 1
        receiver.begin("take", pair.fleet.number, pair.senders[0])
        # It has asked for the weights by then; stopped, it takes none of them.
        time.sleep(0.5)
        os.kill(receiver.process.pid or 0, signal.SIGSTOP)
        pair.trainers[0].begin("send", pair.fleet.number, [1], 1)
        time.sleep(0.2)
        begun = time.monotonic()
        receiver.kill()
        try:
            pair.trainers[0].end()
        except RuntimeError as error:
            seconds, said = time.monotonic() - begun, str(error)
        else:
            raise AssertionError("weights were sent to a process that took none")
        assert seconds < TIMEOUT_S / 2 and "PeerError" in said, f"after {seconds:.1f} s: {said}"
        fleet.receivers[receiver_gpu] = pair.receivers[0] = successor = Worker("receiver", receiver_gpu)
        successor.call("start", "tiny", 0, 1)
        pair.sync(2)
        successor.call("check", 1.0)
    return f"noticed in {seconds:.1f} s: {said.strip().splitlines()[-1][:100]}"


def segments_that_grow(fleet: Fleet) -> str:
    """A trainer whose allocator has segments that cannot be shared."""
    if 0 in fleet.trainers:
        fleet.trainers.pop(0).kill()
    fleet.trainers[0] = Worker("trainer", 0, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    try:
        return weights_arrive(fleet, [0], [0])
    finally:
        fleet.trainers.pop(0).kill()


def the_wrong_gpu(fleet: Fleet) -> str:
    """CUDA IPC to another GPU is refused with a sentence."""
    if not _gpus():
        return "there are no GPUs to tell apart"
    with megatron_pair(fleet, [0], [0]) as pair:
        [elsewhere] = fleet.receivers_on([1])
        elsewhere.call("start", "tiny", 0, 1)
        pair.fleet.number += 1
        pair.trainers[0].begin("send", pair.fleet.number, [1], 1)
        elsewhere.begin("take", pair.fleet.number, pair.senders[0])
        for worker in (pair.trainers[0], elsewhere):
            with contextlib.suppress(RuntimeError):
                worker.end()
                raise AssertionError("weights went to another GPU by CUDA IPC")
        pair.sync(2)
    return "refused"


Case = Callable[[Fleet], str]
CASES: dict[int, dict[str, Case]] = {
    1: {
        "near, 1 rank to 1": lambda fleet: weights_arrive(fleet, [0], [0]),
        "near, mixture": lambda fleet: weights_arrive(fleet, [0], [0], size="tiny_moe"),
        "near, memory": lambda fleet: memory_stays(fleet, [0], [0]),
        "near, a death": lambda fleet: a_death_is_noticed(fleet, 0, 0),
        "near, 1.7B": lambda fleet: speed(fleet, 0, 0, "1.7b", limit_ms=30.0),
        "near, segments that grow": segments_that_grow,
    },
    2: {
        "near, TP2 to TP1 twice": lambda fleet: weights_arrive(
            fleet, [0, 1], [0, 1], tensor_model_parallel_size=2, sequence_parallel=True
        ),
        "near, TP2 to TP2": lambda fleet: weights_arrive(
            fleet, [0, 1], [0, 1], parts=2, tensor_model_parallel_size=2, sequence_parallel=True
        ),
        "near, PP2 to two stages": lambda fleet: weights_arrive(
            fleet, [0, 1], [0, 1], waves=[[0], [1]], pipeline_model_parallel_size=2
        ),
        "near, EP2 to EP2": lambda fleet: weights_arrive(
            fleet, [0, 1], [0, 1], size="tiny_moe", parts=2, expert_model_parallel_size=2
        ),
        "near, the wrong GPU": the_wrong_gpu,
        "far, 1 rank to 1": lambda fleet: weights_arrive(fleet, [0], [1]),
        "far, memory": lambda fleet: memory_stays(fleet, [0], [1]),
        "far, a death": lambda fleet: a_death_is_noticed(fleet, 0, 1),
        "far, 1.7B": lambda fleet: speed(fleet, 0, 1, "1.7b"),
        "far, 8B": lambda fleet: speed(fleet, 0, 1, "8b"),
    },
    4: {
        "far, TP2 to TP2": lambda fleet: weights_arrive(
            fleet, [0, 1], [2, 3], parts=2, tensor_model_parallel_size=2, sequence_parallel=True
        ),
        "far, PP2 to TP1 twice": lambda fleet: weights_arrive(fleet, [0, 1], [2, 3], pipeline_model_parallel_size=2),
        "far, EP2 to EP2": lambda fleet: weights_arrive(
            fleet, [0, 1], [2, 3], size="tiny_moe", parts=2, expert_model_parallel_size=2
        ),
        "far, two stages": lambda fleet: weights_arrive(fleet, [0, 1], [2, 3], waves=[[0], [1]]),
        "near, TP2 x DP2 to TP2 twice": lambda fleet: weights_arrive(
            fleet, [0, 1, 2, 3], [0, 1, 2, 3], parts=2, tensor_model_parallel_size=2, sequence_parallel=True
        ),
    },
}


def main() -> None:
    """Run the cases of a number of GPUs; ends with the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, choices=sorted(CASES))
    parser.add_argument("--only", nargs="*", help="names of cases, or parts of them")
    args = parser.parse_args()
    fleet, failed, begun = Fleet(), 0, time.monotonic()
    for name, case in CASES[args.gpus].items():
        if args.only and not any(part in name for part in args.only):
            continue
        started = time.monotonic()
        try:
            verdict = case(fleet)
        except Exception:  # noqa: BLE001 - a case that fails costs itself and a new start
            failed += 1
            verdict = "PROBLEM: " + traceback.format_exc()
            fleet.kill()
            fleet = Fleet()
        print(f"{name:32} {time.monotonic() - started:5.1f} s  {verdict}", flush=True)
    fleet.kill()
    print(f"{failed} failed, {time.monotonic() - begun:.0f} s", flush=True)
    sys.exit(min(failed, 100))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _visible(gpu: int) -> str:
    if not _gpus():
        return ""
    there = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there.split(",")[gpu] if there else str(gpu)


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if __name__ == "__main__":
    main()
