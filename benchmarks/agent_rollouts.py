"""Time agents of several turns beside plain rollouts of as many sampled tokens, by the same server on the same GPU.

    python benchmarks/agent_rollouts.py --out FOLDER [--backend vllm]

Each agent is the official OpenAI client in a function, and asks for `--turns` replies of `--turn-tokens` tokens, with a
few tokens between them; the plain rollout samples the same number of tokens in one piece. Both are the node ``rollout``
of a `dagrl run`, one after the other. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from dagrl_run import DagrlRun, of_step, span
from options import add_backend, parsed, parser_of
from pipelines import Load, arguments_of, rollout_pipeline, write_prompt_file
from reports import Verdict, tell

AIM = 0.9
_START_S, _ROUND_S = 400.0, 240.0
_BETWEEN = 16
"""Tokens between two replies, at most."""


async def converse(client: Any, row: dict[str, Any], *, turns: int, tokens: int) -> float:
    """The agent: so many replies of so many tokens."""
    messages = list(row["messages"])
    for _ in range(turns):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=tokens)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    return 1.0


def main() -> None:
    """Run both, and tell how they compare."""
    args, model = _arguments()
    sampled = args.turns * args.turn_tokens
    load = Load(args.prompts, args.n, args.prompt_tokens, sampled + args.turns * _BETWEEN)
    rounds = args.warmup + args.rounds
    prompts = write_prompt_file(args.out / "agent_prompts.parquet", load, rounds)
    seconds = {}
    for name in ("plain", "agents"):
        pipeline = rollout_pipeline(name, model, prompts, load, arguments_of(args.backend, load, model), args.backend)
        rollout = pipeline["nodes"]["rollout"]
        if name == "agents":
            options = {"turns": args.turns, "tokens": args.turn_tokens}
            agent = {"function": f"{Path(__file__).stem}:{converse.__name__}", "args": options}
            rollout |= {"max_turns": args.turns, "agent": agent | {"concurrency": load.samples}}
        else:
            rollout["sampling"]["max_new_tokens"] = sampled
        pipeline["run"]["steps"] = rounds
        with DagrlRun(pipeline, args.out / f"{name}_run") as run:
            run.wait_for_step(1, _START_S)
            run.wait_for_step(rounds, rounds * _ROUND_S)
            seconds[name] = [_seconds(run, step) for step in range(args.warmup + 1, rounds + 1)]
    _report(args, load.samples * sampled, seconds)


def _arguments() -> tuple[argparse.Namespace, Path]:
    parser = parser_of(__doc__)
    add_backend(parser)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=1, help="agents of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each")
    parser.add_argument("--warmup", type=int, default=1, help="rounds of each before that")
    return parsed(parser, prompts=8, prompt_tokens=16, turns=3, turn_tokens=4, rounds=1)


def _seconds(run: DagrlRun, step: int) -> float:
    events = of_step(run.events(), step)
    prompts, rollout = span(events, "prompts"), span(events, "rollout")
    assert prompts and rollout, f"step {step} has no prompts or no rollout in the timeline"
    return rollout[1] - prompts[1]


def _report(args: argparse.Namespace, sampled: int, seconds: dict[str, list[float]]) -> None:
    rates = {name: sampled / statistics.median(values) for name, values in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:10}{rate:12.0f} sampled tokens/s, median of {len(seconds[name])} rounds")
    ratio = rates["agents"] / rates["plain"]
    result = {
        "model": args.model,
        "backend": args.backend,
        "agents": args.prompts * args.n,
        "turns": args.turns,
        "turn_tokens": args.turn_tokens,
        "seconds": seconds,
        "agents_over_plain": ratio,
    }
    tell(result, [Verdict("sampled tokens/s of agents / of plain rollouts", ratio, "at least", AIM)], args.json)


if __name__ == "__main__":
    main()
