"""Learning curves of the recipes in dag_templates/, each with `tiny.yaml` laid over it: the demo's task on a CPU.

    python benchmarks/recipes.py --recipe NAME [--seed 1 --seed 2 ...] --out FOLDER    one run for each seed
    python benchmarks/recipes.py --summarize FOLDER                                    tables of all that is there
    python benchmarks/recipes.py --list

A run ends when the mean reward of ten steps is above 0.9, or after `--steps`. Curves are written as CSV, all else as
JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from dagrl_run import ROOT, DagrlRun
from reports import Verdict, tell

TEMPLATES = ROOT / "dag_templates"
HIGH = 0.9
SHOWN_STEPS = (1, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200)
"""Steps whose reward is shown, where a run has them."""
_HIGH_FOR = 10
_RUN_S = 540.0
RECIPES = ("grpo", "ppo", "dapo", "gspo", "rloo", "reinforce_pp", "drgrpo", "cispo", "cpgd", "remax", "opo", "opmd")
IN_ONE_FILE = ("ppo", "dapo", "remax")
"""Recipes with nodes or engines that `tiny.yaml` cannot know of: they have a `tiny_NAME.yaml`."""


def pipeline(recipe: str, seed: int, steps: int) -> dict[str, Any]:
    """A recipe as a pipeline of the demo's size."""
    layers = [f"tiny_{recipe}"] if recipe in IN_ONE_FILE else [recipe, "tiny"]
    return {
        "extends": [str(TEMPLATES / f"{layer}.yaml") for layer in layers],
        "name": f"{recipe}-{seed}",
        "run": {"steps": steps, "seed": seed, "save_every": None, "validate_every": None, "validate_first": False},
        "track": ["console"],
    }


def learn(recipe: str, seed: int, steps: int, out: Path) -> bool:
    """Run a recipe until it has learned, and say whether it has; writes ``recipe_NAME_SEED.json`` and ``.csv``.

    RuntimeError or TimeoutError where the run fails.
    """
    file = out / f"recipe_{recipe}_{seed}.json"
    with DagrlRun(pipeline(recipe, seed, steps), file.with_suffix("")) as run:
        run.wait_until(lambda metrics: learned_at(metrics) is not None or len(metrics) >= steps, _RUN_S)
        metrics = run.metrics()
    rewards = rewards_of(metrics)
    with file.with_suffix(".csv").open("w", newline="") as curve:
        csv.writer(curve).writerows([("step", "reward"), *enumerate(rewards, start=1)])
    result = {
        "recipe": recipe,
        "seed": seed,
        "steps": len(metrics),
        "learned_at": learned_at(metrics),
        "median_step_s": statistics.median(line["time/step_s"] for line in metrics),
        "reward": rewards,
        "last": metrics[-1],
    }
    verdict = Verdict(f"{recipe}, seed {seed}: reward, mean of {_HIGH_FOR} steps", _last(rewards), "at least", HIGH)
    tell(result, [verdict], file)
    return verdict.met


def rewards_of(metrics: list[dict[str, Any]]) -> list[float]:
    """The mean reward of each step, of all that was sampled: a filter takes away what is right already."""
    return [line.get("filter/reward/mean", line["reward/mean"]) for line in metrics]


def learned_at(metrics: list[dict[str, Any]]) -> int | None:
    """The first step at which the reward has been high on the mean of the last ones; None if it never was."""
    rewards = rewards_of(metrics)
    reached = (end for end in range(_HIGH_FOR, len(rewards) + 1) if _last(rewards[:end]) > HIGH)
    return next(reached, None)


def _last(rewards: list[float]) -> float:
    return statistics.fmean(rewards[-_HIGH_FOR:])


def tables(results: list[dict[str, Any]]) -> str:
    """The runs, and their curves, as Markdown."""
    shown = [step for step in SHOWN_STEPS if any(result["steps"] >= step for result in results)]
    lines = [
        f"| recipe | seed | above {HIGH} at step | s a step | {' | '.join(map(str, shown))} |",
        "|" + "---|" * (4 + len(shown)),
    ]
    for result in sorted(results, key=lambda each: (RECIPES.index(each["recipe"]), each["seed"])):
        rewards = result["reward"]
        curve = [f"{rewards[step - 1]:.2f}" if step <= len(rewards) else "" for step in shown]
        reached = result["learned_at"] or "never"
        cells = (result["recipe"], result["seed"], reached, f"{result['median_step_s']:.2f}", *curve)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Run a recipe, or tell what those that were run have shown; exits with 1 where one has not learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", choices=RECIPES)
    what.add_argument("--summarize", type=Path, metavar="FOLDER")
    what.add_argument("--list", action="store_true")
    parser.add_argument("--seed", type=int, action="append", help="may be given several times; default: 1")
    parser.add_argument("--steps", type=int, default=200, help="steps after which it has failed to learn")
    parser.add_argument("--out", type=Path, help="folder for runs, curves and results")
    args = parser.parse_args()
    if args.list:
        print("\n".join(RECIPES))
    elif args.summarize:
        results = [json.loads(file.read_text()) for file in sorted(args.summarize.glob("recipe_*.json"))]
        print(tables(results))
        sys.exit(any(result["learned_at"] is None for result in results))
    elif args.out is None:
        parser.error("--recipe needs --out")
    else:
        learned = [learn(args.recipe, seed, args.steps, args.out) for seed in args.seed or [1]]
        sys.exit(not all(learned))


if __name__ == "__main__":
    main()
