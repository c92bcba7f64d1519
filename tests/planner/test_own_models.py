"""Engines with a model of their own are planned by it: memory, cost, and the unknowns of a classifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.backends.families.registry import model_shape
from dagrl.backends.fit import Fit, engine_memory, fit
from dagrl.backends.megatron.planning.layouts import MegatronLayout
from dagrl.backends.planning.gpus import gpu_named
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.residency import Residency
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import estimate_step
from dagrl.planner.search.proposals import search
from dagrl.planner.search.space import Cluster
from dagrl.scheduler.commands import Run, Sleep
from dagrl.scheduler.placement import make_plan
from dagrl.validation import CheckedPipeline, check_file

TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "qwen3_8b_megatron.yaml"
SMALL = "{model_type: qwen3, vocab_size: 151936, hidden_size: 1024, intermediate_size: 3072, num_hidden_layers: 28}"
CRITIC = "{backend: megatron, group: gpu, head: value, parallel: {tensor_model_parallel_size: 2}, optimizer: {lr: 1e-5}"
PPO = (
    "nodes.advantage={op: advantage, estimator: gae}",
    "nodes.values={op: values, engine: critic}",
    "nodes.learn={op: critic, engine: critic, mini_batch: 32}",
)


def planned(tmp_path: Path, engines: str, *overrides: str) -> CheckedPipeline:
    """The 8B template with further engines, written out as its keys cannot be added from the command line."""
    path = tmp_path / "p.yaml"
    nodes = "\n".join(f"  {name}: {value}" for name, _, value in (each.partition("=") for each in overrides))
    nodes = nodes.replace("  nodes.", "  ")
    path.write_text(f"extends: {TEMPLATE}\nengines:\n{engines}\nnodes:\n{nodes}\n")
    return check_file(path, with_files=False)


def memory(checked: CheckedPipeline, engine: str):
    pipeline = checked.loaded.pipeline
    plan = make_plan(pipeline, checked.graph)
    return engine_memory(pipeline, plan, engine, model_shape(pipeline.model), gpu_named("H200"))


@pytest.fixture
def same(tmp_path) -> CheckedPipeline:
    return planned(tmp_path, f"  critic: {CRITIC}}}", *PPO)


@pytest.fixture
def small(tmp_path) -> CheckedPipeline:
    return planned(tmp_path, f"  critic: {CRITIC}, model: {{init: {SMALL}}}}}", *PPO)


def test_a_critic_has_no_logits_and_an_optimizer_of_its_own(same) -> None:
    critic = memory(same, "critic")
    assert critic.moment == "update"
    # What the head reads, and its gradient: 16,384 hidden states of 4,096 values, in bfloat16 and in float32.
    assert critic.awake["logits"] == 2 * 16384 * 4096 * (2 + 4)
    assert critic.awake["optimizer"] > 0
    # Two ways of tensor parallelism: half of 7.6 billion parameters, without the output layer's 0.6, of two bytes.
    assert critic.awake["weights"] == pytest.approx((8.19e9 - 0.62e9), rel=0.01)


def test_a_critic_that_sleeps_takes_its_states_along_as_it_waits_for_no_sync(same) -> None:
    costs = costs_of(same)
    critic = costs.engines["critic"]
    asleep = costs.seconds(Sleep(1, "critic", Residency.ASLEEP))
    assert asleep > (critic.weight_bytes + critic.state_bytes) / critic.device.to_host > 0


def test_a_critic_of_its_own_model_is_counted_by_that(same, small) -> None:
    assert memory(small, "critic").awake["weights"] < 0.12 * memory(same, "critic").awake["weights"]
    assert memory(small, "actor") == memory(same, "actor")
    assert {
        tenant.name
        for group in fit(small.loaded.pipeline, make_plan(small.loaded.pipeline, small.graph)).groups
        for tenant in group.tenants
    } == {
        "actor",
        "critic",
        "generator",
    }


def place_all(checked: CheckedPipeline) -> Fit:
    return fit(checked.loaded.pipeline, make_plan(checked.loaded.pipeline, checked.graph))


def costs_of(checked: CheckedPipeline) -> PipelineCosts:
    pipeline = checked.loaded.pipeline
    return PipelineCosts(pipeline, make_plan(pipeline, checked.graph), model_shape(pipeline.model))


def test_values_and_critic_take_the_time_of_their_model(same, tmp_path) -> None:
    # Micro-batches so large that the host, which takes as long for a small layer as for a large one, is not waited for.
    large = [override.replace("engine: critic", "engine: critic, tokens_per_micro_batch: 65536") for override in PPO]
    whole = tuple(range(costs_of(same).plan.shards))
    as_large, small = (
        planned(tmp_path, f"  critic: {CRITIC}{model}}}", *large) for model in ("", f", model: {{init: {SMALL}}}")
    )
    for task in ("values", "learn"):
        there, here = (costs_of(each).seconds(Run(1, task, whole)) for each in (as_large, small))
        assert 0.03 * there < here < 0.3 * there, task
    estimate = estimate_step(costs_of(same))
    assert {"values", "learn", "update"} <= estimate.node_s.keys()
    assert estimate.edge_bytes["values", "advantage"] > 0


def test_a_search_lays_out_what_trains_so_that_it_suits_all_models(tmp_path) -> None:
    # 36 layers and 32 heads, 27 layers and 16 heads: no two stages, and at most 16 ranks to a head.
    odd = SMALL.replace("28", "27").replace("}", ", num_attention_heads: 16, num_key_value_heads: 8}")
    checked = planned(tmp_path, f"  critic: {CRITIC}, model: {{init: {odd}}}}}", *PPO)
    found = search(
        check_file(checked.loaded.path, ("data.prompts_per_step=32",), with_files=False), Cluster(1, 2, "H200")
    )
    assert found
    for proposal in found:
        assert isinstance(proposal.trainer, MegatronLayout)
        assert proposal.trainer.parallel.pipeline_model_parallel_size == 1
        engines = load_pipeline(checked.loaded.path, proposal.overrides).pipeline.engines
        assert engines["critic"].parallel == engines["actor"].parallel == proposal.trainer.parallel


JUDGE = "  judge: {{backend: hf, group: gpu, head: reward, model: {{path: {folder}}}}}"
REWARD = "nodes.reward={op: reward_model, engine: judge, fn: null}"


@pytest.mark.parametrize(("family", "notes"), [("qwen3", 0), ("deberta-v2", 1)])
def test_a_classifier_is_counted_by_its_shape_or_its_files(tmp_path, family, notes) -> None:
    config = {"model_type": family, "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | heads))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 300_000)
    checked = planned(tmp_path, JUDGE.format(folder=tmp_path), REWARD)
    judge = memory(checked, "judge")
    # An embedding of 64,000, two layers of 12,288 in attention and 24,576 in the MLP, and some norms.
    expected = 300_000 if family == "deberta-v2" else 2 * (64_000 + 2 * 36_864)
    assert judge.awake["weights"] == pytest.approx(expected, rel=0.01)
    assert len(judge.notes) == notes
    costs = costs_of(checked)
    whole = tuple(range(costs.plan.shards))
    assert costs.seconds(Run(1, "reward", whole)) > 0
    assert costs.seconds(Sleep(1, "judge", Residency.ASLEEP)) >= 0


def test_a_classifier_takes_each_token_through_its_parameters_once(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2", "vocab_size": 1000}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * 10**9)
    costs = costs_of(planned(tmp_path, JUDGE.format(folder=tmp_path), REWARD))
    # 1024 rows of 1536 tokens, shared by the 8 workers.
    expected = 2 * 8e9 * 1024 * 1536 / 8 / costs.engines["judge"].device.matmul
    assert costs.seconds(Run(1, "reward", tuple(range(costs.plan.shards)))) == pytest.approx(expected, rel=0.01)
