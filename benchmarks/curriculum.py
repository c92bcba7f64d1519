"""Orders of prompts: steps until the demo's model adds all digits, with uniform prompts, stages, and by pass rates.

    python benchmarks/curriculum.py --order ORDER [--seed 1 --seed 2 ...] --out FOLDER    one run for each seed
                                    [--unsolvable 200]                            beside 200 prompts that none solves

The sums of operands up to 4 are one source, those with a larger operand another. A run ends when the greedy answers to
all 100 sums have a mean reward of 0.9, or after `--steps`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from dagrl_run import ROOT, DagrlRun
from reports import Verdict, tell

from dagrl.data.prompt_file import PromptRow, write_prompts

HIGH, EVERY = 0.9, 5
"""The reward to reach, and the steps between two validations."""
_RUN_S = 900.0
ORDERS: dict[str, dict[str, Any]] = {
    "uniform": {"order": "shuffled"},
    "stages": {
        "order": {
            "stages": [
                {"until_step": 20, "weights": {"easy": 1}},
                {"weights": {"easy": 1, "hard": 3}, "move_over": 20},
            ]
        }
    },
    "adaptive": {
        "order": {"adaptive": {"band": [0.03, 0.97], "skip_solved_for": 3, "priority": "pass_rate", "floor": 0.3}}
    },
    "advantage": {
        "order": {"adaptive": {"band": [0.03, 0.97], "skip_solved_for": 3, "priority": "advantage", "floor": 0.3}}
    },
}


def write_sums(folder: Path, unsolvable: int) -> dict[str, Path]:
    """The files of all sums of two digits, of the easy and the hard ones, and of all beside prompts without a solution.

    The answers of the last are longer than any response.
    """
    sums = [PromptRow("sums", f"{n // 10}+{n % 10}=", str(n // 10 + n % 10), {"index": n}) for n in range(100)]
    long = [PromptRow("sums", f"{n % 100}+{n // 100 + 10}0=", "00000", {"index": 100 + n}) for n in range(unsolvable)]
    easy = [row for n, row in enumerate(sums) if max(divmod(n, 10)) <= 4]
    hard = [row for n, row in enumerate(sums) if max(divmod(n, 10)) > 4]
    parts = {"all": sums, "easy": easy, "hard": hard, "train": sums + long}
    files = {name: folder / f"{name}.parquet" for name in parts}
    for name, rows in parts.items():
        write_prompts(files[name], rows, {"index": pa.int64()})
    return files


def pipeline(order: str, seed: int, steps: int, files: dict[str, Path]) -> dict[str, Any]:
    """The demo with this order of prompts; only stages need two sources."""
    several = {name: {"path": str(files[name])} for name in ("easy", "hard")}
    return {
        "extends": str(ROOT / "dag_templates" / "tiny_grpo.yaml"),
        "name": f"{order}-{seed}",
        "data": {
            "train": several if order == "stages" else str(files["train"]),
            "val": str(files["all"]),
            "prompts_per_step": 32,
            **ORDERS[order],
        },
        "run": {"steps": steps, "seed": seed, "save_every": None, "validate_every": EVERY, "validate_first": False},
        "track": ["console"],
    }


def learn(order: str, seed: int, steps: int, unsolvable: int, out: Path) -> bool:
    """Run until all is learned, and say whether it was; writes ``curriculum_ORDER_SEED.json``."""
    file = out / f"curriculum_{order}_{seed}.json"
    files = write_sums(out / "sums", unsolvable)
    with DagrlRun(pipeline(order, seed, steps, files), file.with_suffix("")) as run:
        run.wait_until(lambda metrics: reached(metrics) is not None or len(metrics) >= steps, _RUN_S)
        metrics = run.metrics()
    best = max(line.get("val/reward/mean", 0.0) for line in metrics)
    result = {
        "order": order,
        "seed": seed,
        "reached": reached(metrics),
        "val": {line["step"]: line["val/reward/mean"] for line in metrics if "val/reward/mean" in line},
        "mean_reward": float(np.mean([line["reward/mean"] for line in metrics])),
    }
    verdict = Verdict(f"{order}, seed {seed}: greedy answers to all sums", best, "at least", HIGH)
    tell(result, [verdict], file)
    return verdict.met


def reached(metrics: list[dict[str, Any]]) -> int | None:
    """The first step whose validation is high enough."""
    return next((line["step"] for line in metrics if line.get("val/reward/mean", 0.0) >= HIGH), None)


def main() -> None:
    """Run the orders and seeds that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", choices=ORDERS, action="append", required=True)
    parser.add_argument("--seed", type=int, action="append", default=None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--unsolvable", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    met = [
        learn(order, seed, options.steps, options.unsolvable, options.out)
        for seed in options.seed or [1, 2, 3]
        for order in options.order
    ]
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
