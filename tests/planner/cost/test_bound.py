"""The lower bound of a step: by hand, and never above what is simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagrl.backends.families.flops import model_flops
from dagrl.backends.planning.gpus import gpu_named
from dagrl.planner.cost.bound import step_bound
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import estimate_step
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.showing.report import report

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
READ = "nodes.update.read={old_logprob: rollout_logprob}"
H200 = gpu_named("H200")


def costs_of(name: str, *overrides: str, assumed: Assumed | None = None) -> PipelineCosts:
    found = report(TEMPLATES / f"{name}.yaml", overrides, gpu="H200")
    return PipelineCosts(found.pipeline, found.fit.plan, found.fit.shape, "H200", assumed or Assumed())


FP8 = (
    "engines.generator.quantization=fp8",
    "engines.generator.server.kv_cache_dtype=fp8_e4m3",
    "engines.actor.transformer={fp8: hybrid}",
)


@pytest.mark.parametrize("fp8", [(), FP8], ids=["bf16", "fp8"])
def test_the_chain_of_a_synchronous_step_by_hand(fp8: tuple[str, ...]) -> None:
    """Responses of equal lengths; nothing but a rollout and an update."""
    costs = costs_of(
        "qwen3_8b_megatron",
        *("nodes.ref=null", "engines.reference=null", "nodes.update.loss.kl_coef=0", "data.prompts_per_step=16"),
        "nodes.rollout.sampling.max_new_tokens=1024",
        *fp8,
        assumed=Assumed(prompt_tokens=512, response_tokens=1024),
    )
    rollout = costs.plan.task("rollout")
    rows, lengths, shape = costs.rows(rollout), costs.lengths(rollout), costs.shape
    flops, group = model_flops(shape), costs.plan.samples_per_prompt
    assert (lengths.prompt, lengths.response, lengths.longest) == (512, 1024, 1024), "nothing is drawn"
    row = 512 + 1024
    # In fp8 layers multiply twice as fast, and a weight of theirs, or a value in the cache, has one byte.
    saved, each = (shape.matrices, 1) if fp8 else (0, 2)
    train = 3 * rows * (flops.per_token * each / 2 * row + flops.per_pair * row**2 / 2 + flops.per_prediction * 1024)
    weights = 1024 * ((shape.parameters - shape.embedding) * 2 - saved)
    cached = rows * (512 * 1024 / group + 1024**2 / 2) * shape.cache_values_per_token * shape.layers * each
    expected = (weights + cached) / (8 * 4.8e12) + train / (8 * 989.4e12)
    bound = step_bound(costs, [H200] * 8)
    assert bound is not None and bound.by == "chain"
    assert bound.seconds == pytest.approx(expected)
    # Where steps overlap, one may sample while another trains.
    ahead = step_bound(replace(costs, plan=replace(costs.plan, max_staleness=1)), [H200] * 8)
    assert ahead is not None and ahead.by == "overlap" and ahead.seconds < bound.seconds


def test_a_slow_host_is_the_bound_however_many_gpus_there_are() -> None:
    costs = costs_of("qwen3_8b_megatron", "nodes.reward.expected_s=10", "run.host_workers=4")
    bound = step_bound(costs, [H200] * 1000)
    assert bound is not None and bound.by == "host"
    rows = costs.rows(costs.plan.task("reward"))
    assert bound.seconds == pytest.approx(rows * 10 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3_8b_megatron", ()),
        ("qwen3_8b_megatron", ("engines.actor.lora={rank: 32, alpha: 64}",)),
        ("qwen3_30b_a3b_8gpu", ()),
        ("qwen3_8b_megatron", FP8),
        ("async_grpo", ()),
        ("qwen3_8b_megatron", (READ, "nodes.update.mini_batch=32", "schedule.stream_update=true")),
    ],
)
def test_no_simulated_step_is_shorter(name: str, overrides: tuple[str, ...]) -> None:
    costs = costs_of(name, *overrides)
    gpus = [H200] * sum(group.ranks for group in costs.pipeline.groups.values())
    bound = step_bound(costs, gpus)
    assert 0.05 < bound.seconds / estimate_step(costs).step_s < 1
