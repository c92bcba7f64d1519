"""Time log-probs and updates of groups whose rows share a prompt, with ``prefix_sharing`` and without.

    python benchmarks/prefix_sharing.py --out FOLDER --model 1.7b --prompts 16 --n 8 --prompt-tokens 4096
    python benchmarks/prefix_sharing.py --out FOLDER --model small --prompts 2 --prompt-tokens 512 --response-tokens 64

One engine does both in turns, with the same weights and rows. Tokens a second count each row's prompt, however often it
is computed. Prints the ratio of both, and by how much their log-probs and gradient norms differ, beside the difference
that another packing of whole rows makes. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_tables import write_kernels
from options import add_load, parsed, parser_of
from ranks import Meetings, run_ranks

from dagrl.algorithms.objective import PolicyObjective
from dagrl.backends.families.registry import model_shape
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.schema import LossSpec, ModelSpec
from dagrl.data.batch import Batch, Column


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    add_load(parser)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="write the kernels of log-probs and updates to this folder")
    parser.set_defaults(n=8, prompts=16, prompt_tokens=4096)
    args, model = parsed(parser, prompts=2, n=4, prompt_tokens=48, response_tokens=8, rounds=2)
    found = args.out / "prefix_sharing.json"
    run_ranks(args.ranks, partial(_on_rank, Meetings(1), args, model, found))
    results = json.loads(found.read_text())
    for kind in ("logprob", "update"):
        shared, whole = results["shared"][kind], results["whole"][kind]
        print(f"{kind}: {shared:.0f} tokens/s shared, {whole:.0f} whole: {shared / whole:.2f} times")
    print(f"log-probs differ by {results['differs']:.2g} at most, {results['mean']:.2g} on average;", end=" ")
    print(f"whole rows in other packs by {results['packed_differs']:.2g}, {results['packed_mean']:.2g}")
    line = json.dumps({"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", **results})
    print(line)
    if args.json is not None:
        args.json.write_text(line + "\n")


def _on_rank(meetings: Meetings, args: Any, model: Path, found: Path, rank: int) -> None:
    from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine

    parallel = {
        "tensor_model_parallel_size": args.tensor_parallel,
        "sequence_parallel": args.tensor_parallel > 1,
        "context_parallel_size": args.context_parallel,
    }
    spec = MegatronEngineSpec.model_validate(
        {"backend": "megatron", "group": "train", "parallel": parallel, "prefix_sharing": True}
        | {"optimizer": {"lr": 1e-12}}  # The rows see the same weights each time.
    )
    ranks = next(meetings.join(rank, args.ranks))
    engine = MegatronEngine(ModelSpec(path=model), spec, ranks, train_steps=1000, trainable=True)
    models = {"shared": engine._model, "whole": replace(engine._model, shares_prefixes=False)}
    replica = rank // (args.tensor_parallel * args.context_parallel)
    batch = _groups(args, model_shape(ModelSpec(path=model)).vocabulary, replica)
    budget = args.rows_per_micro_batch * (args.prompt_tokens + args.response_tokens)
    objective = PolicyObjective(LossSpec(), 1.0, ["old_logprob"], needs_entropy=False)
    seconds: dict[tuple[str, str], list[float]] = {}
    logprobs: dict[str, np.ndarray] = {}
    peaks: dict[str, float] = {}
    norms: dict[str, float] = {}

    def logprob(budget: int) -> np.ndarray:
        return engine.logprobs(batch, temperature=1.0, tokens_per_micro_batch=budget).values

    def update() -> float:
        return engine.update([batch], objective, tokens_per_micro_batch=budget)["grad_norm"].mean

    for number in range(args.rounds + 1):
        for side, packed in models.items():
            engine._model = packed
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            logprobs[side] = logprob(budget)
            between = time.perf_counter()
            norms[side] = update()
            _synchronize()
            if number:
                seconds.setdefault((side, "logprob"), []).append(between - begun)
                seconds.setdefault((side, "update"), []).append(time.perf_counter() - between)
            if torch.cuda.is_available():
                peaks[side] = torch.cuda.max_memory_allocated() / 2**30
    if args.profile is not None:
        for side, packed in models.items():
            engine._model = packed
            write_kernels(f"logprob {side}", partial(logprob, budget), args.profile)
            write_kernels(f"update {side}", update, args.profile)
    engine._model = models["whole"]
    packed_otherwise = logprob(budget // 2) if args.rows_per_micro_batch > 1 else logprobs["whole"]
    if rank == 0:
        tokens = (args.prompt_tokens + args.response_tokens) * len(batch)
        rates = {
            side: {kind: tokens / statistics.median(seconds[side, kind]) for kind in ("logprob", "update")}
            for side in models
        }
        results = {**rates, **_differences(logprobs, packed_otherwise), "grad_norm": norms, "peak_gib": peaks}
        found.write_text(json.dumps(results))
    engine.close()


def _differences(logprobs: dict[str, np.ndarray], packed_otherwise: np.ndarray) -> dict[str, float]:
    """How far log-probs are from those of whole rows, and those of whole rows in other packs."""
    shared, packed = (np.abs(each - logprobs["whole"]) for each in (logprobs["shared"], packed_otherwise))
    return {
        "differs": float(shared.max()),
        "mean": float(shared.mean()),
        "packed_differs": float(packed.max()),
        "packed_mean": float(packed.mean()),
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _groups(args: Any, vocabulary: int, replica: int) -> Batch:
    """One replica's groups, whose responses have all the same length."""
    random = np.random.default_rng(29 + replica)
    prompts = [random.integers(0, vocabulary, args.prompt_tokens) for _ in range(args.prompts)]
    rows = args.prompts * args.n
    responses = random.integers(0, vocabulary, (rows, args.response_tokens))
    advantages = [np.full(args.response_tokens, random.normal()) for _ in range(rows)]
    old = np.full(args.response_tokens, -np.log(vocabulary))
    return Batch(
        np.arange(rows) + replica * rows,
        {
            "prompt_tokens": Column.ragged([prompts[row // args.n] for row in range(rows)], "int64"),
            "response_tokens": Column.ragged(list(responses), "int64"),
            "response_mask": Column.ragged([np.ones(args.response_tokens)] * rows, "float32"),
            "advantage": Column.ragged(advantages, "float32"),
            "old_logprob": Column.ragged([old] * rows, "float32"),
        },
    )


if __name__ == "__main__":
    main()
