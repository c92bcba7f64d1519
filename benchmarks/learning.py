"""Learn to add digits with GRPO, SGLang or vLLM generating, in one layout after the other: curves of the reward.

    python benchmarks/learning.py --case CASE --out FOLDER    one pipeline, on the GPUs that are visible
    python benchmarks/learning.py --summarize FOLDER          what all of them have shown; first steps compared
    python benchmarks/learning.py --list

The pipeline is `dag_templates/tiny_grpo.yaml`, or `tiny_images.yaml` to read pictures, with a somewhat wider model of
random weights and with other groups and engines. A run ends when the mean reward of five steps is above 0.9.
Curves are written as CSV, all else as JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from dagrl_run import DagrlRun
from reports import Verdict, tell

_TEMPLATES = Path(__file__).parents[1] / "dag_templates"
LOW, HIGH = 0.3, 0.9
LARGEST_DIFFERENCE = 0.02
"""Mean absolute difference of the generator's log-probs and the trainer's, both in bfloat16."""
LARGEST_DIFFERENCE_FP8 = 0.1
"""The same where one of them computes in fp8. A guess."""
SAME = 1e-3
"""Relative difference of metrics of the first step that rounding may make."""
_HIGH_FOR = 5
_EVERY = 5
"""Steps between two figures of a curve that is shown."""
_START_S, _RUN_S = 420.0, 300.0
"""Kernels of gated delta nets are tuned for three minutes in the first step on a machine."""
_COMPARED = ("reward/mean", "reward/std", "response_tokens/mean", "entropy", "grad_norm")
_DENSE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
# The sizes of the kernels that larger models run, in small numbers.
_MIXTURE = _DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
_GLM = _DENSE | {
    "model_type": "glm4_moe",
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_GEMMA = _DENSE | {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 128,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
_SEEING = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    # SGLang takes patches of no other size; a picture is enlarged to four tokens.
    "vision_config": {"hidden_size": 256, "intermediate_size": 512, "out_hidden_size": 256, "patch_size": 14},
}

_GATED_DELTA: dict[str, Any] = _DENSE | {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_GATED_DELTA_SEEING = _GATED_DELTA | {
    "model_type": "qwen3_5",
    "vision_config": {
        "depth": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "out_hidden_size": 256,
        "num_heads": 4,
        "patch_size": 16,
        "num_position_embeddings": 64,
    },
    "rope_parameters": {**_GATED_DELTA["rope_parameters"], "mrope_section": [6, 5, 5], "mrope_interleaved": True},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A layout of trainer and generator."""

    train: int
    """GPUs of the trainer."""
    rollout: int = 0
    """GPUs of the generator; 0: those of the trainer, in turns."""
    parallel: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: _DENSE)
    router_replay: bool = False
    """Whether the trainer routes tokens as the generator did."""
    backend: str = "sglang"
    """The generator's; vLLM has its own environment."""
    lora: dict[str, Any] | None = None
    """Low-rank adapters in place of all weights."""
    lr: float = 1e-3
    """Learning rate."""
    steps: int = 150
    """Steps after which it has failed to learn."""
    template: str = "tiny_grpo"
    """``tiny_images``: say the digit in a picture; ``tiny_agent``: a function asks through the OpenAI endpoint."""
    rollout_fp8: bool = False
    """Whether the generator's weights are in fp8."""
    train_fp8: bool = False
    """Whether the trainer's linear layers compute in fp8."""

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.train + self.rollout


SERVERS: dict[str, dict[str, Any]] = {
    "sglang": {"mem_fraction_static": 0.3, "max_total_tokens": 65536, "max_running_requests": 256},
    "vllm": {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**28, "max_num_seqs": 256},
}
"""Arguments of servers so small that several fit on a GPU, and start soon."""
_TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ENVIRONMENT = {"SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0"}
"""For the runs: matrices as small as these are none for DeepGEMM, which compiles for each shape besides."""
# Weights of the template's size would make larger logits at this width.
_LORA = Case(
    1,
    model=_DENSE | {"initializer_range": 0.075},
    lora={"rank": 32, "alpha": 64},
    lr=5e-4,
    steps=300,
    template="tiny_lora",
)
_SEEDED = {"enable_deterministic_inference": True}
"""SGLang then draws by a seed of each request, whatever else is in the batch: first steps have the same samples."""
_EXPERTS = Case(
    2,
    parallel={"expert_model_parallel_size": 2},
    # That kernel is compiled when a server first starts on a machine, which takes minutes.
    server={"tp_size": 2, "ep_size": 2, "enforce_disable_flashinfer_allreduce_fusion": True},
    model=_MIXTURE,
)
# Servers of the layouts that one GPU cannot have start without compiled graphs, in a third of the time.
_EXPERTS_ON_VLLM = Case(
    2,
    parallel={"expert_model_parallel_size": 2},
    server={"tensor_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True},
    model=_MIXTURE,
    backend="vllm",
)
_IMAGES = Case(1, model=_SEEING, template="tiny_images")
_FP8 = Case(1, rollout_fp8=True)
CASES = {
    "one_gpu_colocated": Case(1, server=_SEEDED),
    "two_gpus_apart": Case(1, 1, server=_SEEDED),
    "one_gpu_colocated_vllm": Case(1, backend="vllm"),
    "two_gpus_apart_vllm": Case(1, 1, backend="vllm"),
    "one_gpu_colocated_lora": _LORA,
    "one_gpu_colocated_lora_adapters_alone": replace(_LORA, lora={"rank": 32, "alpha": 64, "merge": False}),
    "one_gpu_colocated_images": _IMAGES,
    "two_gpus_apart_images": replace(_IMAGES, rollout=1),
    "one_gpu_colocated_images_vllm": replace(_IMAGES, backend="vllm"),
    "one_gpu_colocated_fp8_rollout": _FP8,
    "one_gpu_colocated_fp8_rollout_vllm": replace(_FP8, backend="vllm"),
    "one_gpu_colocated_fp8": replace(_FP8, train_fp8=True),
    "one_gpu_colocated_agent": Case(1, template="tiny_agent"),
    # Models that megatron-bridge builds.
    "one_gpu_colocated_glm4_moe": Case(1, model=_GLM),
    "one_gpu_colocated_gemma3": Case(1, model=_GEMMA),
    "one_gpu_colocated_qwen3_5_text": Case(1, model=_GATED_DELTA),
    "one_gpu_colocated_images_qwen3_5": Case(1, model=_GATED_DELTA_SEEING, template="tiny_images"),
    "two_gpus_apart_qwen3_5_text": Case(1, 1, model=_GATED_DELTA),
    "two_gpus_colocated_images_tp2_to_tp1": replace(_IMAGES, train=2, parallel=_TP2),
    "two_gpus_colocated_tp2_to_tp1": Case(2, parallel=_TP2),
    "two_gpus_colocated_tp2_to_tp2": Case(2, parallel=_TP2, server={"tp_size": 2}),
    "four_gpus_apart_tp2_to_tp1": Case(2, 2, parallel=_TP2),
    "four_gpus_apart_tp2_to_tp2": Case(2, 2, parallel=_TP2, server={"tp_size": 2}),
    "four_gpus_colocated_tp2_to_tp1": Case(4, parallel=_TP2),
    "four_gpus_colocated_tp2_to_tp2": Case(4, parallel=_TP2, server={"tp_size": 2}),
    "two_gpus_colocated_experts_ep2_to_ep2": _EXPERTS,
    "two_gpus_colocated_experts_ep2_to_ep2_replayed": replace(_EXPERTS, router_replay=True),
    "two_gpus_colocated_tp2_to_tp2_vllm": Case(
        2, parallel=_TP2, server={"tensor_parallel_size": 2, "enforce_eager": True}, backend="vllm"
    ),
    "two_gpus_apart_experts_vllm_replayed": Case(
        1, 1, server={"enforce_eager": True}, model=_MIXTURE, router_replay=True, backend="vllm"
    ),
    "two_gpus_colocated_experts_ep2_to_ep2_vllm": _EXPERTS_ON_VLLM,
}
ALIKE = ("one_gpu_colocated", "two_gpus_apart")
"""Cases whose first steps must be the same."""
REPLAYED = ("two_gpus_colocated_experts_ep2_to_ep2_replayed", "two_gpus_colocated_experts_ep2_to_ep2")
"""A mixture with its routes replayed and without: no token goes through other weights in the former."""
_OF_TEMPLATE: dict[str, dict[str, Any]] = {
    "tiny_images": {"data": {"min_pixels": 56 * 56}},
    # As many samples as the others.
    "tiny_agent": {"data": {"prompts_per_step": 32}, "nodes": {"rollout": {"n": 32}}},
}
_LARGEST = "mismatch/logprob_diff/max"


def pipeline(name: str, steps: int) -> dict[str, Any]:
    """A case as a pipeline; on CPU slots where there is no GPU."""
    case = CASES[name]
    slots = "gpus_per_node" if torch.cuda.is_available() else "cpus_per_node"
    colocated = case.rollout == 0
    groups: dict[str, Any] = {"train": {"cpus_per_node": 0, slots: case.train}}
    groups["rollout"] = None if colocated else {"cpus_per_node": 0, slots: case.rollout}
    generator = {
        "backend": case.backend,
        "group": "train" if colocated else "rollout",
        "max_batch_size": None,
        "server": _server(case),
        "weight_sync": {"checksum": True},
    }
    if case.backend == "vllm":
        generator["environment"] = "vllm"
    if case.rollout_fp8:
        generator["quantization"] = "fp8"
    return {
        "extends": str(_TEMPLATES / f"{case.template}.yaml"),
        "name": name.replace("_", "-"),
        "model": {"init": case.model},
        **_OF_TEMPLATE.get(case.template, {}),
        "groups": groups,
        "engines": {
            "actor": {
                "parallel": case.parallel,
                "optimizer": {"lr": case.lr},
                "router_replay": case.router_replay,
                "lora": case.lora,
                "transformer": {"fp8": "hybrid"} if case.train_fp8 else {},
            },
            "generator": generator,
        },
        "run": {"steps": steps, "save_every": None, "validate_every": None, "validate_first": False},
        "track": ["console"],
    }


def _server(case: Case) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    return SERVERS[case.backend] | case.server


def main() -> None:
    """Run a case, or say what those that were run have shown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", choices=sorted(CASES))
    what.add_argument("--summarize", type=Path, metavar="FOLDER")
    what.add_argument("--list", action="store_true", help="the cases and how many GPUs they take")
    parser.add_argument("--steps", type=int, help="steps after which it has failed to learn (default: the case's)")
    parser.add_argument("--out", type=Path, help="folder for the run, its curve and its results")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:48}{case.gpus} GPUs" for name, case in CASES.items()))
    elif args.summarize:
        summarize(args.summarize)
    elif args.out is None:
        parser.error("--case needs --out")
    else:
        learn(args.case, args.steps or CASES[args.case].steps, args.out)


def learn(name: str, steps: int, out: Path) -> dict[str, Any]:
    """Run one case until it has learned; writes ``learning_NAME.json`` and ``.csv``, and returns what is in the first.

    RuntimeError or TimeoutError where the run fails.
    """
    begun = time.monotonic()
    with DagrlRun(pipeline(name, steps), out / f"learning_{name}_run", environment=ENVIRONMENT) as run:
        run.wait_for_step(1, _START_S)
        started = time.monotonic() - begun
        run.wait_until(lambda metrics: has_learned(metrics) or metrics[-1]["step"] >= steps, _RUN_S)
        metrics = run.metrics()
    rewards = [line["reward/mean"] for line in metrics]
    with (out / f"learning_{name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "reward"), *((line["step"], line["reward/mean"]) for line in metrics)])
    result = {
        "case": name,
        "gpus": CASES[name].gpus,
        "steps": len(metrics),
        "first_step_after_s": started,
        "median_step_s": statistics.median(line["time/step_s"] for line in metrics),
        "reward": rewards,
        "first": metrics[0],
        "last": metrics[-1],
    }
    tell(result, verdicts(name, metrics), out / f"learning_{name}.json")
    return result


def has_learned(metrics: list[dict[str, Any]]) -> bool:
    """Whether the reward is high, not by chance."""
    last = [line["reward/mean"] for line in metrics[-_HIGH_FOR:]]
    return len(last) == _HIGH_FOR and sum(last) / _HIGH_FOR > HIGH


def verdicts(name: str, metrics: list[dict[str, Any]]) -> list[Verdict]:
    """Return the checks of a run of a case that has to learn."""
    case = CASES[name]
    largest = LARGEST_DIFFERENCE_FP8 if case.rollout_fp8 or case.train_fp8 else LARGEST_DIFFERENCE
    last = [line["reward/mean"] for line in metrics[-_HIGH_FOR:]]
    first = metrics[0]
    difference = first.get("mismatch/logprob_diff/mean", first.get("mismatch/logprob_diff", float("nan")))
    return [
        Verdict("reward of the first step", first["reward/mean"], "at most", LOW),
        Verdict(f"reward of the last {_HIGH_FOR} steps", sum(last) / len(last), "at least", HIGH),
        Verdict("first step, mean ratio of the trainer's log-probs", first["ratio/mean"], "exactly", 1.0),
        Verdict("first step, |rollout - trainer| log-prob, mean", difference, "at most", largest),
    ]


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, float]:
    """The metric in which two first steps differ most, and by how much of it."""
    found = {
        name: abs(one[name] - other[name]) / max(abs(one[name]), abs(other[name]), 1e-9)
        for name in _COMPARED
        if name in one and name in other
    }
    return max(found.items(), key=lambda each: each[1])


def curves(rewards: dict[str, list[float]]) -> str:
    """Rewards of every fifth step of each case, as a table for LEARNING.md."""
    steps = [1, *range(_EVERY, max(map(len, rewards.values()), default=0) + 1, _EVERY)]
    rows = [["step", *map(str, steps)], ["---"] * (1 + len(steps))]
    for name, by_step in rewards.items():
        shown = [f"{by_step[step - 1]:.2f}" if step <= len(by_step) else "" for step in steps]
        rows.append([name.replace("_", " "), *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summarize(folder: Path) -> None:
    """Tell of all cases in a folder; exits with 1 where one that is there is not as it should be."""
    results = {}
    for name in CASES:
        file = folder / f"learning_{name}.json"
        if file.is_file():
            results[name] = json.loads(file.read_text())
    print(f"{'':48}{'GPUs':>5}{'first':>8}{'last':>8}{'steps':>7}{'s a step':>10}{'|diff|':>10}{'largest':>10}")
    for name, result in results.items():
        difference, first = result["verdicts"][-1]["value"], result["first"]
        rewards = result["reward"]
        print(
            f"{name:48}{result['gpus']:5}{rewards[0]:8.3f}{rewards[-1]:8.3f}{result['steps']:7}"
            f"{result['median_step_s']:10.3f}{difference:10.5f}{first[_LARGEST]:10.5f}"
        )
    print(curves({name: result["reward"] for name, result in results.items()}))
    missing = [name for name in CASES if name not in results]
    if missing:
        print(f"not there: {', '.join(missing)}")
    found = []
    if all(name in results for name in ALIKE):
        metric, difference = largest_difference(*(results[name]["first"] for name in ALIKE))
        found.append(
            Verdict(f"{' and '.join(ALIKE)}: first steps differ most in {metric}", difference, "at most", SAME)
        )
    if all(name in results for name in REPLAYED):
        replayed, by_itself = (results[name]["first"][_LARGEST] for name in REPLAYED)
        what = "largest |rollout - trainer| log-prob of a mixture with its routes replayed / without"
        found.append(Verdict(what, replayed / by_itself, "at most", 1.0))
    all_met = all(verdict["met"] for result in results.values() for verdict in result["verdicts"])
    tell({"cases": sorted(results), "missing": missing, "all_met": all_met}, found, folder / "learning.json")
    sys.exit(not all_met or not all(verdict.met for verdict in found))


if __name__ == "__main__":
    main()
