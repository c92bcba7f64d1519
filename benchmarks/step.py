"""Time a whole GRPO step of a colocated pipeline against the sum of its bare stages, in one run on the same GPU.

    python benchmarks/step.py --out FOLDER [--mode turns|together] [--without-bare]

A step samples 4 responses to each of 128 prompts, computes the trainer's log-probs of them, and takes two optimizer
steps. The bare stages are SGLang's engine on the same prompts, Megatron-core's forward pass and train step on as many
rows of the same length (`bare_step`), and one copy of the weights on the GPU. In mode ``turns`` trainer and generator
sleep while the other works; in mode ``together`` both stay. What lies between the stages is told by name, as
timeline.json has it, beside the physical limit of each stage (`physical_limit`). The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from bare_stages import bare_stages
from dagrl_run import DagrlRun, Event, of_step
from options import add_load, add_settings, parsed, parser_of
from physical_limit import measured_rates, stage_limits
from pipelines import Load, grpo_pipeline, server_arguments, write_prompt_file
from ranks import apart
from reports import Verdict, tell

from dagrl.backends.families.registry import model_shape
from dagrl.config.schema import ModelSpec

AIM = 1.08
LIMIT_AIM = 1.45
"""For a whole step over its physical limit."""
MINI_BATCHES = 2
_START_S = 240.0
_STEP_S = 120.0
_STAGES = ("rollout", "old", "update")


def main() -> None:
    """Measure the stages, then the pipeline; tell how they compare."""
    args, model = _arguments()
    load = Load(args.prompts, args.n, args.prompt_tokens, args.response_tokens)
    limits = stage_limits(model_shape(ModelSpec(path=model)), load, apart(measured_rates))
    steps = args.warmup + args.rounds
    server = server_arguments(load)
    bare: dict[str, list[float]] = {}
    if not args.without_bare:
        bare = bare_stages(
            model,
            load,
            server,
            mini_batches=MINI_BATCHES,
            rows_per_micro_batch=args.rows_per_micro_batch,
            warmup=args.warmup,
            rounds=args.rounds,
        )
    prompts = write_prompt_file(args.out / f"step_{args.mode}_prompts.parquet", load, steps)
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
    with DagrlRun(pipeline, args.out / f"step_{args.mode}_run", *args.set) as run:
        run.wait_for_step(steps, _START_S + steps * _STEP_S)
        measured = [line for line in run.metrics() if args.warmup < line["step"] <= steps]
        events = run.events()
    whole = [line["time/step_s"] for line in measured]
    named = _by_name([of_step(events, line["step"]) for line in measured], whole)
    _report(args, load, limits, bare, whole, named, measured[-1])


def _arguments() -> tuple[argparse.Namespace, Path]:
    parser = parser_of(__doc__)
    parser.add_argument("--mode", choices=("turns", "together"), default="turns")
    parser.add_argument("--without-bare", action="store_true", help="measure the pipeline alone")
    add_load(parser)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of the pipeline, and of each stage")
    parser.add_argument("--warmup", type=int, default=1, help="steps before that")
    add_settings(parser)
    return parsed(parser, prompts=8, n=2, prompt_tokens=16, response_tokens=16, rows_per_micro_batch=4, rounds=2)


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
    limits: dict[str, float],
    bare: dict[str, list[float]],
    whole: list[float],
    named: dict[str, float],
    last: dict[str, Any],
) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in bare.items()}
    total, step = sum(medians.values()), statistics.median(whole)
    print(f"\n{args.model}, {load.prompts} x {load.n} samples of {load.prompt_tokens}/{load.response_tokens} tokens")
    print(f"{'':24}{'limit s':>10}{'bare s':>10}{'dagrl s':>10}")
    for name in dict.fromkeys([*_STAGES, "sync", *sorted(named, key=lambda each: -named[each])]):
        figures = [f"{found[name]:10.3f}" if name in found else " " * 10 for found in (limits, medians, named)]
        print(f"{name:24}{''.join(figures)}")
    limit = sum(limits.values())
    print(f"{'sum of stages; step':24}{limit:10.3f}{f'{total:.3f}' if bare else '':>10}{step:10.3f}")
    result = {
        "model": args.model,
        "mode": args.mode,
        "set": args.set,
        "prompts": load.prompts,
        "n": load.n,
        "prompt_tokens": load.prompt_tokens,
        "response_tokens": load.response_tokens,
        "limit_s": limits,
        "bare_s": bare,
        "step_s": whole,
        "by_name_s": named,
        "last_metrics": last,
        "step_over_limit": step / limit,
    }
    verdicts = [Verdict("seconds of a step / its physical limit", step / limit, "at most", LIMIT_AIM)]
    if bare:
        result["step_over_bare"] = step / total
        verdicts.insert(0, Verdict("seconds of a step / sum of the bare stages", step / total, "at most", AIM))
    tell(result, verdicts, args.json)


if __name__ == "__main__":
    main()
