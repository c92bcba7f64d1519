"""The arithmetic task with SGLang and vLLM on GPUs, in each layout of `benchmarks/learning.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dagrl.backends.environments import made_environments

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 80
ADAPTER_STEPS = 250
IMAGE_STEPS = 150
"""Adapters learn later, and so does a vision tower."""
_LIMIT_S = 500.0
"""For all of its steps, about a second each, while other tests have the same GPUs."""
CASES = (
    "one_gpu_colocated",
    "two_gpus_apart",
    "one_gpu_colocated_vllm",
    "two_gpus_apart_vllm",
    "one_gpu_colocated_lora",
    "one_gpu_colocated_lora_adapters_alone",
    "one_gpu_colocated_images",
    "two_gpus_apart_images",
    "one_gpu_colocated_images_vllm",
    "one_gpu_colocated_fp8_rollout",
    "one_gpu_colocated_fp8_rollout_vllm",
    "one_gpu_colocated_fp8",
    "one_gpu_colocated_agent",
    "one_gpu_colocated_glm4_moe",
    "one_gpu_colocated_gemma3",
    "one_gpu_colocated_qwen3_5_text",
    "one_gpu_colocated_images_qwen3_5",
    "two_gpus_apart_qwen3_5_text",
    "two_gpus_colocated_images_tp2_to_tp1",
    "two_gpus_colocated_tp2_to_tp1",
    "two_gpus_colocated_tp2_to_tp2",
    "two_gpus_colocated_experts_ep2_to_ep2",
    "two_gpus_colocated_experts_ep2_to_ep2_replayed",
    "two_gpus_colocated_tp2_to_tp2_vllm",
    "two_gpus_apart_experts_vllm_replayed",
    "two_gpus_colocated_experts_ep2_to_ep2_vllm",
    "four_gpus_colocated_tp2_to_tp1",
    "four_gpus_colocated_tp2_to_tp2",
    "four_gpus_apart_tp2_to_tp1",
    "four_gpus_apart_tp2_to_tp2",
)


def steps_of(name: str) -> int:
    return ADAPTER_STEPS if "lora" in name else IMAGE_STEPS if "images" in name else STEPS


@pytest.fixture(scope="module")
def learning(benchmark_module):
    return benchmark_module("learning")


@pytest.fixture(scope="module")
def learned(lab, learning, tmp_path_factory) -> Callable[[str], Any]:
    """A case's run, to its last step; each is run once."""

    @cache
    def run_case(name: str) -> Any:
        if torch.cuda.device_count() < learning.CASES[name].gpus:
            pytest.skip(f"needs {learning.CASES[name].gpus} GPUs")
        if learning.CASES[name].backend == "vllm" and "vllm" not in made_environments():
            pytest.skip("needs the environment that `make vllm` makes")
        folder: Path = tmp_path_factory.mktemp(name)
        file = folder / "pipeline.yaml"
        file.write_text(yaml.safe_dump(learning.pipeline(name, steps_of(name)), sort_keys=False))
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in learning.ENVIRONMENT.items():
                patch.setenv(variable, value)
            run = lab.start(file, folder / "run")
        assert run.wait(_LIMIT_S) == 0, run.output
        return run

    return run_case


def test_no_case_is_left_out(learning):
    assert sorted(CASES) == sorted(learning.CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_learns_and_both_engines_agree_on_log_probs(learning, learned, name: str):
    run = learned(name)
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, steps_of(name) + 1))
    assert [verdict.line() for verdict in learning.verdicts(name, metrics) if not verdict.met] == []
    assert [line["policy_version"] for line in metrics] == list(range(1, steps_of(name) + 1))
    assert all(line["staleness/max"] == 0 for line in metrics)
    assert run.left_behind() == []


def test_first_steps_are_the_same_with_trainer_and_generator_together_and_apart(learning, learned):
    one, other = (learned(name).metrics()[0] for name in learning.ALIKE)
    metric, difference = learning.largest_difference(one, other)
    assert difference <= learning.SAME, f"{metric}: {one[metric]} and {other[metric]}"


@pytest.mark.parametrize("name", ["one_gpu_colocated", "one_gpu_colocated_vllm"])
def test_engines_on_one_gpu_take_turns_in_its_memory(learned, name: str):
    run = learned(name)
    told = (run.folder / "timeline.json").read_text()
    assert '"sleep"' in told and '"wake"' in told
