"""What plans say of judges: how long they take, and how much room a longest question needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagrl.backends.families.registry import model_shape
from dagrl.backends.fit import engine_memory
from dagrl.backends.planning.gpus import gpu_named
from dagrl.planner.cost.bound import step_bound
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import estimate_step
from dagrl.scheduler.placement import make_plan
from dagrl.validation import check_file

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
ENDPOINT = {"endpoint": "http://judge:8000/v1", "model": "m"}


@pytest.fixture
def planned(tmp_path: Path):
    """Costs of a pipeline with this judge, on its own two servers where it is on an engine."""
    for name in ("policy", "wise"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN3))

    def make(backend: str = "sglang", gpus: int = 2, data: Any = None, **judge: Any) -> PipelineCosts:
        pipeline: dict[str, Any] = {
            "name": "judged",
            "model": {"path": "policy"},
            "data": {"train": "train.parquet", "prompts_per_step": 128, "max_prompt_tokens": 1024},
            "groups": {
                "train": {"gpus_per_node": 4},
                "rollout": {"gpus_per_node": 2},
                "judges": {"gpus_per_node": gpus},
            },
            "engines": {
                "actor": {"backend": "megatron", "group": "train", "optimizer": {"lr": 1e-6}},
                "generator": {"backend": "sglang", "group": "rollout", "weights_from": "actor"},
                "wise": {"backend": backend, "group": "judges", "model": {"path": "wise"}},
            },
            "nodes": {
                "rollout": {"op": "rollout", "engine": "generator", "n": 8, "sampling": {"max_new_tokens": 2048}},
                "reward": {"op": "judge", "prompt": "{response}", **judge},
                "advantage": {"op": "advantage", "estimator": "grpo"},
                "update": {"op": "update", "engine": "actor"},
            },
            "run": {"steps": 10},
        }
        if "rows" in judge:
            nodes = pipeline["nodes"]
            nodes["right"] = {"op": "reward", "fn": "exact", "write": "right"}
            nodes["reward"]["write"] = "judged"
            nodes["merged"] = {"op": "merge", "columns": ["judged", "right"], "write": "reward"}
        pipeline["data"] |= data or {}
        path = tmp_path / "p.yaml"
        path.write_text(yaml.safe_dump(pipeline))
        checked = check_file(path, with_files=False)
        declared = checked.loaded.pipeline
        return PipelineCosts(declared, make_plan(declared, checked.graph), model_shape(declared.model), "H200")

    return make


def reward_seconds(costs: PipelineCosts) -> float:
    return estimate_step(costs).node_s["reward"]


def test_a_judge_takes_longer_for_longer_replies(planned) -> None:
    short, long = (reward_seconds(planned(engine="wise", sampling={"max_new_tokens": tokens})) for tokens in (64, 2048))
    assert long > 8 * short > 0


def test_more_servers_take_a_judge_less(planned) -> None:
    assert reward_seconds(planned(engine="wise", gpus=8)) < 0.7 * reward_seconds(planned(engine="wise"))


def test_more_questions_at_once_take_an_endpoint_less(planned) -> None:
    few, many = (reward_seconds(planned(**ENDPOINT, concurrency=concurrency)) for concurrency in (8, 64))
    # 1024 replies of 512 tokens, 15 ms each.
    assert few == pytest.approx(1024 * 512 * 0.015 / 8, rel=0.01)
    assert few == pytest.approx(8 * many, rel=0.01)
    said = reward_seconds(planned(**ENDPOINT, concurrency=8, expected_s=2.0))
    assert said == pytest.approx(1024 * 2 / 8, rel=0.01)


def test_a_judges_engine_needs_room_for_its_longest_question_and_reply(planned) -> None:
    def cache(**judge: Any) -> int:
        costs = planned("hf", engine="wise", **judge)
        memory = engine_memory(costs.pipeline, costs.plan, "wise", costs.shape, gpu_named("H200"))
        return memory.awake["cache"]

    short, long = cache(max_prompt_tokens=8192), cache(max_prompt_tokens=32768)
    assert long / short == pytest.approx((32768 + 1024) / (8192 + 1024))


SOURCES = {"essays": {"path": "essays.parquet", "weight": 1, "n": 4}, "sums": {"path": "sums.parquet", "weight": 2}}


@pytest.mark.parametrize(
    ("rows", "data", "share"),
    [
        # 1 x 4 of 1 x 4 + 2 x 8 responses.
        ({"data_set": ["essays"]}, {}, 0.2),
        ({"data_set": ["sums", "essays"]}, {}, 1.0),
        ({"data_set": ["essays"]}, {"weights_by": "tokens"}, None),
        ({"data_set": ["essays"]}, {"order": {"stages": [{"weights": {"sums": 1}}]}}, None),
        ({"data_source": ["essays"]}, {}, None),
        ({"data_set": ["essays"], "data_source": ["a"]}, {}, None),
    ],
)
@pytest.mark.parametrize("own", [{"engine": "wise"}, ENDPOINT])
def test_a_judge_of_some_sources_takes_as_long_as_their_share(planned, own, rows, data, share) -> None:
    costs = planned(data={"train": SOURCES, **data}, **own, rows=rows)
    task = costs.plan.task("reward")
    assert costs.rows(task) == round(128 * 20 / 3)
    assert costs.computed_rows(task) == round(costs.rows(task) * (1.0 if share is None else share))
    assert (costs.chosen_sources(costs.pipeline.nodes["reward"]) is None) == (share is None)
    if own is ENDPOINT:
        assert reward_seconds(costs) == pytest.approx(costs.computed_rows(task) * 512 * 0.015 / 32, rel=0.01)


def test_a_judge_of_sources_that_have_no_weight_takes_no_time(planned) -> None:
    sources = {**SOURCES, "essays": {**SOURCES["essays"], "weight": 0}}
    costs = planned(engine="wise", data={"train": sources}, rows={"data_set": ["essays"]})
    assert reward_seconds(costs) < 0.1
    assert step_bound(costs, [gpu_named("H200")] * 8).seconds > 0
