"""Time how new weights reach the generator in a pipeline of dagrl.

    python benchmarks/weight_sync.py --out FOLDER [--model 1.7b|8b] [--apart] [--mode together|turns] [--adapters RANK]

Trainer and generator are on one GPU, or with ``--apart`` on two; then NCCL's own broadcast of as many bytes, in buckets
of the same size, is timed on these GPUs too. A first run sends everything twice and compares it (checksum mode), and
must pass; the second is timed over some steps with next to no samples. The times are those of timeline.json and of the
steps' metrics. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dagrl_run import DagrlRun, Event
from options import add_backend, parsed, parser_of
from pipelines import Load, arguments_of, grpo_pipeline, write_prompt_file
from ranks import Meetings, run_ranks
from reports import Verdict, tell

LONGEST_TOGETHER_S = 0.060
LONGEST_ADAPTERS_S = 0.010
LEAST_OF_NCCL = 0.70
_START_S = 300.0
_STEP_S = 60.0
_MIB = 2**20
_WITHOUT_MOMENTS = {"optimizer": "sgd", "sgd_momentum": 0.0, "use_distributed_optimizer": False, "lr": 1e-6}


def main() -> None:
    """Compare, then time; tell both."""
    args, model = _arguments()
    load = Load(4, 2, 16, 16)
    steps = args.warmup + args.rounds
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    rate = _nccl_rate(args.out, nbytes, args.bucket_mib) if args.apart and not args.adapters else None
    what = f"{args.model}_adapters" if args.adapters else args.model
    name = f"sync_{args.backend}_{what}_{'apart' if args.apart else args.mode}"
    prompts = write_prompt_file(args.out / f"{name}_prompts.parquet", load, steps)
    pipeline = grpo_pipeline(
        f"sync-{args.model}",
        model,
        prompts,
        load,
        arguments_of(args.backend, load, model),
        apart=args.apart,
        sleep=args.mode == "turns",
        backend=args.backend,
    )
    # Adam's moments of 8 billion parameters have no room on one GPU, and are nothing to a sync.
    pipeline["engines"]["actor"]["optimizer"] = _WITHOUT_MOMENTS if args.model == "8b" else {"lr": 1e-6}
    if args.adapters:
        pipeline["engines"]["actor"] |= {"optimizer": {"lr": 1e-5}, "lora": {"rank": args.adapters, "merge": False}}
    sync = {"bucket_mib": args.bucket_mib}
    pipeline["engines"]["generator"]["weight_sync"] = sync | {"checksum": True}
    with DagrlRun(pipeline, args.out / f"{name}_compared") as run:
        run.wait_for_step(3, _START_S)
    print(f"what the generator holds is what was sent, {args.model}, 3 times", flush=True)
    pipeline["engines"]["generator"]["weight_sync"] = sync
    with DagrlRun(pipeline, args.out / f"{name}_timed") as run:
        run.wait_for_step(steps, _START_S + steps * _STEP_S)
        metrics = [line for line in run.metrics() if args.warmup < line["step"] <= steps]
        events = run.events()
    if args.adapters:
        nbytes = round(1e9 * statistics.median(line["sync/gb"] for line in metrics))
    _report(args, nbytes, rate, events, metrics)


def _arguments() -> tuple[argparse.Namespace, Path]:
    parser = parser_of(__doc__)
    add_backend(parser)
    parser.add_argument("--apart", action="store_true", help="trainer and generator on a GPU each")
    parser.add_argument("--mode", choices=("together", "turns"), default="together", help="turns: both sleep")
    parser.add_argument("--adapters", type=int, metavar="RANK", help="send low-rank adapters alone")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before that")
    return parsed(parser, rounds=3, warmup=1)


# -- NCCL alone


def _nccl_rate(folder: Path, nbytes: int, bucket_mib: int) -> float:
    """Bytes a second of broadcasts in buckets from one GPU to another (gloo's, where there is no GPU)."""
    told = folder / "nccl_broadcast.json"
    run_ranks(2, partial(_broadcast_on_rank, Meetings(1), nbytes, bucket_mib * _MIB, told))
    seconds = json.loads(told.read_text())
    return nbytes / statistics.median(seconds)


def _broadcast_on_rank(meetings: Meetings, nbytes: int, bucket: int, told: Path, rank: int) -> None:
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    context = next(meetings.join(rank, 2))
    store = dist.TCPStore(
        context.master_addr, context.master_port, 2, is_master=rank == 0, master_listen_fd=context.listen_fd
    )
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=2)
    buffers = [torch.zeros(bucket, dtype=torch.uint8, device="cuda" if on_gpu else "cpu") for _ in range(2)]
    full, rest = divmod(nbytes, bucket)
    seconds = []
    for _ in range(8):
        dist.barrier()
        begun = time.perf_counter()
        for number in range(full):
            dist.broadcast(buffers[number % 2], 0)
        if rest:
            dist.broadcast(buffers[0][:rest], 0)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        told.write_text(json.dumps(seconds[3:]))
    dist.barrier()
    dist.destroy_process_group()


# -- the pipeline


def _report(
    args: argparse.Namespace, nbytes: int, rate: float | None, events: list[Event], metrics: list[dict[str, Any]]
) -> None:
    steps = [line["step"] for line in metrics]
    waits = [_update_to_ready(events, step) for step in steps]
    syncs = [sum(event.seconds for event in events if event.step == step and event.name == "sync") for step in steps]
    sync, ready = statistics.median(syncs), statistics.median(seconds for seconds, _ in waits)
    between = {name for _, names in waits for name in names}
    phases = {
        name: statistics.median(line[name] for line in metrics if name in line)
        for name in sorted({name for line in metrics for name in line if name.startswith(("sync/", "time/sync"))})
    }
    where = "two GPUs" if args.apart else f"one GPU, {args.mode}"
    print(f"\n{args.model}, {nbytes / 1e9:.2f} GB, {where}, buckets of {args.bucket_mib} MiB, {len(steps)} syncs")
    print(f"{'sync':40}{1000 * sync:10.1f} ms   {nbytes / sync / 1e9:8.1f} GB/s")
    print(f"{'from the end of update to ready':40}{1000 * ready:10.1f} ms")
    for name in sorted(between):
        median = statistics.median(names.get(name, 0.0) for _, names in waits)
        print(f"{'  of it ' + name:40}{1000 * median:10.1f} ms")
    for name, value in phases.items():
        print(f"{name:40}{value:10.4f}")
    verdicts = []
    if args.adapters:
        verdicts.append(Verdict("seconds of a sync of adapters alone", sync, "at most", LONGEST_ADAPTERS_S))
    elif rate is not None:
        print(f"{'NCCL broadcast alone':40}{1000 * nbytes / rate:10.1f} ms   {rate / 1e9:8.1f} GB/s")
        sent = phases.get("sync/send_s", sync)
        for what, seconds in (("sending, by the trainer's clock", sent), ("the sync, by the driver's", sync)):
            share = nbytes / seconds / rate
            verdicts.append(Verdict(f"rate of {what} / NCCL's broadcast", share, "at least", LEAST_OF_NCCL))
    elif args.model == "1.7b":
        verdicts.append(Verdict("seconds from update done to ready", ready, "at most", LONGEST_TOGETHER_S))
    result = {
        "model": args.model,
        "backend": args.backend,
        "where": where,
        "bytes": nbytes,
        "bucket_mib": args.bucket_mib,
        "checksum_passed": True,
        "sync_s": syncs,
        "update_to_ready_s": [seconds for seconds, _ in waits],
        "between_s": [names for _, names in waits],
        "phases": phases,
        "nccl_bytes_per_s": rate,
    }
    tell(result, verdicts, args.json)


def _update_to_ready(events: list[Event], step: int) -> tuple[float, dict[str, float]]:
    """Seconds from the end of the update before `step` to the moment at which its rollout may begin, and what ran then.

    That is when the sync is over, and whatever brings the generator back after it.
    """
    updates = [event.end for event in events if event.step == step - 1 and event.name == "update"]
    rollout = min(event.start for event in events if event.step == step and event.name == "rollout")
    assert updates, f"step {step - 1} has no update in the timeline"
    updated = max(updates)
    among = [event for event in events if event.start >= updated - 1e-3 and event.end <= rollout + 1e-3]
    names: dict[str, float] = {}
    for event in among:
        names[event.label] = names.get(event.label, 0.0) + event.seconds
    ready = max((event.end for event in among if event.name in ("sync", "wake")), default=rollout)
    return ready - updated, names


if __name__ == "__main__":
    main()
