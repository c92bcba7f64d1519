"""Time a train step of bare Megatron-core, and the same through dagrl's engine, in one run on the same GPUs.

    python benchmarks/train_step.py --model 1.7b
    python benchmarks/train_step.py --model 8b --ranks 2 --tensor-parallel 2
    python benchmarks/train_step.py --model qwen3_5_9b_third --alone
    python benchmarks/train_step.py --model a3b_6_layers --ranks 2 --expert-parallel 2 [--transformer KEY=VALUE ...]

Both train the same weights on the same packed tokens, with the settings of `bare_step`. Their steps take turns, so that
clocks and temperature are the same for both; where the model does not fit twice (or with ``--apart``), their rounds do.
The bare step's loss is the cross-entropy of its own output layer; dagrl's is the policy objective on each response
token. Of a mixture, the bare step fuses the permutation of tokens on GPUs; dagrl's does with ``--transformer
moe_permute_fusion=true``. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from kernel_tables import write_kernels
from ranks import Meetings, run_ranks
from workload import MODELS, Workload, write_model

from dagrl.algorithms.objective import PolicyObjective
from dagrl.backends.backend import RankContext
from dagrl.backends.families.flops import model_flops
from dagrl.backends.families.registry import model_shape
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.config.schema import LossSpec, ModelSpec

AIMS = {"step": 0.97, "logprob": 2.5, "chunks": 0.98}
GIB = 2**30
_BYTES_OF_TRAINING = 18
"""For one parameter: bfloat16 weight, float32 gradient, weight, and Adam's two moments."""


@dataclass(frozen=True, slots=True)
class Options:
    """What one run measures."""

    folder: Path
    workload: Workload
    ranks: int
    tensor_parallel: int
    expert_parallel: int
    transformer: dict[str, Any]
    rounds: int
    warmup: int
    apart: bool
    alone: bool
    """Whether only dagrl's side runs."""
    fused_linear_cross_entropy: bool
    profile: Path | None


Steps = dict[str, Callable[[], float]]
"""By kind; each returns the mean negative log-prob that it saw, or NaN."""


@dataclass(frozen=True, slots=True)
class Side:
    """A model, and what is done with it."""

    steps: Steps
    close: Callable[[], None]


@dataclass(slots=True)
class Results:
    """What one rank measured, by kind of step."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    """Most bytes that the step's side held."""
    held: dict[str, int] = field(default_factory=dict)
    """Bytes that it holds between steps."""
    nll: dict[str, float] = field(default_factory=dict)
    """Mean negative log-prob of the tokens under the start weights."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Seconds to build each side."""


def main() -> None:
    """Write the model, start the ranks, print what they measured."""
    args = _arguments()
    tiny = args.model.startswith("tiny")
    workload = Workload(
        row_tokens=args.row_tokens or (16 if tiny else 2048),
        rows_per_micro_batch=args.rows_per_micro_batch or (2 if tiny else 8),
        micro_batches=args.micro_batches,
    )
    with tempfile.TemporaryDirectory(prefix="dagrl-benchmark-") as own:
        begun = time.monotonic()
        folder = write_model((args.weights or Path(own)) / args.model, MODELS[args.model])
        print(f"start weights in {folder} after {time.monotonic() - begun:.1f} s", flush=True)
        options = Options(
            folder=folder,
            workload=workload,
            ranks=args.ranks,
            tensor_parallel=args.tensor_parallel,
            expert_parallel=args.expert_parallel,
            transformer={
                key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in args.transformer)
            },
            rounds=args.rounds,
            warmup=args.warmup,
            apart=args.apart,
            alone=args.alone,
            fused_linear_cross_entropy=args.fused_linear_cross_entropy,
            profile=args.profile,
        )
        run_ranks(args.ranks, partial(_on_rank, options, Meetings(4), args.json))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="1.7b")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one GPU each")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="above 1, with sequence parallelism")
    parser.add_argument("--expert-parallel", type=int, default=1, help="of the ranks, each with its share of experts")
    parser.add_argument(
        "--transformer", nargs="+", default=[], metavar="KEY=VALUE", help="of Megatron's, on both sides"
    )
    parser.add_argument("--row-tokens", type=int, help="tokens of a row; 2048")
    parser.add_argument("--rows-per-micro-batch", type=int, help="rows packed into one forward pass; 8")
    parser.add_argument("--micro-batches", type=int, default=4, help="forward passes of a step")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each kind")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each kind before that")
    parser.add_argument("--apart", action="store_true", help="hold one of the two models at a time, even if both fit")
    parser.add_argument("--alone", action="store_true", help="without the bare side, which has no gated delta nets")
    parser.add_argument(
        "--fused-linear-cross-entropy", action="store_true", help="dagrl's side: logits in chunks, beside whole ones"
    )
    parser.add_argument("--weights", type=Path, help="keep start weights here for later runs")
    parser.add_argument("--profile", type=Path, help="write the kernels of one step of each kind to this folder")
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args()


def _on_rank(options: Options, meetings: Meetings, json_file: Path | None, rank: int) -> None:
    contexts = meetings.join(rank, options.ranks)
    results = Results()
    options = replace(options, apart=not options.alone and (options.apart or not _fits_twice(options)))
    if options.alone:
        side = _start(_dagrl, options, next(contexts), results)
        _measure(side.steps, options, results)
        side.close()
    elif options.apart:
        # Each of the two twice: a drift shows as a difference between the halves.
        half = replace(options, rounds=-(-options.rounds // 2))
        for build, context in zip((_bare, _dagrl, _bare, _dagrl), contexts, strict=True):
            side = _start(build, options, context, results)
            _measure(side.steps, half, results)
            side.close()
            del side
            _free()
            if _allocated() > GIB:
                print(f"rank {rank}: {_allocated() / GIB:.1f} GiB are still held after {build.__name__}", flush=True)
    else:
        # The engine makes the groups that the bare model then finds.
        context = next(contexts)
        sides = [_start(build, options, context, results) for build in (_dagrl, _bare)]
        _measure({**sides[1].steps, **sides[0].steps}, options, results)
        sides[0].close()
    if rank == 0:
        _report(options, results, json_file)


def _fits_twice(options: Options) -> bool:
    """Whether the GPU has room for two models and the activations of one."""
    if not torch.cuda.is_available():
        return True
    files = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    weights = files / options.tensor_parallel / options.expert_parallel
    activations = 3 * 2**20 * options.workload.tokens_per_micro_batch / options.tensor_parallel
    _, total = torch.cuda.mem_get_info()
    return 2 * _BYTES_OF_TRAINING * weights / 2 + activations < 0.95 * total


def _start(
    build: Callable[[Options, RankContext], Side], options: Options, context: RankContext, results: Results
) -> Side:
    """Build one side, and take one step of each kind, so that it holds all that it keeps between steps."""
    begun, before = time.monotonic(), _allocated()
    side = build(options, context)
    _synchronize()
    results.start_s.setdefault(build.__name__.strip("_"), time.monotonic() - begun)
    for name, step in side.steps.items():
        # The first step of either side sees the start weights: both must say the same of the tokens.
        said = step()
        if name in ("bare", "logprob"):
            results.nll.setdefault(name, said)
    _synchronize()
    results.held |= dict.fromkeys(side.steps, _allocated() - before)
    return side


def _parallel(options: Options) -> ParallelSpec:
    return ParallelSpec(
        tensor_model_parallel_size=options.tensor_parallel,
        expert_model_parallel_size=options.expert_parallel,
        sequence_parallel=options.tensor_parallel > 1,
    )


def _bare(options: Options, context: RankContext) -> Side:
    from bare_step import BareStep

    from dagrl.backends.megatron.engine import distributed

    if not torch.distributed.is_initialized():
        distributed.start(context, _parallel(options))
    return Side({"bare": BareStep(options.folder, options.workload, options.transformer)}, distributed.stop)


def _dagrl(options: Options, context: RankContext) -> Side:
    from megatron.core import parallel_state

    from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine

    spec = MegatronEngineSpec(
        backend="megatron",
        group="train",
        parallel=_parallel(options),
        transformer=options.transformer,
        fused_linear_cross_entropy=options.fused_linear_cross_entropy,
    )
    engine = MegatronEngine(ModelSpec(path=options.folder), spec, context, train_steps=1000, trainable=True)
    vocab_size = model_shape(ModelSpec(path=options.folder)).vocabulary
    batch = options.workload.batch(vocab_size, parallel_state.get_data_parallel_rank())
    budget = options.workload.tokens_per_micro_batch

    def logprob() -> float:
        column = engine.logprobs(batch, temperature=1.0, tokens_per_micro_batch=budget)
        return -float(np.mean(column.values))

    own = engine._model

    def train(needs_entropy: bool, *, fused: bool = own.fused, twice: bool = False) -> float:
        kind = LogitsTwice if twice else PolicyObjective
        objective = kind(LossSpec(), 1.0, ["old_logprob"], needs_entropy=needs_entropy)
        engine._model = replace(own, fused=fused)
        metrics = engine.update([batch], objective, tokens_per_micro_batch=budget)
        assert np.isfinite(metrics["grad_norm"].mean)
        return float("nan")

    steps = {"logprob": logprob, "dagrl": lambda: train(False), "dagrl with entropy": lambda: train(True)}
    if options.fused_linear_cross_entropy:
        steps |= {"whole logits": lambda: train(False, fused=False), "logits twice": lambda: train(False, twice=True)}
    return Side(steps, engine.close)


class LogitsTwice(PolicyObjective):
    """A loss of whole responses, as an engine sees it: chunks of logits are computed again in the backward pass."""

    def token_loss(self) -> None:
        return None


def _measure(steps: Steps, options: Options, results: Results) -> None:
    for i in range(options.warmup + options.rounds):
        for name, step in steps.items():
            _synchronize()
            _reset_peak()
            allocated = _allocated()
            begun = time.perf_counter()
            step()
            _synchronize()
            seconds = time.perf_counter() - begun
            if i >= options.warmup:
                results.seconds.setdefault(name, []).append(seconds)
                # The other side's model may lie beside: what counts is what this one holds, and what a step adds.
                peak = results.held[name] + _peak() - allocated
                results.peak[name] = max(results.peak.get(name, 0), peak)
    if options.profile is not None:
        for name, step in steps.items():
            write_kernels(name, step, options.profile)


def _report(options: Options, results: Results, json_file: Path | None) -> None:
    workload = options.workload
    rows = _rows(options, results)
    seconds = {name: row["seconds"] for name, row in rows.items()}
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "model": options.folder.name,
        "ranks": options.ranks,
        "tensor_parallel": options.tensor_parallel,
        "expert_parallel": options.expert_parallel,
        "transformer": options.transformer,
        "tokens_of_a_replica": workload.tokens,
        "tokens_per_micro_batch": workload.tokens_per_micro_batch,
        "apart": options.apart,
        "fused_linear_cross_entropy": options.fused_linear_cross_entropy,
        "steps": len(results.seconds["dagrl"]),
        "start_s": results.start_s,
        "nll": results.nll,
        "measured": rows,
        "all_seconds": results.seconds,
        "logprob_over_train": seconds["dagrl"] / seconds["logprob"],
    }
    if not options.alone:
        result["dagrl_over_bare"] = seconds["bare"] / seconds["dagrl"]
        result["dagrl_with_entropy_over_bare"] = seconds["bare"] / seconds["dagrl with entropy"]
    print(f"\n{options.ranks} x {result['device']}, {result['model']}, {workload.tokens} tokens a replica and step")
    print(" " * 20 + "".join(f"{title:>10}" for title in _TITLES))
    for name, row in rows.items():
        print(f"{name:20}" + "".join(f"{row[key]:10.{digits}f}" for key, digits in _TITLES.values()))
    if not options.alone:
        print(f"throughput of dagrl / bare: {result['dagrl_over_bare']:.4f} (aim: {AIMS['step']}); ", end="")
        print(f"with entropy: {result['dagrl_with_entropy_over_bare']:.4f}")
    print(f"log-prob pass / train step: {result['logprob_over_train']:.3f} (aim: {AIMS['logprob']})")
    print(f"mean negative log-prob at the start: {results.nll}; seconds to start: {results.start_s}")
    if "whole logits" in seconds:
        result["chunks_over_whole_logits"] = seconds["whole logits"] / seconds["dagrl"]
        print(f"logits in chunks / whole: {result['chunks_over_whole_logits']:.4f} (aim: {AIMS['chunks']})")
    line = json.dumps(result)
    print(line, flush=True)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(line + "\n")


_TITLES = {
    "median s": ("seconds", 4),
    "fastest": ("fastest", 4),
    "slowest": ("slowest", 4),
    "tok/s": ("tokens_per_s", 0),
    "TFLOP/s": ("tflops_per_gpu", 1),
    "held GiB": ("held_gib", 1),
    "peak GiB": ("peak_gib", 1),
}


def _rows(options: Options, results: Results) -> dict[str, dict[str, float]]:
    workload = options.workload
    lengths = np.full(workload.rows, workload.row_tokens, dtype=np.int64)
    predictions = workload.rows * (workload.row_tokens - 1)
    flops = model_flops(model_shape(ModelSpec(path=options.folder)))
    rows = {}
    for name, seconds in results.seconds.items():
        median = statistics.median(seconds)
        work = flops.forward(lengths, predictions) if name == "logprob" else flops.train(lengths, predictions)
        rows[name] = {
            "seconds": median,
            "fastest": min(seconds),
            "slowest": max(seconds),
            "tokens_per_s": workload.tokens * (options.ranks // options.tensor_parallel) / median,
            "tflops_per_gpu": work / options.tensor_parallel / median / 1e12,
            "held_gib": results.held[name] / GIB,
            "peak_gib": results.peak[name] / GIB,
        }
    return rows


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    # Read by CUDA when it starts, in every rank.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main()
