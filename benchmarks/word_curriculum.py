"""Orders of prompts: steps until a tiny model solves word problems of one to three steps, from the same SFT weights.

    python benchmarks/word_curriculum.py --order ORDER [--order ORDER ...] [--seed 1 --seed 2 ...] --out FOLDER

The problems of data_preprocess/word_problems.py whose numbers are at most `LARGEST`, with one token for each word and
number. SFT on worked solutions is short, and done once in a folder. Each run then trains on other problems until the
greedy answers to problems held out have a mean reward of 0.9, or for `--steps`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from dagrl_run import ROOT, DagrlRun
from reports import Verdict, tell
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(ROOT / "data_preprocess"))
from word_problems import EXTRA_INFO, Problem, make_problem, prompts

from dagrl.data.prompt_file import PromptRow, write_prompts

HIGH, EVERY = 0.9, 5
"""The reward to reach, and the steps between two validations."""
LENGTHS, LARGEST = (1, 2, 3), 12
"""Numbers of steps of the problems, and their largest number."""
SFT_UNTIL, SFT_STEPS = 0.65, 600
"""SFT ends when so many of the problems held out are solved, or fails after so many steps."""
_COUNTS = {"test": 300, "train": 1920, "sft": 12000}
_RUN_S = 3600.0
_WORD = r"\w+|[^\w\s]+"
"""A token, as `pre_tokenizers.Whitespace` splits them."""
ORDERS: dict[str, dict[str, Any]] = {
    "uniform": {"order": "shuffled"},
    "steps": {"order": {"by": "extra_info.steps"}},
    "stages": {
        "order": {
            "stages": [
                {"until_step": 10, "weights": {"1": 3, "2": 2, "3": 1}},
                {"weights": {"1": 1, "2": 2, "3": 3}, "move_over": 20},
            ]
        }
    },
    "adaptive": {"order": {"adaptive": {"band": [0.03, 0.97], "skip_solved_for": 20}}},
}


def small_problems(counts: dict[str, int]) -> dict[str, list[Problem]]:
    """Different problems of each split whose numbers are small; their lengths take turns."""
    r, seen = random.Random(1), set[str]()

    def draw(steps: int) -> Problem:
        while True:
            problem = make_problem(r, steps)
            numbers = map(int, re.findall(r"\d+", f"{problem.question} {problem.solution}"))
            if max(numbers) <= LARGEST and problem.question not in seen:
                seen.add(problem.question)
                return problem

    return {split: [draw(steps) for steps, _ in zip(cycle(LENGTHS), range(count))] for split, count in counts.items()}


def rows(problems: Sequence[Problem], split: str) -> Iterator[PromptRow]:
    """Their prompts, without the instruction: the model knows no other task."""
    for row, problem in zip(prompts(problems, split), problems, strict=True):
        yield PromptRow(row.data_source, problem.question, row.answer, row.extra_info)


def write_task(folder: Path) -> dict[str, Path]:
    """The files of the problems of SFT, of GRPO, of GRPO by length, and of those held out; and the tokenizer.

    They are made if the folder does not have them, which takes a minute.
    """
    files = {name: folder / f"{name}.parquet" for name in (*_COUNTS, *map(str, LENGTHS))}
    files["tokenizer"] = folder / "tokenizer"
    if files["tokenizer"].is_dir():
        return files
    splits = small_problems(_COUNTS)
    parts = splits | {str(steps): [each for each in splits["train"] if each.steps == steps] for steps in LENGTHS}
    for name, problems in parts.items():
        write_prompts(files[name], rows(problems, name), EXTRA_INFO)
    texts = [f"{problem.question} {problem.solution}" for problem in splits["sft"]]
    words = sorted({word for text in texts for word in re.findall(_WORD, text)})
    backend = Tokenizer(models.WordLevel({w: n for n, w in enumerate(["<pad>", "<eos>", "<unk>", *words])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(files["tokenizer"])
    return files


def common(name: str, files: dict[str, Path]) -> dict[str, Any]:
    """Return the common sections of SFT and GRPO: the problems, and the demo's model with twice its width."""
    return {
        "name": name,
        "model": {
            "init": {"max_position_embeddings": 128, "hidden_size": 128, "intermediate_size": 256},
            "tokenizer": str(files["tokenizer"]),
        },
        "data": {"train": str(files["train"]), "val": str(files["test"]), "max_prompt_tokens": 80},
        "nodes": {"reward": {"fn": "math", "args": {"strict": True}}},
        "track": ["console"],
    }


def supervised(files: dict[str, Path]) -> dict[str, Any]:
    """SFT of random weights on the worked solutions."""
    return merged(
        common("sft", files),
        {
            "extends": [str(ROOT / "dag_templates" / "sft.yaml"), str(ROOT / "dag_templates" / "tiny.yaml")],
            "data": {
                "train": str(files["sft"]),
                "responses": ["extra_info.answer"],
                "max_response_tokens": 40,
                "prompts_per_step": 64,
            },
            "engines": {"actor": {"optimizer": {"lr": 3e-3}, "lr_schedule": {"min_lr": 3e-4}}},
            "nodes": {"rollout": {"n": 1, "sampling": {"max_new_tokens": 40}}, "advantage": None},
            "run": {"steps": SFT_STEPS, "save_every": 25, "validate_every": 25, "validate_first": False},
        },
    )


def reinforced(order: str, seed: int, steps: int, files: dict[str, Path], weights: Path) -> dict[str, Any]:
    """GRPO from those weights with this order of prompts; only stages need several sources."""
    several = {str(length): {"path": str(files[str(length)])} for length in LENGTHS}
    return merged(
        common(f"{order}-{seed}", files),
        {
            "extends": [str(ROOT / "dag_templates" / "grpo.yaml"), str(ROOT / "dag_templates" / "tiny.yaml")],
            "data": {**({"train": several} if order == "stages" else {}), "prompts_per_step": 32, **ORDERS[order]},
            "engines": {
                "actor": {
                    "dist_checkpointing_path": str(weights),
                    "optimizer": {"lr": 3e-4},
                    "lr_schedule": {"min_lr": 1e-4},
                }
            },
            "nodes": {"rollout": {"n": 16, "sampling": {"max_new_tokens": 40}}},
            "run": {"steps": steps, "seed": seed, "save_every": None, "validate_every": EVERY, "validate_first": True},
        },
    )


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` merged over `base`, section by section."""
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return base | over | both


def learn(order: str, seed: int, steps: int, out: Path) -> bool:
    """Run until all is learned, and say whether it was; writes ``words_ORDER_SEED.json``."""
    file = out / f"words_{order}_{seed}.json"
    files = write_task(out / "problems")
    weights = sft_weights(files, out / "sft")
    with DagrlRun(reinforced(order, seed, steps, files, weights), file.with_suffix("")) as run:
        run.wait_until(
            lambda metrics: reached(metrics) is not None or (bool(metrics) and metrics[-1]["step"] >= steps), _RUN_S
        )
        metrics = run.metrics()
    best = max(line.get("val/reward/mean", 0.0) for line in metrics)
    result = {
        "order": order,
        "seed": seed,
        "reached": reached(metrics),
        "val": {line["step"]: line["val/reward/mean"] for line in metrics if "val/reward/mean" in line},
        "mean_reward": float(np.mean([line["reward/mean"] for line in metrics if "reward/mean" in line])),
    }
    verdict = Verdict(f"{order}, seed {seed}: greedy answers to problems held out", best, "at least", HIGH)
    tell(result, [verdict], file)
    return verdict.met


def sft_weights(files: dict[str, Path], folder: Path) -> Path:
    """The checkpoint of the first validation that is high enough, of a run in `folder`; made if it is not there."""

    def found(metrics: list[dict[str, Any]]) -> Path:
        return folder / "checkpoints" / f"step_{reached(metrics, SFT_UNTIL)}" / "actor"

    done = folder.with_suffix(".json")
    if not done.is_file():
        with DagrlRun(supervised(files), folder) as run:
            run.wait_until(lambda metrics: found(metrics).is_dir(), _RUN_S)
            metrics = run.metrics()
        if reached(metrics, SFT_UNTIL) is None:
            raise RuntimeError(f"SFT has not solved {SFT_UNTIL:.0%} of the problems within {SFT_STEPS} steps")
        done.write_text(json.dumps({"weights": str(found(metrics))}))
    return Path(json.loads(done.read_text())["weights"])


def reached(metrics: list[dict[str, Any]], high: float = HIGH) -> int | None:
    """The first step whose validation is high enough."""
    return next((line["step"] for line in metrics if line.get("val/reward/mean", 0.0) >= high), None)


def main() -> None:
    """Run the orders and seeds that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", choices=ORDERS, action="append", required=True)
    parser.add_argument("--seed", type=int, action="append", default=None)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    met = [
        learn(order, seed, options.steps, options.out) for seed in options.seed or [1, 2, 3] for order in options.order
    ]
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
