"""Learning curves of a published model: SmolLM2-135M-Instruct on word problems, each recipe from the same SFT.

    python benchmarks/published_model.py --case sft --model FOLDER --data FOLDER --out FOLDER    the start of all others
    python benchmarks/published_model.py --case grpo [--seed 2] [--steps 80] --model ... --data ... --out ...
    python benchmarks/published_model.py --summarize FOLDER [--picture FILE]                     a table, and curves
    python benchmarks/published_model.py --list

A pipeline is the recipe's template under `dag_templates/smollm2_grpo.yaml`, on the visible GPU. A curve is the accuracy
of greedy answers to 500 held-out problems. `one_step_off` takes two GPUs. `distill` trains the published weights, with
the SFT as teacher. Overrides at the end change the pipeline: with ``engines.generator.server.mem_fraction_static=0.08``
and ``nodes.update.tokens_per_micro_batch=12288``, several runs share a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from dagrl_run import ROOT, DagrlRun
from reports import Verdict, tell

TEMPLATES = ROOT / "dag_templates"
ACCURACY = "val/reward/mean"
HIGH = 0.6
"""Accuracy whose step and seconds are told."""
GAIN = 0.1
"""Least gain in accuracy of a recipe that learns."""
SFT_STEPS = 80
_RUN_S = 570.0

# 512 samples in each step, with each recipe.
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "grpo": (None, {}),
    "ppo": ("ppo", {"data": {"prompts_per_step": 512}}),
    "dapo": ("dapo", {"nodes": {"ref": None, "advantage": {"overlong_buffer": {"len": 40, "penalty_factor": 1.0}}}}),
    "gspo": ("gspo", {"nodes": {"ref": None}}),
    "rloo": ("rloo", {"data": {"prompts_per_step": 128}}),
    "reinforce_pp": ("reinforce_pp", {}),
    "drgrpo": ("drgrpo", {"nodes": {"ref": None}}),
    "cispo": ("cispo", {"nodes": {"ref": None}}),
    "one_step_off": (
        None,
        {
            "groups": {"rollout": {"gpus_per_node": 1}},
            "engines": {"generator": {"group": "rollout"}},
            "nodes": {"update": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}}},
            "schedule": {"max_staleness": 1},
        },
    ),
    "lora": (None, {"engines": {"actor": {"lora": {"rank": 32, "alpha": 64}, "optimizer": {"lr": 1.0e-4}}}}),
    "fp8_rollout": (None, {"engines": {"generator": {"quantization": "fp8_per_channel"}}}),
    "vllm": (
        None,
        {
            "engines": {
                "generator": {
                    "backend": "vllm",
                    "environment": "vllm",
                    "server": {"mem_fraction_static": None, "gpu_memory_utilization": 0.5},
                }
            }
        },
    ),
    "adaptive": (None, {"data": {"order": {"adaptive": {"priority": "advantage"}}}}),
    "distill": (
        "distill",
        {
            "engines": {"actor": {"dist_checkpointing_path": None}, "teacher": {"model": None}},
            "nodes": {"rollout": {"n": 8}, "old": None, "ref": None, "teacher": {"tokens_per_micro_batch": 49152}},
        },
    ),
    "agent": (None, {"nodes": {"rollout": {"agent": "published_agent:solve"}, "reward": {"fn": "agent"}}}),
}
"""Case -> the recipe's template, if it is not grpo, and what is laid over both."""


def pipeline(case: str, model: Path, data: Path, start: Path, seed: int, steps: int) -> dict[str, Any]:
    """A case as a pipeline. `data` is the folder of the word problems, `start` the run folder of the SFT."""
    recipe, changes = ("sft", {}) if case == "sft" else CASES[case]
    layers = ["smollm2_sft"] if case == "sft" else [*([recipe] if recipe else []), "smollm2_grpo"]
    own: dict[str, Any] = {
        "extends": [str(TEMPLATES / f"{layer}.yaml") for layer in layers],
        "name": f"{case}-{seed}",
        "model": {"path": str(model)},
        "data": {"train": str(data / "train.parquet"), "val": str(data / "test.parquet")},
        "run": {"steps": steps, "seed": seed, "save_every": steps, "keep": 1},
        "track": ["console"],
    }
    if case != "sft":
        trained = "teacher" if case == "distill" else "actor"
        path = start / "checkpoints" / f"step_{SFT_STEPS}" / "actor"
        own["engines"] = {trained: {"dist_checkpointing_path": str(path)}}
    return _merged(own, changes)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = below | above
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            both[name] = _merged(below[name], above[name])
    return both


def learn(case: str, model: Path, data: Path, out: Path, seed: int, steps: int, *overrides: str) -> bool:
    """Run a case to its end, write ``CASE_SEED.json``, and return whether it has learned.

    RuntimeError or TimeoutError where the run fails.
    """
    file = out / f"{case}_{seed}.json"
    folder = out / "sft" if case == "sft" else file.with_suffix("")
    with DagrlRun(pipeline(case, model, data, out / "sft", seed, steps), folder, *overrides) as run:
        run.wait_until(lambda _: run.over, _RUN_S)
        metrics = run.metrics()
    found = figures(metrics)
    result = {"case": case, "seed": seed, "steps": steps} | found
    gained = found["best"] - found["start"]
    verdict = Verdict(f"{case}, seed {seed}: gain in accuracy", gained, "at least", GAIN)
    tell(result | {"last": metrics[-1]}, [verdict], file)
    return verdict.met


def figures(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The curve of a run, and what it has come to; seconds are those of steps, without start and validations."""
    trained = [line for line in metrics if line["step"] > 0]
    seconds = accumulate(line["time/step_s"] for line in trained)
    passed = {line["step"]: total for line, total in zip(trained, seconds, strict=True)}
    curve = {line["step"]: line[ACCURACY] for line in metrics if ACCURACY in line}
    reached = next((step for step, accuracy in curve.items() if accuracy >= HIGH), None)
    return {
        "curve": curve,
        "seconds": {step: passed.get(step, 0.0) for step in curve},
        "start": next(iter(curve.values())),
        "end": list(curve.values())[-1],
        "best": max(curve.values()),
        "reached_step": reached,
        "reached_s": None if reached is None else passed.get(reached, 0.0),
        "median_step_s": statistics.median(line["time/step_s"] for line in trained),
        "reward": [line.get("filter/reward/mean", line.get("reward/mean")) for line in trained],
        "logprob_diff": [line.get("mismatch/logprob_diff/mean") for line in trained],
    }


def table(results: list[dict[str, Any]]) -> str:
    """The runs as Markdown."""
    lines = [f"| case | seed | start | end | best | step of {HIGH} | s to {HIGH} | s a step |", "|" + "---|" * 8]
    for each in results:
        reached = each["reached_step"]
        until = ("", "") if reached is None else (reached, f"{each['reached_s']:.0f}")
        accuracies = (f"{each[name]:.3f}" for name in ("start", "end", "best"))
        cells = (each["case"], each["seed"], *accuracies, *until, f"{each['median_step_s']:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Draw the accuracies over steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    names = list(dict.fromkeys(each["case"] for each in results))
    for each in results:
        curve = {int(step): accuracy for step, accuracy in each["curve"].items()}
        color = f"C{names.index(each['case']) % 10}"
        style = "-" if names.index(each["case"]) < 10 else "--"
        first = each["seed"] == min(other["seed"] for other in results if other["case"] == each["case"])
        label = each["case"] if first else None
        axes.plot(list(curve), list(curve.values()), style, color=color, label=label, marker=".", linewidth=1.2)
    axes.set(xlabel="step", ylabel="accuracy, greedy, 500 held-out problems")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run a case, or summarize those that have run; exits with 1 where one has not learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", choices=("sft", *CASES))
    what.add_argument("--summarize", type=Path, metavar="FOLDER")
    what.add_argument("--list", action="store_true")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct as a Hugging Face folder")
    parser.add_argument("--data", type=Path, help="folder of `dagrl data word_problems`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help=f"default: {SFT_STEPS} of sft, 120 of the others")
    parser.add_argument("--out", type=Path, help="folder for runs and results")
    parser.add_argument("--picture", type=Path, help="a picture of the curves, with --summarize")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the pipeline")
    args = parser.parse_args()
    if args.list:
        print("\n".join(("sft", *CASES)))
    elif args.summarize:
        order = ("sft", *CASES)
        results = [json.loads(file.read_text()) for file in args.summarize.glob("*_*.json")]
        results.sort(key=lambda each: (order.index(each["case"]), each["seed"]))
        print(table(results))
        if args.picture:
            draw([each for each in results if each["case"] != "sft"], args.picture)
    elif None in (args.model, args.data, args.out):
        parser.error("--case needs --model, --data and --out")
    else:
        steps = args.steps or (SFT_STEPS if args.case == "sft" else 120)
        model, data, out = (path.resolve() for path in (args.model, args.data, args.out))
        sys.exit(not learn(args.case, model, data, out, args.seed, steps, *args.overrides))


if __name__ == "__main__":
    main()
