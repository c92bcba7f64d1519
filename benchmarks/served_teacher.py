"""Time the log-probs of given tokens on a SGLang server of dagrl, against what SGLang alone takes to prefill them.

    python benchmarks/served_teacher.py --out FOLDER --model 8b
    python benchmarks/served_teacher.py --out FOLDER --smoke

One server, in turns: bare is one call of SGLang's engine with all rows, which samples nothing and returns no log-probs;
dagrl's is what a worker calls for a shard, with a log-prob of each response token, and once more with the likeliest
tokens. Each round has new rows, because a server caches those that it has read. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bare_sglang import whole_share
from options import parsed, parser_of
from reports import Verdict, tell

from dagrl.backends.base import TokenOutputs
from dagrl.backends.sglang.engine import SglangEngine
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema import ModelSpec
from dagrl.data.batch import Batch, Column

AIM = 0.9
_HOW: dict[str, Any] = {"temperature": 1.0, "tokens_per_micro_batch": 1}


def main() -> None:
    """Start a server, let the ways take turns, tell how they compare."""
    parser = parser_of(__doc__, "8b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args, model = parsed(parser, rows=4, prompt_tokens=8, response_tokens=16, top_k=4, rounds=1)
    engine = _server(model, args.out)
    ways: dict[str, Callable[[Batch], object]] = {
        "bare": lambda rows: _prefill(engine, rows),
        "log-probs": lambda rows: engine.logprobs(rows, **_HOW),
        f"top {args.top_k}": lambda rows: engine.token_outputs(rows, TokenOutputs(top_k=args.top_k), **_HOW),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for number in range(args.rounds + 1):
            for place, (way, call) in enumerate(ways.items()):
                rows = _rows(args, seed=len(ways) * number + place, vocabulary=engine._capacity.vocabulary)
                begun = time.perf_counter()
                call(rows)
                seconds[way].append(time.perf_counter() - begun)
    finally:
        engine.close()
    _report(args, {way: each[1:] for way, each in seconds.items()})


def _server(model: Path, out: Path) -> SglangEngine:
    spec = SglangEngineSpec(backend="sglang", group="bare")
    share = replace(whole_share(), logs=out / "logs", start_timeout_s=600.0, scored_top_k=0)
    return SglangEngine(ModelSpec(path=model), spec, share)


def _rows(args: argparse.Namespace, *, seed: int, vocabulary: int) -> Batch:
    generator = np.random.default_rng(seed)
    sizes = {"prompt_tokens": args.prompt_tokens, "response_tokens": args.response_tokens}
    columns = {
        name: Column.ragged(list(generator.integers(0, vocabulary, (args.rows, size))), "int64")
        for name, size in sizes.items()
    }
    return Batch(np.arange(args.rows, dtype=np.int64), columns)


def _prefill(engine: SglangEngine, rows: Batch) -> None:
    """All rows in one call of SGLang's own engine."""
    tokens = [[*rows["prompt_tokens"][row], *rows["response_tokens"][row]] for row in range(len(rows))]
    server, ids = engine._server, [[int(token) for token in row] for row in tokens]
    server.run(server.engine.async_generate(input_ids=ids, sampling_params={"max_new_tokens": 0}), "prefill", 600.0)


def _report(args: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    tokens = args.rows * (args.prompt_tokens + args.response_tokens)
    rates = {way: tokens / statistics.median(each) for way, each in seconds.items()}
    verdicts = [
        Verdict(f"tokens a second with {way}, over bare SGLang's", rate / rates["bare"], "at least", AIM)
        for way, rate in rates.items()
        if way != "bare"
    ]
    tell({"benchmark": "served_teacher", "tokens_per_s": rates, "seconds": seconds}, verdicts, args.json)


if __name__ == "__main__":
    main()
