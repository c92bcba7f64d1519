"""Time a whole GRPO step of a colocated pipeline against the sum of its bare stages, in one run on the same GPU.

    python benchmarks/step.py --out FOLDER [--mode turns|together]

A step samples 4 responses to each of 128 prompts, computes the trainer's log-probs of them, and takes two optimizer
steps. The bare stages are SGLang's engine on the same prompts, Megatron-core's forward pass and train step on as many
rows of the same length (`bare_step`), and one copy of the weights on the GPU. In mode ``turns`` trainer and generator
sleep while the other works; in mode ``together`` both stay. What lies between the stages is told by name, as
timeline.json has it. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bare_sglang import BareServer
from dagrl_run import DagrlRun, Event, of_step
from options import parsed, parser_of
from pipelines import Load, grpo_pipeline, prompt_texts, server_arguments, write_prompt_file
from reports import Verdict, tell
from workload import Workload

AIM = 1.08
MINI_BATCHES = 2
_START_S = 240.0
_STEP_S = 120.0
_STAGES = ("rollout", "old", "update")


def main() -> None:
    """Measure the stages, then the pipeline; tell how they compare."""
    args, model = _arguments()
    load = Load(args.prompts, args.n, args.prompt_tokens, args.response_tokens)
    steps = args.warmup + args.rounds
    server = server_arguments(load)
    bare = _bare_stages(args, load, model, server)
    prompts = write_prompt_file(args.out / "step_prompts.parquet", load, steps)
    pipeline = grpo_pipeline(
        f"step-{args.mode}",
        model,
        prompts,
        load,
        server,
        sleep=args.mode == "turns",
        mini_batch=args.prompts // MINI_BATCHES,
        tokens_per_micro_batch=args.rows_per_micro_batch * load.row_tokens,
    )
    with DagrlRun(pipeline, args.out / f"step_{args.mode}_run") as run:
        run.wait_for_step(steps, _START_S + steps * _STEP_S)
        measured = [line for line in run.metrics() if args.warmup < line["step"] <= steps]
        events = run.events()
    whole = [line["time/step_s"] for line in measured]
    named = _by_name([of_step(events, line["step"]) for line in measured], whole)
    _report(args, load, bare, whole, named, measured[-1])


def _arguments() -> tuple[argparse.Namespace, Path]:
    parser = parser_of(__doc__)
    parser.add_argument("--mode", choices=("turns", "together"), default="turns")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--rows-per-micro-batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of the pipeline, and of each stage")
    parser.add_argument("--warmup", type=int, default=1, help="steps before that")
    return parsed(parser, prompts=8, n=2, prompt_tokens=16, response_tokens=16, rows_per_micro_batch=4, rounds=2)


# -- the bare stages


def _bare_stages(args: argparse.Namespace, load: Load, model: Path, server: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of a step's worth of each stage. Generator and trainer start at the same time and work in turn."""
    workload = Workload(
        row_tokens=load.row_tokens,
        rows_per_micro_batch=args.rows_per_micro_batch,
        micro_batches=load.samples // MINI_BATCHES // args.rows_per_micro_batch,
    )
    assert workload.rows * MINI_BATCHES == load.samples, "micro-batches must be of whole rows, and alike"
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    trainer = context.Process(target=_bare_trainer, args=(there, model, workload, args.warmup, args.rounds))
    trainer.start()
    try:
        bare = BareServer(model, server)
        try:
            texts = prompt_texts(load, args.warmup + args.rounds)
            rounds = [texts[each : each + load.prompts] for each in range(0, len(texts), load.prompts)]
            _wait_for(here, trainer, "to build its model")
            seconds = {"rollout": [bare.generate(each, load) for each in rounds][args.warmup :]}
            here.send("your turn")
            return seconds | _wait_for(here, trainer, "to measure its stages")
        finally:
            bare.close()
    finally:
        trainer.kill()
        trainer.join()


def _wait_for(connection: Connection, trainer: multiprocessing.process.BaseProcess, what: str) -> Any:
    deadline = time.monotonic() + _START_S
    while not connection.poll(0.5):
        if not trainer.is_alive():
            raise RuntimeError(f"the bare trainer ended with exit code {trainer.exitcode} instead {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_START_S:.0f} s for the bare trainer {what}")
    return connection.recv()


def _bare_trainer(connection: Connection, model: Path, workload: Workload, warmup: int, rounds: int) -> None:
    """A process: build the model, wait for a sign, send the seconds of each stage."""
    from bare_step import BareStep
    from ranks import Meetings

    from dagrl.engines.megatron import distributed
    from dagrl.spec.schema import ParallelSpec

    distributed.start(next(Meetings(1).join(0, 1)), ParallelSpec())
    step = BareStep(model, workload)
    copies = [torch.empty_like(weights) for weights in step.model.parameters()]

    def copy_weights() -> None:
        torch._foreach_copy_(copies, [weights.detach() for weights in step.model.parameters()])

    def times(count: int, stage: Callable[[], object]) -> Callable[[], None]:
        return lambda: [stage() for _ in range(count)] and None

    stages = {"old": times(MINI_BATCHES, step.logprobs), "update": times(MINI_BATCHES, step), "sync": copy_weights}
    connection.send("ready")
    connection.recv()
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(warmup + rounds):
        for name, stage in stages.items():
            seconds[name].append(_timed(stage))
    connection.send({name: taken[warmup:] for name, taken in seconds.items()})


def _timed(stage: Callable[[], None]) -> float:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    stage()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


# -- the pipeline


def _by_name(steps: list[list[Event]], whole: list[float]) -> dict[str, float]:
    """Mean seconds of a step in which each thing ran, and in which nothing did (``idle``)."""
    named: dict[str, list[float]] = {}
    for events, seconds in zip(steps, whole, strict=True):
        for label in {event.label for event in events}:
            named.setdefault(label, []).append(_covered([each for each in events if each.label == label]))
        named.setdefault("idle", []).append(seconds - _covered(events))
    return {name: sum(taken) / len(whole) for name, taken in named.items()}


def _covered(events: list[Event]) -> float:
    """Seconds in which at least one of them ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda each: each.start):
        total += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return total


def _report(
    args: argparse.Namespace,
    load: Load,
    bare: dict[str, list[float]],
    whole: list[float],
    named: dict[str, float],
    last: dict[str, Any],
) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in bare.items()}
    total, step = sum(medians.values()), statistics.median(whole)
    print(f"\n{args.model}, {load.prompts} x {load.n} samples of {load.prompt_tokens}/{load.response_tokens} tokens")
    print(f"{'':24}{'bare s':>10}{'dagrl s':>10}")
    for name in dict.fromkeys([*_STAGES, "sync", *sorted(named, key=lambda each: -named[each])]):
        figures = [f"{found[name]:10.3f}" if name in found else " " * 10 for found in (medians, named)]
        print(f"{name:24}{''.join(figures)}")
    print(f"{'sum of stages; step':24}{total:10.3f}{step:10.3f}")
    result = {
        "model": args.model,
        "mode": args.mode,
        "prompts": load.prompts,
        "n": load.n,
        "prompt_tokens": load.prompt_tokens,
        "response_tokens": load.response_tokens,
        "bare_s": bare,
        "step_s": whole,
        "by_name_s": named,
        "last_metrics": last,
        "step_over_bare": step / total,
    }
    tell(result, [Verdict("seconds of a step / sum of the bare stages", step / total, "at most", AIM)], args.json)


if __name__ == "__main__":
    main()
