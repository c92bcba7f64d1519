"""Time GRPO steps whose rollouts are a step ahead, trainer and generator on GPUs of their own, against the slower side.

    python benchmarks/async_step.py --out FOLDER [--gpus 2|4] [--in-flight] [--together]

Half of the GPUs train, a data-parallel rank each, the other half generate, a server each. On each half a step samples
4 responses to 128 prompts for every GPU, computes the trainer's log-probs of them and takes two optimizer steps. What
they are held against, in the same run: SGLang's engine on one GPU's share of the prompts, and Megatron-core's log-probs
and train steps on as many rows, by as many ranks (`bare_stages`); and the same steps of a pipeline in which all GPUs do
both, in turns, or, with ``--together``, without sleeping. New weights come between two rollouts, or ``--in-flight``.
The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from bare_stages import bare_stages
from dagrl_run import DagrlRun, Event
from options import add_load, parsed, parser_of
from pipelines import Load, grpo_pipeline, server_arguments, write_prompt_file
from reports import Verdict, tell

AIM = 1.10
MINI_BATCHES = 2
_AHEAD = 2
"""Steps whose prompts a run takes beyond those that are measured."""
_START_S = 240.0
_STEP_S = 120.0


def main() -> None:
    """Measure the bare stages, the pipeline that is a step ahead, and the one in turns; tell how they compare."""
    args, model = _arguments()
    half = args.gpus // 2
    share = Load(args.prompts, args.n, args.prompt_tokens, args.response_tokens)
    load = Load(args.prompts * half, args.n, args.prompt_tokens, args.response_tokens)
    bare = bare_stages(
        model,
        share,
        server_arguments(share),
        mini_batches=MINI_BATCHES,
        rows_per_micro_batch=args.rows_per_micro_batch,
        warmup=1,
        rounds=args.rounds,
        trainers=half,
    )
    case = f"async_{args.gpus}{'_in_flight' if args.in_flight else ''}{'_together' if args.together else ''}"
    prompts = write_prompt_file(args.out / f"{case}_prompts.parquet", load, args.warmup + args.rounds + _AHEAD)
    ahead = _measured(args, _ahead(args, model, prompts, load, share), f"{case}_run")
    turns = _measured(args, _in_turns(args, model, prompts, load, share), f"{case}_turns_run")
    _report(args, load, bare, ahead, turns)


def _arguments() -> tuple[argparse.Namespace, Path]:
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--in-flight", action="store_true", help="new weights in the midst of a rollout")
    parser.add_argument("--together", action="store_true", help="engines of the pipeline in turns stay in memory")
    add_load(parser, prompts="for each GPU that generates")
    parser.add_argument("--rounds", type=int, default=6, help="measured steps of the pipelines, and of each stage")
    parser.add_argument("--warmup", type=int, default=3, help="steps of the pipelines before that")
    return parsed(parser, prompts=8, n=2, prompt_tokens=16, response_tokens=16, rows_per_micro_batch=4, rounds=2)


# -- the pipelines


def _ahead(args: argparse.Namespace, model: Path, prompts: Path, load: Load, share: Load) -> dict[str, Any]:
    pipeline = _grpo(args, "ahead", model, prompts, load, share, apart=True, gpus=args.gpus // 2)
    pipeline["schedule"] = {"max_staleness": 1, "in_flight_weight_update": args.in_flight}
    pipeline["nodes"]["update"]["rollout_correction"] = {"rollout_is": "token"}
    pipeline["engines"]["generator"]["weight_sync"] = {"pause": "in_place" if args.in_flight else "abort"}
    return pipeline


def _in_turns(args: argparse.Namespace, model: Path, prompts: Path, load: Load, share: Load) -> dict[str, Any]:
    return _grpo(args, "turns", model, prompts, load, share, gpus=args.gpus, sleep=not args.together)


def _grpo(
    args: argparse.Namespace, name: str, model: Path, prompts: Path, load: Load, share: Load, **where: Any
) -> dict[str, Any]:
    pipeline = grpo_pipeline(
        f"async-{name}",
        model,
        prompts,
        load,
        server_arguments(share),
        mini_batch=load.prompts // MINI_BATCHES,
        tokens_per_micro_batch=args.rows_per_micro_batch * load.row_tokens,
        **where,
    )
    pipeline["run"]["host_workers"] = 2
    return pipeline


def _measured(args: argparse.Namespace, pipeline: dict[str, Any], folder: str) -> dict[str, Any]:
    """Mean seconds of a step, those of its parts, how old its samples were, and how much of it both sides worked."""
    steps = args.warmup + args.rounds
    with DagrlRun(pipeline, args.out / folder) as run:
        run.wait_for_step(steps, _START_S + steps * _STEP_S)
        lines = [line for line in run.metrics() if args.warmup < line["step"] <= steps]
        events = run.events()
    seconds = [line["time/step_s"] for line in lines]
    named = sorted({name for line in lines for name in line if name.startswith("time/")} - {"time/step_s"})
    return {
        # Steps that overlap may take turns in being long; what they take together is what counts.
        "step_s": statistics.mean(seconds),
        "steps_s": seconds,
        "by_name_s": {
            name.removeprefix("time/").removesuffix("_s"): statistics.mean(line.get(name, 0.0) for line in lines)
            for name in named
        },
        "staleness": max(line["staleness/max"] for line in lines),
        "overlap_s": _both(events, {line["step"] for line in lines}) / len(lines),
        "last_metrics": lines[-1],
    }


def _both(events: list[Event], steps: set[int]) -> float:
    """Seconds of these steps in which one engine sampled while the other trained."""
    sampling = [(event.start, event.end) for event in events if event.name == "rollout"]
    training = [(e.start, e.end) for e in events if e.name in ("old", "update") and e.step in steps]
    moments = sorted({moment for spans in (sampling, training) for each in spans for moment in each})

    def within(spans: list[tuple[float, float]], moment: float) -> bool:
        return any(begin <= moment < end for begin, end in spans)

    return sum(end - begin for begin, end in pairwise(moments) if within(sampling, begin) and within(training, begin))


def _report(
    args: argparse.Namespace, load: Load, bare: dict[str, list[float]], ahead: dict[str, Any], turns: dict[str, Any]
) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in bare.items()}
    sides = {"rollout": medians["rollout"], "old + update": medians["old"] + medians["update"]}
    slower = max(sides.values())
    print(f"\n{args.model}, {load.prompts} x {load.n} samples of {load.prompt_tokens}/{load.response_tokens} tokens,")
    print(f"{args.gpus} GPUs: half train, half generate a step ahead; and all do both, in turns")
    print(f"{'':16}{'bare s':>10}{'ahead s':>10}{'turns s':>10}")
    for name in dict.fromkeys(("rollout", "old", "update", "sync", *ahead["by_name_s"], *turns["by_name_s"])):
        columns = (medians, ahead["by_name_s"], turns["by_name_s"])
        print(f"{name:16}{''.join(f'{each[name]:10.3f}' if name in each else ' ' * 10 for each in columns)}")
    print(f"{'slower; step':16}{slower:10.3f}{ahead['step_s']:10.3f}{turns['step_s']:10.3f}")
    gain = turns["step_s"] / ahead["step_s"]
    print(f"both sides at work for {ahead['overlap_s']:.3f} s of a step; in turns it takes {gain:.2f} times as long")
    result = {
        "model": args.model,
        "gpus": args.gpus,
        "in_flight": args.in_flight,
        "colocated": "together" if args.together else "turns",
        "prompts": load.prompts,
        "n": load.n,
        "prompt_tokens": load.prompt_tokens,
        "response_tokens": load.response_tokens,
        "bare_s": bare,
        "ahead": ahead,
        "turns": turns,
        "step_over_slower_stage": ahead["step_s"] / slower,
        "gain_over_colocated": gain,
    }
    verdicts = [
        Verdict("seconds of a step / the slower of the two bare stages", ahead["step_s"] / slower, "at most", AIM),
        Verdict("versions that the oldest samples were behind", ahead["staleness"], "at most", 1),
    ]
    tell(result, verdicts, args.json)


if __name__ == "__main__":
    main()
