"""Time rollouts of bare SGLang or vLLM, and of a pipeline of dagrl that does nothing else, in one run on the same GPU.

    python benchmarks/rollout.py --out FOLDER [--backend vllm]

Two servers with the same arguments and weights lie beside each other on the GPU and take turns, round by round, on the
same prompts, each round with prompts of its own. Bare is ``sglang.Engine.generate``, or ``vllm.LLM.generate``, with all
prompts in one call; dagrl's time is that of the node ``rollout`` in a `dagrl run`: from the moment at which the step's
prompts are there until its last shard is, with driver, Ray and worker in between. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from bare_sglang import BareServer
from bare_vllm import BareVllm
from dagrl_run import DagrlRun, of_step, span
from options import add_backend, parsed, parser_of
from pipelines import Load, arguments_of, prompt_texts, rollout_pipeline, write_prompt_file
from reports import Verdict, tell

AIM = 0.97
_START_S = 240.0
_ROUND_S = 120.0


def main() -> None:
    """Start both servers, let them take turns, tell how they compare."""
    args, model = _arguments()
    load = Load(args.prompts, args.n, args.prompt_tokens, args.response_tokens)
    rounds = args.warmup + args.rounds
    prompts = write_prompt_file(args.out / "rollout_prompts.parquet", load, rounds)
    server = arguments_of(args.backend, load, model)
    with _turns() as (address, turns):
        pipeline = rollout_pipeline("rollout", model, prompts, load, server, args.backend)
        pipeline["nodes"]["interlude"] = {"op": "interludes:interlude", "args": {"address": address}}
        # Both load at the same time: the size of their caches is given, not taken from what is free.
        with DagrlRun(pipeline, args.out / "rollout_run") as run:
            bare = BareVllm(model, server) if args.backend == "vllm" else BareServer(model, server)
            measured = _take_turns(run, bare, turns, load, args.warmup, rounds)
            run.wait_for_step(rounds, _ROUND_S)
            nodes = [_node_seconds(run, step) for step in range(args.warmup + 1, rounds + 1)]
    bare.close()
    _report(args, load, measured | {"dagrl": nodes})


def _arguments() -> tuple[argparse.Namespace, Path]:
    parser = parser_of(__doc__)
    add_backend(parser)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--n", type=int, default=1, help="responses to each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds of each")
    parser.add_argument("--warmup", type=int, default=1, help="rounds of each before that")
    return parsed(parser, prompts=16, prompt_tokens=16, response_tokens=32, rounds=2)


@contextmanager
def _turns() -> Iterator[tuple[str, queue.Queue[Connection]]]:
    """An address at which the pipeline tells that it waits, and the queue of its messages."""
    with tempfile.TemporaryDirectory(prefix="dagrl-turns-") as folder:
        address = str(Path(folder) / "turns")
        turns: queue.Queue[Connection] = queue.Queue()
        listener = Listener(address, family="AF_UNIX")

        def listen() -> None:
            while True:
                try:
                    turns.put(listener.accept())
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        try:
            yield address, turns
        finally:
            listener.close()


def _take_turns(
    run: DagrlRun, bare: BareServer | BareVllm, turns: queue.Queue[Connection], load: Load, warmup: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of the bare server's rounds, with log-probs as dagrl needs them, and without."""
    texts = prompt_texts(load, rounds)
    seconds: dict[str, list[float]] = {"bare": [], "bare without log-probs": []}
    for number in range(rounds):
        mine = texts[number * load.prompts : (number + 1) * load.prompts]
        with _next_turn(run, turns, _START_S if number == 0 else _ROUND_S) as waiting:
            assert waiting.recv() == load.samples
            took = bare.generate(mine, load)
            if number >= warmup:
                seconds["bare"].append(took)
            if number == rounds - 1:
                # Read backwards, for they are in the cache now.
                unknown = [text[::-1] for text in mine]
                seconds["bare without log-probs"].append(bare.generate(unknown, load, logprobs=False))
            waiting.send(None)
    return seconds


def _next_turn(run: DagrlRun, turns: queue.Queue[Connection], limit_s: float) -> Connection:
    """The pipeline's next message. RuntimeError where it ends instead, TimeoutError where it says nothing."""
    for _ in range(round(limit_s)):
        try:
            return turns.get(timeout=1.0)
        except queue.Empty:
            if run.over:
                raise RuntimeError(f"dagrl run ended early:\n{run.output}") from None
    raise TimeoutError(f"no rollout of dagrl was done within {limit_s:.0f} s:\n{run.output}")


def _node_seconds(run: DagrlRun, step: int) -> float:
    events = of_step(run.events(), step)
    prompts, rollout = span(events, "prompts"), span(events, "rollout")
    assert prompts and rollout, f"step {step} has no prompts or no rollout in the timeline"
    return rollout[1] - prompts[1]


def _report(args: argparse.Namespace, load: Load, seconds: dict[str, list[float]]) -> None:
    rates = {name: [load.sampled_tokens / each for each in values] for name, values in seconds.items() if values}
    each = f"{load.n} responses of {load.response_tokens} tokens"
    print(f"\n{args.model}, {load.prompts} prompts of {load.prompt_tokens} tokens, to each {each}")
    print(f"{'':24}{'median tok/s':>14}{'slowest':>12}{'fastest':>12}{'median s':>12}")
    rows: dict[str, dict[str, Any]] = {}
    for name, values in rates.items():
        rows[name] = {"tokens_per_s": statistics.median(values), "seconds": seconds[name]}
        taken = statistics.median(seconds[name])
        print(f"{name:24}{statistics.median(values):14.0f}{min(values):12.0f}{max(values):12.0f}{taken:12.3f}")
    ratio = rows["dagrl"]["tokens_per_s"] / rows["bare"]["tokens_per_s"]
    result = {
        "model": args.model,
        "backend": args.backend,
        "prompts": load.prompts,
        "responses_per_prompt": load.n,
        "prompt_tokens": load.prompt_tokens,
        "response_tokens": load.response_tokens,
        "measured": rows,
        "dagrl_over_bare": ratio,
    }
    tell(result, [Verdict(f"tokens/s of dagrl's rollout / bare {args.backend}", ratio, "at least", AIM)], args.json)


if __name__ == "__main__":
    main()
