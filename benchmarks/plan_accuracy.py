"""Hold what `dagrl plan` says against what a run takes: GiB of GPUs, seconds of nodes and of whole steps.

    python benchmarks/plan_accuracy.py --case CASE --out FOLDER
    python benchmarks/plan_accuracy.py --summarize FOLDER

A case is a GRPO pipeline of exact lengths in one layout: it is planned, as the command would, then run for a few steps.
Memory is compared twice: what torch has handed out on the fullest rank (`memory/NODE_peak_gib`), and what the driver
says that the fullest GPU holds, sleepers and contexts included. ``--summarize`` makes the table of docs/plan.md of all
cases in a folder: what was measured beside what the same pipelines are estimated at now, wherever it is asked. The last
line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dagrl_run import DagrlRun, Event, of_step
from pipelines import Load, group, grpo_pipeline, server_arguments, write_prompt_file
from reports import Verdict, device_name, tell
from workload import MODELS, write_model

from dagrl.backends.planning.gpus import DEFAULT_GPU, gpu_of_driver
from dagrl.backends.planning.memory import Kind
from dagrl.backends.serving.gpu_memory import gpu_memory
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import estimate_step
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.showing.report import Report, report

MEMORY_AIM = 0.10
SECONDS_AIM = 0.20
_START_S = 300.0
_STEP_S = 90.0
_GIB = 2**30
_LOOK_S = 0.1
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_OF_TORCH: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Kinds of a plan's memory that torch hands out."""
_TOLD = ("rollout", "old", "update")
"""Nodes whose seconds are worth a line of the table."""


@dataclass(frozen=True, slots=True)
class Case:
    """A pipeline in one layout."""

    model: str
    gpus: int
    """Of the trainer."""
    servers: int = 0
    """GPUs of the servers; 0: those of the trainer."""
    sleep: bool = True
    """Whether those that share GPUs take turns."""
    parallel: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further sections of the trainer."""
    server: dict[str, Any] = field(default_factory=dict)
    load: Load = field(default_factory=lambda: Load(64, 4, 256, 768))
    tokens: int = 16384
    """Of a micro-batch: the rows of a mini-batch are to fill theirs, as a plan takes it that they are full."""

    @property
    def all_gpus(self) -> int:
        """Of both."""
        return self.gpus + self.servers


_TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_PP2 = {"pipeline_model_parallel_size": 2}
_OVERLAPPED = {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
CASES: dict[str, Case] = {
    "1.7b_turns": Case("1.7b", 1),
    "1.7b_together": Case("1.7b", 1, sleep=False, server={"mem_fraction_static": 0.35}),
    "1.7b_recompute": Case("1.7b", 1, trainer={"transformer": _FULL}),
    "1.7b_offload": Case("1.7b", 1, trainer={"offload": {"param": True, "grad": True, "optimizer": True}}),
    "1.7b_tp2": Case("1.7b", 2, parallel=_TP2, server={"tp_size": 2}),
    "1.7b_pp2": Case("1.7b", 2, parallel=_PP2),
    "1.7b_dp2": Case("1.7b", 2, trainer=_OVERLAPPED),
    "1.7b_apart": Case("1.7b", 1, servers=1),
    "8b_tp2": Case("8b", 2, parallel=_TP2, server={"tp_size": 2}),
    "8b_pp2_recompute": Case("8b", 2, parallel=_PP2, trainer={"transformer": _FULL}),
    "8b_tp2_apart": Case("8b", 2, servers=2, parallel=_TP2),
    "8b4_tp2_pp2": Case("8b", 4, parallel=_TP2 | _PP2, server={"tp_size": 2}),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a plan beside what was measured."""

    what: str
    unit: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        """Planned over measured."""
        return self.planned / self.measured if self.measured else float("nan")


def main() -> None:
    """One case, or all that have been run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--summarize", type=Path, help="tell of all cases in this folder")
    parser.add_argument("--weights", type=Path, help="keep start weights here for later runs")
    parser.add_argument("--out", type=Path, help="folder for the runs and their files")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that are measured")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and little to do: to try the script out")
    args = parser.parse_args()
    if args.summarize:
        summarize(args.summarize)
        return
    if not args.case or not args.out:
        parser.error("give --case and --out, or --summarize")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    case = CASES[args.case]
    if args.smoke:
        case = Case("tiny", 1, servers=case.servers and 1, sleep=case.sleep, load=Load(4, 2, 16, 16), tokens=256)
    compare(args, case)


def compare(args: argparse.Namespace, case: Case) -> None:
    """Plan and run a case, and write down how they compare."""
    steps = args.warmup + args.rounds
    model = write_model((args.weights or args.out / "weights").resolve() / case.model, MODELS[case.model])
    prompts = write_prompt_file(args.out / f"plan_{args.case}_prompts.parquet", case.load, steps + 1)
    pipeline = pipeline_of(args.case, case, model, prompts)
    begun = time.monotonic()
    with DagrlRun(pipeline, _run_folder(args.out, args.case)) as run:
        planned = report(run.folder.with_suffix(".yaml"), (), gpu=_gpu() or DEFAULT_GPU)
        told = planned_figures(planned, case.load)
        run.wait_for_step(args.warmup, _START_S + args.warmup * _STEP_S)
        started = time.monotonic() - begun
        held = watch(run, steps, case.all_gpus)
        metrics = [line for line in run.metrics() if args.warmup < line["step"] <= steps]
        events = [event for line in metrics for event in of_step(run.events(), line["step"])]
    compared = figures(told, measured_figures(metrics, events, held))
    for each in compared:
        print(f"{each.what:40}{each.unit:5}{each.planned:10.3f}{each.measured:10.3f}{each.ratio:8.2f}")
    result = {
        "case": args.case,
        "gpus": case.all_gpus,
        "warm_after_s": started,
        "compared": [[each.what, each.unit, each.planned, each.measured] for each in compared],
        "planned": told,
        "metrics": metrics,
    }
    tell(result, verdicts(compared), args.out / f"plan_{args.case}.json")


def _run_folder(out: Path, case: str) -> Path:
    # Without a dot: what comes after it would be taken for the name's ending.
    return out / f"plan_{case.replace('.', '_')}_run"


def pipeline_of(name: str, case: Case, model: Path, prompts: Path) -> dict[str, Any]:
    """The pipeline of a case; without GPUs with the embedded generator, which starts at once."""
    server = server_arguments(case.load) | case.server
    pipeline = grpo_pipeline(
        f"plan-{name}",
        model,
        prompts,
        case.load,
        server,
        apart=case.servers > 0,
        sleep=case.sleep,
        mini_batch=case.load.prompts // 2,
        tokens_per_micro_batch=case.tokens,
    )
    sizes = {"train": case.gpus, "rollout": case.servers} if case.servers else {"gpu": case.gpus}
    gpu = _gpu()
    pipeline["groups"] = {name: group(size) | ({"gpu": gpu} if gpu else {}) for name, size in sizes.items()}
    pipeline["engines"]["actor"] |= {"parallel": case.parallel} | case.trainer
    if not torch.cuda.is_available():
        generator = pipeline["engines"]["generator"]
        generator["backend"] = "hf"
        del generator["server"]
        for engine in pipeline["engines"].values():
            engine.pop("sleep", None)
    return pipeline


# -- what is planned


def planned_figures(planned: Report, load: Load) -> dict[str, float]:
    """Figures of a plan by the names of the metrics that they are held against."""
    assumed = Assumed(prompt_tokens=load.prompt_tokens, response_tokens=load.response_tokens)
    costs = PipelineCosts(planned.pipeline, planned.fit.plan, planned.fit.shape, planned.gpu, assumed)
    step = estimate_step(costs)
    found = {"time/step_s": step.step_s} | {f"time/{name}_s": seconds for name, seconds in step.node_s.items()}
    found |= step.move_s
    for tenant in (tenant for each in planned.fit.groups for tenant in each.tenants if tenant.executor.trained):
        handed_out = sum(tenant.memory.awake.get(kind, 0) for kind in _OF_TORCH)
        found["memory/update_peak_gib"] = handed_out / _GIB
    for node, engine in (("update", "actor"), ("rollout", "generator")):
        # The fullest GPU of all, as the driver is asked: those that wait in another group hold what they ever took.
        turns = [
            [moment.total for moment in each.moments if moment.engine == engine and "sync" not in moment.what]
            or [sum(each.at_rest.values())]
            for each in planned.fit.groups
            if each.gpu is not None
        ]
        if turns:
            found[f"driver/{node}_gib"] = max(map(max, turns)) / _GIB
    return found


# -- what is measured


def watch(run: DagrlRun, last_step: int, gpus: int) -> list[tuple[float, float]]:
    """When somebody looked, in seconds since the epoch, and the GiB that the fullest GPU held then: until that step is
    over. RuntimeError where the run fails.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")[:gpus]
    seen: list[tuple[float, float]] = []
    deadline = time.monotonic() + last_step * _STEP_S
    while not any(line["step"] >= last_step for line in run.metrics()):
        if run.over:
            raise RuntimeError(f"dagrl run ended before step {last_step}:\n{run.output}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"dagrl run did not get to step {last_step} in time:\n{run.output}")
        if torch.cuda.is_available() and (memory := gpu_memory(visible)):
            seen.append((time.time(), max(each.used_gib for each in memory)))
        time.sleep(_LOOK_S)
    return seen


def measured_figures(
    metrics: list[dict[str, Any]], events: list[Event], held: list[tuple[float, float]]
) -> dict[str, float]:
    """The same figures of a run: medians of seconds over its steps, peaks of memory."""
    names = {name for line in metrics for name in line if name.startswith(("time/", "memory/"))}
    found = {}
    for name in names:
        values = [line[name] for line in metrics if name in line]
        found[name] = max(values) if name.startswith("memory/") else statistics.median(values)
    for label in {event.label for event in events if event.name in ("sleep", "wake", "sync")}:
        found[label] = sum(event.seconds for event in events if event.label == label) / len(metrics)
    for node in ("update", "rollout"):
        spans = [(event.start, event.end) for event in events if event.name == node]
        seen = [gib for at, gib in held if any(start < at < end for start, end in spans)]
        if seen:
            found[f"driver/{node}_gib"] = max(seen)
    return found


# -- both


def figures(planned: dict[str, float], measured: dict[str, float]) -> list[Compared]:
    """What both know of, memory first, nodes in the order of a step."""
    order = ["memory/update_peak_gib", "driver/update_gib", "driver/rollout_gib"]
    order += [f"time/{node}_s" for node in _TOLD] + sorted(name for name in planned if "/" not in name)
    order += ["time/step_s"]
    units = {name: "GiB" if name.endswith("_gib") else "s" for name in order}
    return [
        Compared(name, units[name], planned[name], measured[name])
        for name in order
        if name in planned and name in measured
    ]


def verdicts(compared: list[Compared]) -> list[Verdict]:
    """How far a plan may be off: what the whole GPU holds, and the whole step."""
    found = []
    for each in compared:
        if each.unit == "GiB":
            found.append(Verdict(f"{each.what}: |planned / measured - 1|", abs(each.ratio - 1), "at most", MEMORY_AIM))
        elif each.what == "time/step_s":
            found.append(Verdict(f"{each.what}: |planned / measured - 1|", abs(each.ratio - 1), "at most", SECONDS_AIM))
    return found


def summarize(folder: Path) -> None:
    """The table of all cases in a folder; exits with 1 where an aim is missed or a case is not there."""
    results = {}
    for name in CASES:
        file = folder / f"plan_{name}.json"
        if file.is_file():
            results[name] = planned_again(json.loads(file.read_text()), folder, name)
    for line in table(results):
        print(line)
    missing = [name for name in CASES if name not in results]
    if missing:
        print(f"not there: {', '.join(missing)}")
    all_met = all(verdict["met"] for result in results.values() for verdict in result["verdicts"])
    found = [Verdict("cases whose aims are all met", sum(map(_is_met, results.values())), "at least", len(results))]
    tell({"cases": sorted(results), "missing": missing, "of": device_name()}, found, folder / "plan.json")
    sys.exit(not all_met or not results)


def planned_again(result: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """A case's result with the plan of its pipeline as it is made now; what was measured stays."""
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODELS[CASES[name].model]))
        # It names the GPUs of the machine that it ran on.
        planned = report(_run_folder(folder, name).with_suffix(".yaml"), (f"model.path={model}",), gpu=DEFAULT_GPU)
    told = planned_figures(planned, CASES[name].load)
    compared = figures(told, {what: measured for what, _, _, measured in result["compared"]})
    return result | {
        "compared": [[each.what, each.unit, each.planned, each.measured] for each in compared],
        "planned": told,
        "verdicts": [{"met": verdict.met} for verdict in verdicts(compared)],
    }


def _is_met(result: dict[str, Any]) -> bool:
    return all(verdict["met"] for verdict in result["verdicts"])


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: of each case, planned and measured."""
    columns = {
        "update, torch, GiB": "memory/update_peak_gib",
        "update, GPU, GiB": "driver/update_gib",
        "rollout, GPU, GiB": "driver/rollout_gib",
        "rollout, s": "time/rollout_s",
        "log-probs, s": "time/old_s",
        "update, s": "time/update_s",
        "step, s": "time/step_s",
    }
    lines = [f"| case | GPUs | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, result in results.items():
        found = {what: (planned, measured) for what, _, planned, measured in result["compared"]}
        cells = []
        for what in columns.values():
            if what not in found:
                cells.append("")
                continue
            planned, measured = found[what]
            cells.append(f"{planned:.3g} / {measured:.3g} ({planned / measured - 1:+.0%})")
        lines.append(f"| {name} | {result['gpus']} | {' | '.join(cells)} |")
    return lines


def _gpu() -> str | None:
    """The GPU's name as a plan knows it; None where it knows none, or there is none."""
    if not torch.cuda.is_available():
        return None
    found = gpu_of_driver(torch.cuda.get_device_name())
    return found.name if found else None


if __name__ == "__main__":
    main()
