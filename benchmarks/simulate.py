"""What it costs to simulate a step: CPU seconds of scheduler and simulation for 64 to 4,096 GPUs.

    python benchmarks/simulate.py
    python benchmarks/simulate.py --profile     # where the time goes, at 4,096 GPUs

A step's shards grow with the GPUs, to 10,000 at 4,096: half of the GPUs train, three eighths sample, an eighth holds a
reference, and the host has a worker for 16 GPUs. Shards of a rollout arrive raggedly, as responses do. CPU time, the
least of several rounds, so that it says the same on a busy machine.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import platform
import pstats
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reports import Verdict, tell

from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import Scope
from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.commands import Command, Run
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows

SHARDS = {64: 156, 512: 1_250, 4_096: 10_000}
"""GPUs -> shards of a step."""
MOST_S = 5.0
MOST_GROWTH = 1.5
"""How many times as much an activity may cost at 4,096 GPUs as at 64: for heaps, and for caches of the machine."""
_STEPS = 4


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Costs whose rollouts bring their shards after log-normal times, from one seed."""

    table: CostTable
    rollout_s: float

    def seconds(self, command: Command) -> float:
        if isinstance(command, Run) and command.task == "rollout":
            return self.shard_offsets(command)[-1]
        return self.table.seconds(command)

    def shard_offsets(self, run: Run) -> Sequence[float]:
        chance = random.Random(run.step)
        return sorted(self.rollout_s * chance.lognormvariate(0.0, 0.5) for _ in run.shards)


def main() -> None:
    """Measure, and say whether the aims are met."""
    args = _arguments()
    if args.profile:
        _profile()
        return
    found = [_measured(gpus, shards, kind) for kind in _SCHEDULES for gpus, shards in SHARDS.items()]
    print(f"{'schedule':24} {'GPUs':>6} {'shards':>7} {'activities':>10} {'CPU s a step':>13} {'us for each':>13}")
    for row in found:
        print(
            f"{row['schedule']:24} {row['gpus']:6} {row['shards']:7} {row['activities']:10} {row['cpu_s']:13.3f} "
            f"{row['us_for_each']:13.1f}"
        )
    verdicts = []
    for kind in _SCHEDULES:
        small, *_, large = (row for row in found if row["schedule"] == kind)
        growth = large["us_for_each"] / small["us_for_each"]
        verdicts.append(Verdict(f"{kind}: CPU s a step at 4,096 GPUs", large["cpu_s"], "at most", MOST_S))
        verdicts.append(Verdict(f"{kind}: an activity at 4,096 GPUs, against 64", growth, "at most", MOST_GROWTH))
    tell({"cpu": platform.processor() or platform.machine(), "measured": found}, verdicts, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--profile", action="store_true", help="print a profile instead")
    return parser.parse_args()


_SCHEDULES = {
    "synchronous": {},
    "staleness 1, in flight": {"max_staleness": 1, "in_flight": True},
    "staleness 8": {"max_staleness": 8},
}


def _measured(gpus: int, shards: int, schedule: str) -> dict[str, Any]:
    plan, costs = _plan(gpus, shards, schedule), _costs(gpus)
    least = float("inf")
    for _ in range(3):
        gc.collect()
        began = time.process_time()
        simulated = simulate(plan, costs, _STEPS)
        least = min(least, (time.process_time() - began) / _STEPS)
    activities = len(simulated.activities) / _STEPS
    return {
        "schedule": schedule,
        "gpus": gpus,
        "shards": shards,
        "activities": round(activities),
        "cpu_s": least,
        "us_for_each": least / activities * 1e6,
    }


def _profile() -> None:
    plan, costs = _plan(4_096, SHARDS[4_096], "staleness 1, in flight"), _costs(4_096)
    with cProfile.Profile() as profile:
        simulate(plan, costs, 2)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def _plan(gpus: int, shards: int, schedule: str) -> Plan:
    """GRPO with a reference; in all but the synchronous schedule the update takes four pieces."""
    executors = [
        Executor(HOST, None, _ranks(max(1, gpus // 16))),
        Executor("actor", "train", _ranks(gpus // 2), ("actor",), trained=True, on_gpus=True),
        Executor("generator", "rollout", _ranks(gpus * 3 // 8), ("generator",), weights_from="actor", on_gpus=True),
        Executor("reference", "reference", _ranks(gpus // 8), ("reference",), on_gpus=True),
    ]
    quarter = -(-shards // 4)
    pieces = tuple(tuple(range(begin, min(begin + quarter, shards))) for begin in range(0, shards, quarter))
    tasks = [
        _task("prompts", HOST, scope=Scope.BATCH),
        _task("rollout", "generator", "prompts", streams=True, generates=True),
        _task("reward", HOST, "rollout"),
        _task("ref", "reference", "rollout", frozen=True),
        _task("advantage", HOST, "reward", "ref", scope=Scope.GROUP),
        _task("update", "actor", "advantage", scope=Scope.BATCH, trains=True),
    ]
    if schedule != "synchronous":
        tasks[-1] = replace(tasks[-1], pieces=pieces)
    settings: dict[str, Any] = _SCHEDULES[schedule]
    return Plan({each.name: each for each in executors}, tuple(tasks), shards=shards, steps=100, **settings)


def _costs(gpus: int) -> _Ragged:
    """A step of a few minutes, whatever its size."""
    of_all = 1 / SHARDS[gpus]
    seconds = {"reward": 120 * of_all * gpus / 16, "ref": 100 * of_all, "advantage": of_all, "update": 150 * of_all}
    return _Ragged(CostTable(seconds, sync=5.0, save=20.0), rollout_s=60.0)


def _ranks(count: int) -> tuple[Coordinates, ...]:
    return tuple(Coordinates(0, 0, rank, 0, primary=True) for rank in range(count))


def _task(name: str, executor: str, *reads: str, scope: Scope = Scope.ROW, **fields: Any) -> PlannedTask:
    inputs = {f"of_{need}": (need, "column") for need in reads}
    return PlannedTask(name, name, name, executor, scope, Rows.TRAIN, inputs=inputs, **fields)


if __name__ == "__main__":
    main()
