"""What plans say of teachers that are served: how long they read, and how much room they need."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagrl.backends.families.registry import model_shape
from dagrl.backends.fit import engine_memory
from dagrl.backends.megatron.planning.layouts import MegatronLayout
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.backends.planning.gpus import gpu_named
from dagrl.config.schema import Scope
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import estimate_step
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.placement import make_plan
from dagrl.validation import check_file

QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SMALL = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
ENDPOINT = {"engine": None, "endpoint": "http://teacher:8000/v1", "model": "m"}


@pytest.fixture
def planned(tmp_path: Path):
    """Costs of a pipeline whose teacher is on two servers of its own."""
    for name, config in (("policy", QWEN3_8B | SMALL), ("big", QWEN3_8B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))

    def make(
        backend: str = "sglang", gpus: int = 2, longest: int = 2048, group: str = "teachers", **teacher: Any
    ) -> PipelineCosts:
        node = {"op": "logprob", "engine": "teacher", "write": "teacher_logprob", **teacher}
        pipeline: dict[str, Any] = {
            "name": "taught",
            "model": {"path": "policy"},
            "data": {"train": "train.parquet", "prompts_per_step": 128, "max_prompt_tokens": 1024},
            "groups": {
                "train": {"gpus_per_node": 4},
                "rollout": {"gpus_per_node": 2},
                **({"teachers": {"gpus_per_node": gpus}} if group == "teachers" else {}),
            },
            "engines": {
                "actor": {"backend": "megatron", "group": "train", "optimizer": {"lr": 1e-6}},
                "generator": {"backend": "sglang", "group": "rollout", "weights_from": "actor"},
                "teacher": {"backend": backend, "group": group, "model": {"path": "big"}},
            },
            "nodes": {
                "rollout": {"op": "rollout", "engine": "generator", "n": 8, "sampling": {"max_new_tokens": longest}},
                "teacher": {name: value for name, value in node.items() if value is not None},
                "advantage": {
                    "op": "advantage",
                    "estimator": "none",
                    "distillation": {},
                    "read": {"old_logprob": "rollout_logprob"},
                },
                "update": {"op": "update", "engine": "actor", "tokens_per_micro_batch": 65536},
            },
            "run": {"steps": 10},
        }
        path = tmp_path / "p.yaml"
        path.write_text(yaml.safe_dump(pipeline))
        checked = check_file(path, with_files=False)
        declared = checked.loaded.pipeline
        return PipelineCosts(declared, make_plan(declared, checked.graph), model_shape(declared.model), "H200")

    return make


def seconds(costs: PipelineCosts) -> float:
    return estimate_step(costs).node_s["teacher"]


def test_it_reads_shards_as_they_come_and_ahead_of_the_trainer(planned) -> None:
    """With samples a step old, the teacher has read the next step's shards when the trainer begins it."""
    costs = planned()
    assert costs.plan.task("teacher").scope is Scope.ROW
    plan = replace(costs.plan, max_staleness=1)
    activities = simulate(plan, replace(costs, plan=plan), 3).activities
    rollouts = [each for each in activities if each.name == "rollout" and each.step == 2]
    reads = [each for each in activities if each.name == "teacher" and each.step == 2]
    assert len(reads) > 1, "shards that have come meanwhile are read together"
    assert min(each.start for each in reads) < max(each.end for each in rollouts), "while others are sampled"
    (trained,) = [each for each in activities if each.name == "update" and each.step == 1]
    assert min(each.start for each in reads) < trained.end, "while the trainer trains on the step before"


def test_on_a_group_with_the_generator_it_sleeps_in_between(planned) -> None:
    costs = planned(group="rollout")
    executors = costs.plan.executors
    assert executors["teacher"].sleeps and executors["generator"].sleeps
    # One pass of all shards: the two take turns.
    assert costs.plan.task("teacher").scope is Scope.BATCH
    activities = simulate(costs.plan, costs, 2).activities
    in_turn = [each.name for each in activities if each.step == 2 and each.name in ("rollout", "teacher")]
    assert in_turn[-1] == "teacher" and "teacher" not in in_turn[:-1]
    assert {"sleep", "wake"} <= {each.name for each in activities}


@pytest.mark.parametrize("teacher", [{}, ENDPOINT], ids=["servers", "endpoint"])
def test_no_search_proposes_micro_batches_for_it(planned, teacher) -> None:
    """A node of servers refuses them."""
    pipeline = planned(**teacher).pipeline
    layout = MegatronLayout(ParallelSpec(), tokens_per_micro_batch=8192)
    told = [each for each in layout.overrides(pipeline) if "micro_batch" in each]
    assert told == ["nodes.update.tokens_per_micro_batch=8192"]
    assert layout.applied(pipeline).nodes["teacher"] == pipeline.nodes["teacher"]


def test_reading_takes_as_long_as_a_prefill(planned) -> None:
    """1024 rows of 1024 tokens on average and 8.2e9 parameters on two H200s, prompts once for each group of 8."""
    tokens = 128 * 512 + 1024 * 1024
    operations = 2 * 8.2e9 * tokens / 2
    assert 0.5 * operations / 660e12 < seconds(planned()) < 3 * operations / 660e12


def test_more_servers_and_shorter_responses_take_less(planned) -> None:
    assert seconds(planned(gpus=8)) < 0.5 * seconds(planned())
    assert seconds(planned(longest=256)) < 0.4 * seconds(planned())


def test_vllm_reads_each_prompt_anew(planned) -> None:
    assert 1.2 * seconds(planned()) < seconds(planned("vllm")) < 2 * seconds(planned())


def test_more_rows_at_once_take_an_endpoint_less(planned) -> None:
    few, many = (seconds(planned(**ENDPOINT, concurrency=concurrency)) for concurrency in (8, 64))
    assert few > 4 * many > 0


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_its_cache_has_room_for_the_longest_row(planned, backend: str) -> None:
    def needs(longest: int) -> int:
        costs = planned(backend, longest=longest)
        return engine_memory(costs.pipeline, costs.plan, "teacher", costs.shape, gpu_named("H200")).needs

    short, long = needs(2048), needs(39000)
    per_token = 2 * 8 * 128 * 2 * 36
    assert long - short == pytest.approx((1024 + 39000 - 16384) * per_token, rel=0.01)
