"""Let a colocated pipeline take many turns, and watch its memory: sleep, wake and sync must leave nothing behind.

    python benchmarks/sleep_cycles.py --out FOLDER [--cycles 200] [--cache-tokens 3000000]

Each step of the run is a cycle: the trainer sleeps, the generator takes new weights, wakes, samples and sleeps, the
trainer wakes and trains. GPU memory is the driver's count for the whole GPU, which must be the run's alone; host memory
is the proportional share (PSS) of all processes of the run. What counts is the trend over the later cycles, by least
squares. With ``--cache-tokens`` the server has a cache of that size, and the share of its memory that a sleep gives
back counts too. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from dagrl_run import DagrlRun
from options import add_backend, parsed, parser_of
from pipelines import Load, arguments_of, cache_bytes, grpo_pipeline, write_prompt_file
from reports import Verdict, tell

GPU_MIB_A_CYCLE = 0.1
HOST_MIB_A_CYCLE = 0.5
LEAST_FREED = 0.9
"""Share of its memory that a server with a large cache gives back when it sleeps."""
_START_S = 240.0
_TOGETHER = 40
"""Cycles whose least memory is one figure: that both sleep is a matter of milliseconds, and mostly missed."""
_MIB = 2**20
_FREED = "memory/generator_freed_gib"


@dataclass(slots=True)
class Watch:
    """Memory in MiB, by the cycle in which it was looked at."""

    gpu: dict[int, list[float]] = field(default_factory=dict)
    host: dict[int, list[float]] = field(default_factory=dict)


def main() -> None:
    """Run, watch, tell the trend."""
    args, model = _arguments()
    load = Load(8, 2, 16, 16)
    prompts = write_prompt_file(args.out / "cycles_prompts.parquet", load, 16)
    server = arguments_of(args.backend, load, model)
    if args.cache_tokens:
        server |= _cache(args.backend, args.cache_tokens, model)
    pipeline = grpo_pipeline("cycles", model, prompts, load, server, sleep=True, backend=args.backend)
    begun = time.monotonic()
    with DagrlRun(pipeline, args.out / "cycles_run") as run:
        run.wait_for_step(1, _START_S)
        watch = _watch(run, args.cycles, begun + args.limit)
        metrics = run.metrics()
        events = [event for event in run.events() if event.name in ("sleep", "wake", "sync")]
    _report(args, watch, metrics, {event.label for event in events}, time.monotonic() - begun)


def _arguments() -> tuple[argparse.Namespace, Path]:
    parser = parser_of(__doc__, model="small")
    add_backend(parser)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--settled", type=int, default=30, help="cycles that may still take memory")
    parser.add_argument("--cache-tokens", type=int, help="of the server's cache")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which the cycles so far must do")
    return parsed(parser, cycles=8, settled=2)


def _cache(backend: str, tokens: int, model: Path) -> dict[str, Any]:
    """Arguments of a server whose cache holds so many tokens."""
    if backend == "sglang":
        return {"max_total_tokens": tokens, "mem_fraction_static": 0.9}
    return {"kv_cache_memory_bytes": tokens * cache_bytes(model)}


def _watch(run: DagrlRun, cycles: int, deadline: float) -> Watch:
    """Look at the memory until so many cycles are over, or the time is. RuntimeError where the run fails."""
    watch, host_at = Watch(), 0.0
    while (cycle := run.metrics()[-1]["step"] + 1) <= cycles and time.monotonic() < deadline:
        if run.over:
            raise RuntimeError(f"dagrl run ended in cycle {cycle}:\n{run.output}")
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            watch.gpu.setdefault(cycle, []).append((total - free) / _MIB)
        if time.monotonic() > host_at:
            watch.host.setdefault(cycle, []).append(_host_mib(run.pid))
            host_at = time.monotonic() + 1.0
        time.sleep(0.02)
    return watch


def _host_mib(pid: int) -> float:
    """Proportional share of memory of a process and all that it has started."""
    total = 0
    run = psutil.Process(pid)
    for process in [run, *run.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended while we looked
    return total / _MIB


def trend(by_cycle: dict[int, float]) -> float:
    """Slope of a straight line through the figures, a cycle."""
    if len(by_cycle) < 2:
        return 0.0
    return float(np.polyfit(list(by_cycle), list(by_cycle.values()), 1)[0])


def least_of(by_cycle: dict[int, list[float]], cycles: int) -> dict[int, float]:
    """The least figure of so many cycles at a time."""
    least: dict[int, float] = {}
    for cycle, values in by_cycle.items():
        first = cycle - cycle % cycles
        least[first] = min(*values, least.get(first, values[0]))
    return least


def _report(
    args: argparse.Namespace, watch: Watch, metrics: list[dict[str, Any]], seen: set[str], seconds: float
) -> None:
    late = range(args.settled + 1, args.cycles + 1)
    series = {
        f"GPU, least of {_TOGETHER} cycles": least_of(watch.gpu, _TOGETHER),
        "GPU, most of a cycle": {cycle: max(values) for cycle, values in watch.gpu.items()},
        "host": {cycle: sum(values) / len(values) for cycle, values in watch.host.items()},
    }
    print(f"\n{args.model}, {len(metrics)} cycles in {seconds:.0f} s; in the timeline: {', '.join(sorted(seen))}")
    print(f"{'':24}{'first MiB':>12}{'settled':>12}{'last':>12}{'MiB a cycle':>14}")
    verdicts = [Verdict("cycles", len(metrics), "at least", args.cycles)]
    for name, by_cycle in series.items():
        settled = {cycle: value for cycle, value in by_cycle.items() if cycle in late}
        if not settled:
            continue
        slope = trend(settled)
        ends = (next(iter(by_cycle.values())), next(iter(settled.values())), list(settled.values())[-1])
        print(f"{name:24}" + "".join(f"{value:12.1f}" for value in ends) + f"{slope:14.4f}")
        aim = GPU_MIB_A_CYCLE if name.startswith("GPU") else HOST_MIB_A_CYCLE
        verdicts.append(Verdict(f"{name}: MiB more with each cycle", slope, "at most", aim))
    freed = [line[_FREED] for line in metrics if _FREED in line]
    asleep = min((min(values) for values in watch.gpu.values()), default=0.0) / 1024
    if args.cache_tokens and freed:
        # What is left has the trainer's context in it too.
        share = max(freed) / (max(freed) + asleep)
        print(f"a sleep of the server gives back {max(freed):.1f} GiB, {asleep:.2f} GiB are left while both sleep")
        verdicts.append(Verdict("share of the server's memory that a sleep gives back", share, "at least", LEAST_FREED))
    result = {
        "model": args.model,
        "freed_gib": max(freed, default=None),
        "asleep_gib": asleep,
        "backend": args.backend,
        "cycles": len(metrics),
        "seconds": seconds,
        "mib": {name: list(by_cycle.items()) for name, by_cycle in series.items()},
    }
    tell(result, verdicts, args.json)


if __name__ == "__main__":
    main()
