"""Weights of a worker's engine on their way: in a weight sync, or through a folder to other parts of a pipeline.

`dagrl.orchestrator.groups.weight_syncs` coordinates the sides of a sync, and `dagrl.weight_sync` has the transports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import ray

from dagrl.backends.base import GenerateEngine, ReceivesWeights, TrainEngine
from dagrl.config.schema import ModelSpec
from dagrl.scheduler.weight_route import WeightRoute
from dagrl.weight_sync.exporter import PackedBucket, packed
from dagrl.weight_sync.fp8 import Fp8Exporter
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.protocol import Offer
from dagrl.weight_sync.receiver import Route
from dagrl.weight_sync.sender import WeightSender
from dagrl.workers.messages import BUCKET_BYTES, SendResult, UpdateWeightsRequest
from dagrl.workers.object_cache import get_objects


class WeightTransfer:
    """Sends a trainer rank's weights to one generator."""

    def __init__(self, engine: TrainEngine, rank: int, route: WeightRoute, timeout_s: float) -> None:
        """`timeout_s` bounds every wait for the other side."""
        self._rank, self._route = rank, route
        # One rank broadcasts: each receiver gets all bytes over its own link, for any number of senders, and each
        # further sender would cost every receiver a communicator of half a GiB.
        exporter = engine.weight_exporter(route.bucket_bytes, by_owner=route.way != "broadcast")
        self._exporter = exporter if route.fp8 is None else Fp8Exporter(exporter, route.fp8)
        self._sender: WeightSender | None = None
        if route.way != "object_store":
            self._sender = WeightSender(
                self._exporter,
                route.way,
                host=ray.util.get_node_ip_address(),
                timeout_s=timeout_s,
            )
        # Ray does not count refs inside a message reliably until it arrives, so they are kept until the next sync.
        self._refs: dict[int, ray.ObjectRef] = {}

    def offer(self) -> Offer | None:
        """The endpoint of this rank, if the generator's processes connect to it."""
        return self._sender.offer() if self._sender else None

    def send(self, sync: int) -> SendResult:
        """Send all weights. Collective over the trainer's ranks."""
        start = time.perf_counter()
        if self._sender is None:
            self._refs = {}
            self._refs = {index: ray.put(bucket) for index, bucket in packed(self._exporter, self._rank)}
            return SendResult(time.perf_counter() - start, self._exporter.manifest.nbytes, refs=self._refs)
        sent = self._sender.send(sync, self._receivers(), passes=self._route.passes)
        return SendResult(time.perf_counter() - start, sent.nbytes, sent)

    def release(self) -> None:
        """Free device memory between syncs: communicators."""
        if self._sender is not None:
            self._sender.disconnect()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _receivers(self) -> list[int]:
        """Processes that connect to this rank, by wave: the one on the same slot, or all of them to rank 0."""
        if self._route.way == "cuda_ipc":
            return [int(self._rank in wave) for wave in self._route.waves]
        return [len(wave) if self._rank == 0 else 0 for wave in self._route.waves]


def update_weights(
    engine: GenerateEngine, rank: int, request: UpdateWeightsRequest, sent: Sequence[SendResult], timeout_s: float
) -> float:
    """Load new weights into a generator's rank; returns the seconds taken.

    `sent`: the results of the trainer's ranks, if the weights go through the object store; else empty.
    """
    start = time.perf_counter()
    if sent:
        refs = {index: ref for result in sent for index, ref in result.refs.items()}
        engine.load_weights(_buckets([refs[index] for index in sorted(refs)], timeout_s), request.version)
    else:
        cast(ReceivesWeights, engine).update_weights(_route(request, rank, timeout_s), request.version)
    return time.perf_counter() - start


def _buckets(refs: Sequence[ray.ObjectRef], timeout_s: float) -> Iterator[Bucket]:
    for ref in refs:
        bucket: PackedBucket = get_objects([ref], timeout_s, "a bucket of weights")[0]
        yield bucket.unpack()


def _route(request: UpdateWeightsRequest, rank: int, timeout_s: float) -> Route:
    offers = [offer for offer in request.offers if offer is not None]
    if all(offer.gpu for offer in offers):
        senders = {offer.gpu: offer.address for offer in offers}
    else:
        # Without GPU ids: the sender on the same slot, or the only one.
        senders = {"": (offers[rank] if len(offers) > 1 else offers[0]).address}
    return Route(request.sync, senders, timeout_s, request.keep_buffers)


def write_weights(engine: TrainEngine, model: ModelSpec, folder: Path, *, writes: bool) -> None:
    """Write the weights of an engine as a Hugging Face folder. Collective; the rank with `writes` has and writes them.

    Raises OSError.
    """
    from dagrl.model_files.hf_folder import copy_tokenizer, write_hf_folder
    from dagrl.model_files.library_model import architecture, load_hf_config

    weights = (tensor for bucket in engine.export_weights(BUCKET_BYTES) for tensor in bucket)
    if not writes:
        assert next(weights, None) is None, "only one rank has the weights"
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = load_hf_config(model)
    write_hf_folder(folder, config, architecture(config), weights, source=model.path)
    copy_tokenizer(model, folder)


def read_weights(engine: GenerateEngine, folder: Path, version: int) -> None:
    """Load the weights written by `write_weights`. Raises OSError or ValueError."""
    from dagrl.model_files.stored_weights import SafetensorsFolder

    source = SafetensorsFolder(folder)

    def buckets() -> Iterator[Bucket]:
        bucket: Bucket = []
        held = 0
        for name in source.names():
            bucket.append((name, source.get(name)))
            held += bucket[-1][1].nbytes
            if held >= BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
        yield bucket

    engine.load_weights(buckets(), version)
