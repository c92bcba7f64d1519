"""Time a sync through the object store, sent by one rank of a trainer or by all owners of its weights at once.

    python benchmarks/sync_owners.py --out FOLDER --model small --pipeline-parallel 2
    python benchmarks/sync_owners.py --out FOLDER --model small_moe --expert-parallel 2

Ranks are Ray actors with Megatron engines. Prints seconds until the slowest rank has stored its buckets, seconds in
which a process reads all of them, and bytes gathered between ranks; medians of `--rounds` syncs, one and all in turn.
What arrives is compared bit by bit. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any, cast

import ray
import torch
from options import parsed, parser_of

from dagrl.scheduler.weight_route import WeightRoute
from dagrl.workers.messages import SendResult

_STORE_BYTES = 4 * 2**30
_MIB = 2**20


class Rank:
    """A rank of the trainer, which can send both ways."""

    def __init__(self, rank: int, ranks: int, port: int, model: Path, parallel: dict[str, int], bucket: int) -> None:
        from dagrl.backends.backend import RankContext
        from dagrl.backends.base import TrainEngine
        from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine
        from dagrl.backends.megatron.section import MegatronEngineSpec
        from dagrl.config.schema import ModelSpec
        from dagrl.workers.weight_transfer import WeightTransfer

        spec = MegatronEngineSpec.model_validate({"backend": "megatron", "group": "train", "parallel": parallel})
        context = RankContext(rank, ranks, "127.0.0.1", port, 600.0, 1)
        engine = MegatronEngine(ModelSpec(path=model), spec, context, train_steps=1, trainable=False)
        route = WeightRoute("object_store", bucket, 1, ((0,),))
        self._transfers = {True: WeightTransfer(engine, rank, route, 600.0)}
        # A second way with everything on rank 0, as over NCCL.
        self._transfers[False] = WeightTransfer(cast(TrainEngine, _OneSender(engine)), rank, route, 600.0)
        self._gathered = 0
        exchange = torch.distributed.all_to_all_single

        def counted(output: torch.Tensor, *args: Any, **options: Any) -> Any:
            self._gathered += output.nbytes
            return exchange(output, *args, **options)

        torch.distributed.all_to_all_single = counted

    def send(self, by_owner: bool) -> tuple[SendResult, int]:
        """Send all weights; the result, and the bytes that this rank gathered."""
        torch.distributed.barrier()
        self._gathered = 0
        return self._transfers[by_owner].send(0), self._gathered


class _OneSender:
    """An engine whose rank 0 owns all buckets."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def weight_exporter(self, bucket_bytes: int, *, by_owner: bool) -> Any:
        return self._engine.weight_exporter(bucket_bytes)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, model="small")
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args, model = parsed(parser, rounds=2)
    ranks = args.pipeline_parallel * args.expert_parallel
    parallel = {
        "pipeline_model_parallel_size": args.pipeline_parallel,
        "expert_model_parallel_size": args.expert_parallel,
    }
    ray.init(num_cpus=ranks, object_store_memory=_STORE_BYTES, include_dashboard=False, log_to_driver=False)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    make = ray.remote(num_cpus=1, num_gpus=int(torch.cuda.is_available()))(Rank).remote
    trainer = [make(rank, ranks, port, model, parallel, args.bucket_mib * _MIB) for rank in range(ranks)]
    rounds: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    arrived: dict[bool, dict[str, torch.Tensor]] = {}
    for number in range(args.rounds + 1):
        for by_owner in rounds:
            found, arrived[by_owner] = _sync(trainer, by_owner)
            # Plans are made in the first.
            rounds[by_owner] += [found] if number else []
        assert arrived[False].keys() == arrived[True].keys()
        assert all(torch.equal(tensor, arrived[True][name]) for name, tensor in arrived[False].items())
    results = {
        "owners" if by_owner else "one": {name: statistics.median(each[name] for each in found) for name in found[0]}
        for by_owner, found in rounds.items()
    }
    for name, result in results.items():
        print(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in result.items()))
    line = json.dumps({"model": args.model, **parallel, **results})
    print(line)
    if args.json is not None:
        args.json.write_text(line + "\n")


def _sync(trainer: list[Any], by_owner: bool) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The figures of one sync, and what has arrived."""
    begun = time.perf_counter()
    sent = ray.get([rank.send.remote(by_owner) for rank in trainer])
    read = time.perf_counter()
    refs = {index: ref for result, _ in sent for index, ref in result.refs.items()}
    buckets = [ray.get(refs[index]).unpack() for index in sorted(refs)]
    arrived = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    figures = {
        "gb": sent[0][0].nbytes / 1e9,
        "send_s": max(result.seconds for result, _ in sent),
        "read_s": time.perf_counter() - read,
        "sync_s": time.perf_counter() - begun,
        "gathered_gb": sum(gathered for _, gathered in sent) / 1e9,
        "senders": float(sum(bool(result.refs) for result, _ in sent)),
    }
    return figures, arrived


if __name__ == "__main__":
    main()
