"""Compare steps of a colocated pipeline in bfloat16 with steps whose rollout, cache or training is in fp8.

    python benchmarks/fp8.py --out FOLDER --model 1.7b [--backend vllm] [--only bf16 rollout channel]
    python benchmarks/fp8.py --out FOLDER --model 8b --gpus 2 --tensor-parallel 2
    python benchmarks/fp8.py --out FOLDER --model 8b --only bf16 rollout cache --set engines.actor.lora.rank=32

The last trains low-rank adapters, which one GPU has room for, and sends merged weights.

Each variant is a separate `dagrl run` with random start weights, on the same GPUs and prompts, one after the other.
Prints the seconds of the rollout, of the trainer's log-probs, of the update and of a weight sync, the ratio of those in
bfloat16 to them, the step over the physical limit of its stages (`physical_limit`), and the mean difference of the
log-probs of generator and trainer. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

from dagrl_run import DagrlRun, of_step, span
from options import add_backend, add_load, add_settings, parsed, parser_of
from physical_limit import Formats, measured_rates, stage_limits
from pipelines import Load, arguments_of, grpo_pipeline, write_prompt_file
from ranks import apart
from reports import Verdict, tell

from dagrl.backends.families.registry import model_shape
from dagrl.config.schema import ModelSpec

AIM = 1.25
_START_S = 300.0
_STEP_S = 120.0
_PLAIN = "bf16"
_ROLLOUT = {"quantization": "fp8"}
_CHANNEL = {"quantization": "fp8_per_channel"}
_FP8_CACHE = {"server": {"kv_cache_dtype": "fp8_e4m3"}}
_CACHE = _ROLLOUT | _FP8_CACHE
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    _PLAIN: ({}, {}),
    "rollout": (_ROLLOUT, {}),
    "cache": (_CACHE, {}),
    "channel": (_CHANNEL, {}),
    "channel_cache": (_CHANNEL | _FP8_CACHE, {}),
    "train": ({}, {"fp8": "hybrid"}),
    "train_tensorwise": ({}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "train_delayed": ({}, {"fp8": "hybrid", "fp8_recipe": "delayed"}),
    "all": (_CACHE, {"fp8": "hybrid"}),
    "all_channel": (_CHANNEL | _FP8_CACHE, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
}
"""Variant -> fields added to the generator's section, and to the trainer's ``transformer``."""
_PARTS = ("rollout", "old", "update", "sync")
_DIFFERENCE = "mismatch/logprob_diff/mean"


def main() -> None:
    """Run the variants, tell how they compare."""
    parser = parser_of(__doc__)
    add_backend(parser)
    add_load(parser)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of trainer and servers")
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each")
    parser.add_argument("--warmup", type=int, default=1, help="steps before that")
    add_settings(parser)
    args, model = parsed(parser, prompts=4, n=2, prompt_tokens=16, response_tokens=16, rounds=1, rows_per_micro_batch=4)
    if args.smoke:
        # CPUs and tiny models have no fp8.
        args.only = [_PLAIN]
    load = Load(args.prompts, args.n, args.prompt_tokens, args.response_tokens)
    prompts = write_prompt_file(args.out / "fp8_prompts.parquet", load, args.warmup + args.rounds)
    rates = apart(measured_rates)
    rows = {}
    for name in args.only:
        rows[name] = _measure(name, args, model, prompts, load)
        limits = stage_limits(model_shape(ModelSpec(path=model)), load, rates, _formats(name))
        rows[name]["step_over_limit"] = rows[name]["step_s"] * args.gpus / sum(limits.values())
        # What is known stays known if a later variant is ended.
        _report(args, rows)


def _formats(name: str) -> Formats:
    generator, transformer = VARIANTS[name]
    return Formats("quantization" in generator, "server" in generator, bool(transformer))


def _measure(name: str, args: argparse.Namespace, model: Path, prompts: Path, load: Load) -> dict[str, Any]:
    """Median seconds of the parts of a step, and the difference of log-probs."""
    pipeline = _pipeline(name, args, model, prompts, load)
    steps = args.warmup + args.rounds
    with DagrlRun(pipeline, args.out / f"fp8_{name}_run", *args.set) as run:
        run.wait_for_step(steps, _START_S + steps * _STEP_S)
        measured = [line for line in run.metrics() if args.warmup < line["step"] <= steps]
        events = [of_step(run.events(), line["step"]) for line in measured]
    found: dict[str, Any] = {"step_s": statistics.median(line["time/step_s"] for line in measured)}
    for part in _PARTS:
        spans = [taken for taken in (span(each, part) for each in events) if taken]
        if spans:
            found[f"{part}_s"] = statistics.median(end - start for start, end in spans)
    found["logprob_diff"] = statistics.mean(line[_DIFFERENCE] for line in measured)
    found["rollout_tokens_per_s"] = load.sampled_tokens / found["rollout_s"]
    return found


def _pipeline(name: str, args: argparse.Namespace, model: Path, prompts: Path, load: Load) -> dict[str, Any]:
    size = args.tensor_parallel
    server = arguments_of(args.backend, load, model)
    if size > 1:
        server |= {"tensor_parallel_size" if args.backend == "vllm" else "tp_size": size}
    pipeline = copy.deepcopy(
        grpo_pipeline(
            f"fp8-{name.replace('_', '-')}",
            model,
            prompts,
            load,
            server,
            gpus=args.gpus,
            sleep=True,
            mini_batch=max(1, args.prompts // 2),
            tokens_per_micro_batch=args.rows_per_micro_batch * load.row_tokens,
            backend=args.backend,
        )
    )
    generator, transformer = VARIANTS[name]
    engines = pipeline["engines"]
    server |= generator.get("server", {})
    engines["generator"] |= generator | {"server": server}
    if transformer:
        engines["actor"]["transformer"] = transformer
    if size > 1:
        engines["actor"]["parallel"] = {"tensor_model_parallel_size": size, "sequence_parallel": True}
    return pipeline


def _report(args: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> None:
    parts = [f"{part}_s" for part in (*_PARTS, "step")]
    print(f"\n{args.model} on {args.backend}, {args.prompts} x {args.n} of {args.prompt_tokens}/{args.response_tokens}")
    print(f"{'':18}{''.join(f'{part:>18}' for part in parts)}{'of limit':>10}{'logprob_diff':>14}")
    plain = rows.get(_PLAIN, {})
    for name, row in rows.items():
        cells = "".join(f"{_cell(row.get(part), plain.get(part)):>18}" for part in parts)
        print(f"{name:18}{cells}{row['step_over_limit']:10.2f}{row['logprob_diff']:14.5f}")
    rollouts = [
        (name, "rollout_s") for name, (generator, transformer) in VARIANTS.items() if generator and not transformer
    ]
    verdicts = [
        Verdict(f"{part} in bfloat16 / in fp8 ({name})", plain[part] / rows[name][part], "at least", AIM)
        for name, part in (*rollouts, ("train", "update_s"))
        if name in rows and plain
    ]
    tell({"model": args.model, "backend": args.backend, "measured": rows}, verdicts, args.json)


def _cell(seconds: float | None, plain: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.3f}" + (f" ({plain / seconds:.2f}x)" if plain else "")


if __name__ == "__main__":
    main()
