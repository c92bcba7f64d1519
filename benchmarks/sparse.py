"""A reward that sampling rarely finds, with and without a replay buffer: the demo's model on a CPU.

    python benchmarks/sparse.py --case grpo --case replay [--seed 1 --seed 2 ...] --out FOLDER
    python benchmarks/sparse.py --summarize FOLDER

The right response is the same three digits for every prompt: one in 14 ** 3 samples of the start weights, or in 21
steps. Both cases sample the same batches until the first success.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from dagrl_run import ROOT, DagrlRun
from reports import Verdict, tell

CODE = "271"
STEPS = 300
HIGH, LOW = 0.9, 0.1
_LAST = 10
_SAMPLES = 128
"""Of a step."""
_RUN_S = 540.0
_CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "replay": {"buffer": {"op": "buffer", "groups_per_step": 32, "policy": "successes"}},
}


def code(response: str) -> float:
    """1 for the digits that the policy has to find by chance."""
    return float(response == CODE)


def pipeline(case: str, seed: int) -> dict[str, Any]:
    """GRPO on 128 samples a step, with a buffer or without."""
    return {
        "extends": str(ROOT / "dag_templates" / "tiny_grpo.yaml"),
        "name": f"sparse-{case}-{seed}",
        "data": {"val": None, "prompts_per_step": 16},
        "engines": {
            "reference": None,
            "actor": {"optimizer": {"lr": 2e-5}, "lr_schedule": {"lr_decay_style": "constant", "min_lr": None}},
        },
        "nodes": {
            "rollout": {"n": 8},
            "reward": {"fn": "sparse:code"},
            "ref": None,
            "old": {"op": "logprob", "engine": "actor", "write": "old_logprob"},
            "update": {"mini_batch": 1, "rollout_correction": {"rollout_is": "token"}, "loss": {"kl_coef": 0.0}},
            **_CASES[case],
        },
        "run": {"steps": STEPS, "seed": seed, "save_every": None, "validate_every": None, "validate_first": False},
        "track": ["console"],
    }


def learn(case: str, seed: int, out: Path) -> None:
    """Run a case to its last step, and write ``sparse_CASE_SEED.json``."""
    file = out / f"sparse_{case}_{seed}.json"
    with DagrlRun(pipeline(case, seed), file.with_suffix("")) as run:
        run.wait_for_step(STEPS, _RUN_S)
        metrics = run.metrics()
    rewards = [line["reward/mean"] for line in metrics]
    last = statistics.fmean(rewards[-_LAST:])
    result = {
        "case": case,
        "seed": seed,
        "steps": len(metrics),
        "first_success": next((step for step, reward in enumerate(rewards, start=1) if reward), None),
        "high_at": next((step for step, reward in enumerate(rewards, start=1) if reward > HIGH), None),
        "last": last,
        "successes": round(sum(rewards) * _SAMPLES),
        "reward": rewards,
    }
    what = f"{case}, seed {seed}: reward, mean of {_LAST} steps"
    verdict = Verdict(what, last, "at least", HIGH) if case == "replay" else Verdict(what, last, "at most", LOW)
    tell(result, [verdict], file)


def table(results: list[dict[str, Any]]) -> str:
    """The runs as Markdown."""
    shown = (50, 100, 150, 200, 250, STEPS)
    lines = [
        f"| case | seed | first success at step | above {HIGH} at step | {' | '.join(map(str, shown))} |",
        "|" + "---|" * (4 + len(shown)),
    ]
    for result in sorted(results, key=lambda each: (each["case"], each["seed"])):
        curve = [f"{statistics.fmean(result['reward'][max(0, step - _LAST) : step]):.3f}" for step in shown]
        cells = (result["case"], result["seed"], result["first_success"] or "never", result["high_at"] or "never")
        lines.append(f"| {' | '.join(map(str, (*cells, *curve)))} |")
    return "\n".join(lines)


def main() -> None:
    """Run cases, or show those that were run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=_CASES)
    parser.add_argument("--seed", type=int, action="append", help="may be given several times; default: 1")
    parser.add_argument("--out", type=Path, help="folder for runs and results")
    parser.add_argument("--summarize", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.summarize:
        print(table([json.loads(file.read_text()) for file in sorted(args.summarize.glob("sparse_*.json"))]))
    elif not args.case or args.out is None:
        parser.error("give --case and --out, or --summarize")
    else:
        for case in args.case:
            for seed in args.seed or [1]:
                learn(case, seed, args.out)
    sys.exit(0)


if __name__ == "__main__":
    main()
