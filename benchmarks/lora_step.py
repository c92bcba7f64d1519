"""Time steps of an engine that trains low-rank adapters, beside one that trains all weights where that fits.

    python benchmarks/lora_step.py --model 8b
    python benchmarks/lora_step.py --agree --model small small_moe

The first prints seconds of a log-prob pass, of a train step and of an export of the merged weights, with the peak of
each, on one GPU. The second fills the adapters of a model with random numbers, and compares its log-probs with those of
a model of the merged weights: mean and largest difference, beside the mean difference that the adapters make. The last
line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import Meetings, run_ranks
from workload import MODELS, Workload, write_model

from dagrl.algorithms.objective import PolicyObjective
from dagrl.backends.backend import RankContext
from dagrl.backends.families.registry import model_shape
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.schema import LossSpec, ModelSpec

GIB = 2**30


def main() -> None:
    """Measure, or compare; print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["1.7b"])
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--agree", action="store_true", help="compare with the merged weights")
    parser.add_argument("--without-all", action="store_true", help="do not train all weights for comparison")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16"], help="with --agree")
    parser.add_argument("--rows", type=int, default=8, help="of 2048 tokens in a micro-batch; a step has 32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", type=Path, help="keep start weights here for later runs")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dagrl-benchmark-") as scratch:
        for model in args.model:
            folder = write_model((args.weights or Path(scratch)) / model, MODELS[model])
            if args.agree:
                results[model] = {each: _agreement(folder, args.rank, each) for each in args.precision}
            else:
                lora: list[int | None] = [args.rank] if args.without_all else [None, args.rank]
                rows = {
                    _name(rank): _apart(partial(_time, folder, rank, args.rounds, args.rows), folder) for rank in lora
                }
                results[model] = rows
            print(f"{model}: {json.dumps(results[model], indent=1)}", flush=True)
    line = json.dumps({"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", **results})
    print(line, flush=True)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(line + "\n")


def _name(rank: int | None) -> str:
    return "all weights" if rank is None else f"rank {rank}"


def _agreement(folder: Path, rank: int, precision: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dagrl-benchmark-") as merged:
        adapted, base = _apart(partial(_fill_and_export, folder, Path(merged), rank, precision), folder)
        expected = _apart(partial(_logprobs, Path(merged), precision), folder)
    between = np.abs(np.array(adapted) - np.array(expected))
    return {
        "mean": float(between.mean()),
        "largest": float(between.max()),
        "mean_of_adapters": float(np.abs(np.array(expected) - np.array(base)).mean()),
    }


def _apart(measure: Callable[[RankContext], Any], folder: Path) -> Any:
    """Call `measure` in a process for itself, which frees the GPU, and return its result."""
    result = folder / "result.json"
    run_ranks(1, partial(_on_rank, measure, Meetings(1), result))
    return json.loads(result.read_text())


def _on_rank(measure: Callable[[RankContext], Any], meetings: Meetings, result: Path, rank: int) -> None:
    result.write_text(json.dumps(measure(next(meetings.join(rank, 1)))))


def _engine(folder: Path, context: RankContext, rank: int | None, *, trainable: bool, precision: str = "bf16") -> Any:
    from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine

    exact = {"bf16": False} if precision == "fp32" else {}
    spec = MegatronEngineSpec.model_validate(
        {"backend": "megatron", "group": "train", "transformer": exact, "lora": rank and {"rank": rank}}
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    return MegatronEngine(ModelSpec(path=folder), spec, context, train_steps=1000, trainable=trainable)


def _fill_and_export(
    folder: Path, merged: Path, rank: int, precision: str, context: RankContext
) -> tuple[list[float], list[float]]:
    """Write the merged weights. Returns log-probs with the adapters and without them."""
    from safetensors.torch import save_file

    engine = _engine(folder, context, rank, trainable=True, precision=precision)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in engine._model.chunks[0].named_parameters():
            if ".adapter.linear_out." in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    found = _passed(engine, folder)
    shutil.copy(folder / "config.json", merged)
    tensors = {name: tensor.cpu().clone() for bucket in engine.export_weights(1 << 28) for name, tensor in bucket}
    save_file(tensors, merged / "model.safetensors")
    with engine.start_weights():
        return found, _passed(engine, folder)


def _logprobs(folder: Path, precision: str, context: RankContext) -> list[float]:
    return _passed(_engine(folder, context, None, trainable=False, precision=precision), folder)


def _passed(engine: Any, folder: Path) -> list[float]:
    workload = Workload(row_tokens=256, rows_per_micro_batch=4, micro_batches=1)
    batch = workload.batch(model_shape(ModelSpec(path=folder)).vocabulary)
    column = engine.logprobs(batch, temperature=1.0, tokens_per_micro_batch=workload.tokens_per_micro_batch)
    return [float(value) for value in column.values]


def _time(folder: Path, rank: int | None, rounds: int, rows: int, context: RankContext) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        engine = _engine(folder, context, rank, trainable=True)
        found: dict[str, Any] = {"start_s": round(time.monotonic() - begun, 1)}
        tiny = folder.name.startswith("tiny")
        workload = Workload(16, 2, 4) if tiny else Workload(2048, rows, 32 // rows)
        batch = workload.batch(model_shape(ModelSpec(path=folder)).vocabulary)
        budget = workload.tokens_per_micro_batch
        objective = PolicyObjective(LossSpec(), 1.0, ["old_logprob"], needs_entropy=False)
        exporter = engine.weight_exporter(1 << 28)
        buffer = torch.empty(exporter.manifest.buffer_sizes(1)[0], dtype=torch.uint8, device=exporter.device)

        def export() -> None:
            with exporter.exporting():
                for index in range(len(exporter.manifest.buckets)):
                    exporter.fill(index, buffer)

        steps: dict[str, Callable[[], Any]] = {
            "logprob": lambda: engine.logprobs(batch, temperature=1.0, tokens_per_micro_batch=budget),
            "train": lambda: engine.update([batch], objective, tokens_per_micro_batch=budget),
            "export": export,
        }
        for name, step in steps.items():
            step()
            seconds = []
            _reset_peak()
            for _ in range(rounds):
                _synchronize()
                started = time.perf_counter()
                step()
                _synchronize()
                seconds.append(time.perf_counter() - started)
            found[f"{name}_s"] = round(statistics.median(seconds), 4)
            found[f"{name}_peak_gib"] = round(_peak() / GIB, 2)
        found["tokens_per_s"] = round(workload.tokens / found["train_s"])
        trained = [each for each in engine._model.chunks[0].parameters() if each.requires_grad]
        found["trained_mib"] = round(sum(each.nbytes for each in trained) / 2**20, 1)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    main()
