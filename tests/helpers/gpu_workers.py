"""The processes of `gpu_sync`: ranks of a trainer, and processes that take weights as SGLang's do.

Each sees one GPU, and does what the parent says: a method's name and its arguments. Without GPUs, all are on the CPU.
"""

import contextlib
import gc
import os
import resource
import socket
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 60.0
SEED = 7


def serve(line: Connection, kind: str) -> None:
    """Do what comes by `line`, until it is closed; answers are (succeeded, result or traceback)."""
    import torch

    torch.set_num_threads(1)
    worker: Any = {"trainer": Trainer, "receiver": TakingProcess}[kind]()
    while True:
        try:
            method, args, kwargs = line.recv()
        except EOFError:
            os._exit(0)
        try:
            line.send((True, getattr(worker, method)(*args, **kwargs)))
        except Exception:  # noqa: BLE001 - the parent tells it
            line.send((False, traceback.format_exc()))


def device_here() -> Any:
    """The process's GPU, or the CPU."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def memory() -> dict[str, float]:
    """MiB that are used on the GPU, by all processes, and by this process on the host; open files."""
    import torch

    gc.collect()
    used = 0.0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used = (total - free) / 2**20
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"gpu_mib": used, "host_mib": host, "files": float(len(os.listdir("/proc/self/fd")))}  # noqa: PTH208


class Trainer:
    """A rank of a trainer."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._sender: Any = None
        self._tensors: list[Any] = []

    def listen(self) -> int:
        """A port for the ranks to meet at."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return self._listener.getsockname()[1]

    def start(self, rank: int, world: int, port: int, size: str, reach: str, parallel: dict, bucket: int) -> Any:
        """Become a rank of a Megatron engine. Collective; returns the offer."""
        from qwen_part import fields

        from dagrl.backends.backend import RankContext
        from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine
        from dagrl.backends.megatron.section import MegatronEngineSpec
        from dagrl.config.schema import ModelSpec
        from dagrl.weight_sync.sender import WeightSender

        model = ModelSpec.model_validate({"init": fields(size), "tokenizer": {"kind": "characters", "alphabet": "ab"}})
        spec = MegatronEngineSpec.model_validate({"backend": "megatron", "group": "train", "parallel": parallel})
        listen_fd = self._listener.detach() if rank == 0 else None
        ranks = RankContext(rank, world, "127.0.0.1", port, TIMEOUT_S, SEED, listen_fd)
        self._engine = MegatronEngine(model, spec, ranks, train_steps=1, trainable=False)
        exporter = self._engine.weight_exporter(bucket, by_owner=reach == "cuda_ipc")
        self._sender = WeightSender(exporter, reach, host="127.0.0.1", timeout_s=TIMEOUT_S)
        return self._sender.offer()

    def start_plain(self, size: str, reach: str, bucket: int) -> Any:
        """Become a trainer of one rank that only has weights, of any size, at once; returns the offer."""
        from qwen_part import full_tensors

        from dagrl.weight_sync.sender import WeightSender

        device = device_here()
        self._tensors = list(full_tensors(size, device, _dtype(device)))
        self._sender = WeightSender(_Plain(self._tensors, bucket, device), reach, host="127.0.0.1", timeout_s=TIMEOUT_S)
        return self._sender.offer()

    def scale(self, factor: float) -> None:
        """Change all weights, by a power of two: without rounding."""
        import torch

        with torch.no_grad():
            for chunk in self._engine._model.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(factor)

    def send(self, number: int, waves: list[int], passes: int) -> tuple[float, int, Any]:
        """Send; seconds, bytes and what was sent."""
        begun = time.perf_counter()
        sent = self._sender.send(number, waves, passes=passes)
        return time.perf_counter() - begun, sent.nbytes, sent

    def sleep_and_wake(self) -> None:
        """As between two of its turns."""
        self._sender.disconnect()
        self._engine.sleep()
        self._engine.wake()

    def rest(self) -> None:
        self._sender.disconnect()

    def memory(self) -> dict[str, float]:
        return memory()

    def stop(self) -> None:
        """Be nothing again."""
        self._sender.close()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._sender = None
        self._tensors = []
        memory()

    def nccl_rate(self, rank: int, port: int, nbytes: int, bucket: int) -> float:
        """Bytes a second of bare broadcasts between two trainers; gloo's without GPUs."""
        import torch
        import torch.distributed as dist

        device = device_here()
        store = dist.TCPStore(
            "127.0.0.1", port, 2, is_master=rank == 0, master_listen_fd=self._listener.detach() if rank == 0 else None
        )
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=2)
        buffers = [torch.zeros(bucket, dtype=torch.uint8, device=device) for _ in range(2)]
        seconds = []
        for _ in range(6):
            dist.barrier()
            begun = time.perf_counter()
            for index in range(nbytes // bucket):
                dist.broadcast(buffers[index % 2], 0)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        dist.destroy_process_group()
        return nbytes // bucket * bucket / min(seconds)


class TakingProcess:
    """A process that holds a part of a model."""

    def start(self, size: str, rank: int, parts: int) -> None:
        from qwen_part import QwenPart

        from dagrl.weight_sync.loader import WeightLoader
        from dagrl.weight_sync.receiver import WeightReceiver

        device = device_here()
        self._model = model = QwenPart(size, rank, parts, device, _dtype(device))
        self._loader = WeightLoader(lambda: dict(model.named_parameters()), model.load_weights)
        self._receiver = WeightReceiver(self._loader, device, f"part {rank}")
        self._size, self._rank, self._parts = size, rank, parts

    def take(self, number: int, senders: dict[str, Any]) -> float:
        """Take part in a sync; seconds."""
        import torch

        from dagrl.weight_sync.receiver import Route

        begun = time.perf_counter()
        with torch.inference_mode():
            self._receiver.receive(Route(number, senders, TIMEOUT_S))
        return time.perf_counter() - begun

    def check(self, factor: float) -> None:
        """Whether it holds the start weights times `factor`, to the bit, and copies them without its loader."""
        import torch
        from qwen_part import QwenPart, fields

        from dagrl.backends.runtime.initial_weights import weight_source
        from dagrl.config.schema import ModelSpec

        spec = ModelSpec.model_validate(
            {"init": fields(self._size), "tokenizer": {"kind": "characters", "alphabet": "ab"}}
        )
        source = weight_source(spec, SEED)
        device = device_here()
        wanted = QwenPart(self._size, self._rank, self._parts, device, _dtype(device))
        wanted.load_weights((name, source.get(name).to(device, _dtype(device)) * factor) for name in source.names())
        for (name, found), expected in zip(self._model.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(found, expected), f"{name} is not what the trainer has"
        assert self._loader.replays, "the loader does nothing but copy"

    def memory(self) -> dict[str, float]:
        return memory()

    def gpu(self) -> str:
        from dagrl.weight_sync.staging import gpu_name

        return gpu_name(device_here())


class _Plain:
    """An exporter of tensors on one device, as planned as Megatron's."""

    def __init__(self, tensors: list[tuple[str, Any]], bucket: int, device: Any) -> None:
        from dagrl.weight_sync.manifest import Manifest

        self._tensors, self.device = dict(tensors), device
        self.manifest = Manifest.cut(([(name, t.dtype, tuple(t.shape))] for name, t in tensors), bucket)
        self._packs: dict[int, tuple[Any, Any]] = {}
        self.process_group = None

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        yield

    def fill(self, index: int, buffer: Any) -> None:
        from dagrl.weight_sync.copies import CopyPlan

        if index not in self._packs or self._packs[index][0] is not buffer:
            views = self.manifest.buckets[index].views(buffer)
            self._packs[index] = buffer, CopyPlan((place, self._tensors[name]) for name, place in views)
        self._packs[index][1].run()


def _dtype(device: Any) -> Any:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32
