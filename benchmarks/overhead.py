"""What orchestration costs: `dagrl run` with engines that only wait, so that what is left is dagrl and Ray.

    python benchmarks/overhead.py --out FOLDER                 # 8 workers: the aims
    python benchmarks/overhead.py --out FOLDER --sweep workers # 8, 32, 128 workers; or shards, or samples

Half of the workers generate, half train. Real are Ray, driver, scheduler, exchange, ledger, the batches and their way
through the object store, and the ops without engines. Times are medians over steps; what a step takes beyond the
critical path is told by the workers' own clocks, from the end of one update to the end of the next, and beside it what
it is without an orchestrator (`bare_ray`). The driver's CPU time says the same on a busy machine, where wall times do
not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from bare_ray import bare_ray_ms
from dagrl_run import DagrlRun
from reports import Verdict, tell
from timed_steps import Shape, critical_s, overheads

from dagrl.data.prompt_file import PromptRow, write_prompts

BASE = Shape(generators=4, trainers=4, shards=8, prompts=128, n=8, response_tokens=256)
SWEEPS = {
    "none": [BASE],
    "workers": [replace(BASE, generators=half, trainers=half) for half in (4, 16, 64)],
    "shards": [replace(BASE, shards=shards) for shards in (2, 8, 32, 128)],
    "samples": [replace(BASE, prompts=prompts) for prompts in (32, 128, 512, 2048)],
}
MOST_MS, MOST_BYTES = 20.0, 1024.0
_START_S, _STEP_S = 1800.0, 60.0


def main() -> None:
    """Measure, and say whether the aims are met."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    shapes = [_chosen(shape, args) for shape in SWEEPS[args.sweep]]
    found = [_measured(shape, args) for shape in shapes]
    _print_table(found)
    verdicts = []
    for figures in found:
        if figures["workers"] == BASE.workers and args.sweep in ("none", "workers"):
            verdicts.append(Verdict("ms a step beyond the critical path", figures["step"], "at most", MOST_MS))
            verdicts.append(Verdict("driver's bytes a sample", figures["bytes_per_sample"], "at most", MOST_BYTES))
    tell({"load": os.getloadavg(), "measured": found}, verdicts, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), required=True, help="folder for the runs")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--sweep", choices=SWEEPS, default="none")
    for field in ("generators", "trainers", "shards", "prompts"):
        parser.add_argument(f"--{field}", type=int, help="instead of what the sweep says")
    parser.add_argument("--steps", type=int, default=25, help="measured steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before that")
    parser.add_argument("--rollout-s", type=float, default=0.4)
    parser.add_argument("--update-s", type=float, default=0.2)
    parser.add_argument("--sync-s", type=float, default=0.02)
    parser.add_argument("--portion", type=int, default=8, help="prompts that a server takes at a time")
    parser.add_argument("--profile", action="store_true", help="profile the driver, into FOLDER/NAME.prof")
    return parser.parse_args()


def _chosen(shape: Shape, args: argparse.Namespace) -> Shape:
    fields = ("generators", "trainers", "shards", "prompts")
    return replace(shape, **{field: getattr(args, field) for field in fields if getattr(args, field)})


def _measured(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    name = f"w{shape.workers}-s{shape.shards}-p{shape.prompts}"
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    timings = shape.timings(rollout_s=args.rollout_s, update_s=args.update_s, sync_s=args.sync_s, portion=args.portion)
    timings.write(folder)
    rows = (PromptRow("benchmark", f"{index:06d}", "0", {"index": index}) for index in range(4 * shape.prompts))
    write_prompts(folder / "prompts.parquet", rows, {"index": pa.int64()})
    first, last = args.warmup + 1, args.warmup + args.steps
    profile = ("--profile", str(folder / "driver.prof")) if args.profile else ()
    pipeline = shape.pipeline(str(folder / "prompts.parquet"), last + 1)
    begun = time.monotonic()
    with DagrlRun(pipeline, folder / f"run-{os.getpid()}", module=("timed_run", *profile)) as run:
        run.wait_for_step(args.warmup, _START_S)
        started_s, before = time.monotonic() - begun, _cpu_seconds(run.pid)
        memory = _memory_gib(run.pid)
        run.wait_for_step(last, _STEP_S * args.steps)
        after = _cpu_seconds(run.pid)
        run.wait_for_step(last + 1, _STEP_S)
    metrics = [line for line in run.metrics() if first <= line["step"] <= last]
    return {
        "name": name,
        "workers": shape.workers,
        "shards": shape.shards,
        "samples": shape.samples,
        "critical_ms": 1000 * critical_s(shape, timings),
        **overheads(run.events(), shape, timings, range(first, last + 1)),
        "the same by a plain loop over Ray's actors": bare_ray_ms(shape, timings, warmup=args.warmup, steps=args.steps),
        "cpu_ms": {who: 1000 * (after[who] - before[who]) / args.steps for who in before},
        "bytes_per_sample": statistics.median(line["driver/bytes"] for line in metrics) / shape.samples,
        "started_s": started_s,
        "memory_gib": memory,
    }


def _cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time so far of the driver's process, of its main thread alone, of Ray's own processes, and of the workers."""
    driver = psutil.Process(pid)
    spent = {"driver": _spent(driver), "main thread": 0.0, "ray": 0.0, "workers": 0.0}
    spent["main thread"] = sum(thread.user_time + thread.system_time for thread in driver.threads() if thread.id == pid)
    for process in driver.children(recursive=True):
        try:
            spent["workers" if process.cmdline()[:1][0].startswith("ray::") else "ray"] += _spent(process)
        except (psutil.NoSuchProcess, IndexError):
            continue
    return spent


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _memory_gib(pid: int) -> float:
    """Proportional share of memory of all processes of a run."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total / 2**30


def _print_table(found: list[dict[str, Any]]) -> None:
    stretches = [name for name in found[0] if name not in ("step", "name") and isinstance(found[0][name], float)]
    lines = ["name", "critical_ms", "step", *stretches]
    for name in dict.fromkeys(lines):
        values = (each[name] for each in found)
        print(f"{name:44}" + "".join(f"{each:>16}" if isinstance(each, str) else f"{each:16.1f}" for each in values))
    for who in found[0]["cpu_ms"]:
        print(f"{'CPU ms a step: ' + who:44}" + "".join(f"{each['cpu_ms'][who]:16.1f}" for each in found))


if __name__ == "__main__":
    main()
