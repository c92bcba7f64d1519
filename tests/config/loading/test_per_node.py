"""Sizes that grow with the machines."""

from __future__ import annotations

import pytest

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline

PIPELINE = """\
name: tiny
model: {init: {model_type: qwen3}, tokenizer: {kind: bytes}}
data: {train: train.parquet, prompts_per_node: 8, max_prompt_tokens: 8}
groups:
  train: {nodes: 3, gpus_per_node: 8}
  rollout: {nodes: 5, gpus_per_node: 8}
engines:
  actor: {backend: megatron, group: train, optimizer: {lr: 1e-3}}
  generator: {backend: hf, group: rollout, weights_from: actor}
nodes:
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 3}}
  reward: {op: reward, fn: exact}
  advantage: {op: advantage, estimator: grpo}
  update: {op: update, engine: actor, mini_batch_per_node: 2}
run: {steps: 6}
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE)
    return lambda *overrides: load_pipeline(path, overrides)


def sizes(loaded) -> tuple[int, int | None]:
    return loaded.pipeline.data.prompts_per_step, loaded.pipeline.nodes["update"].mini_batch


def test_sizes_are_multiplied_by_the_machines_that_train(load):
    assert sizes(load()) == (24, 6)
    assert sizes(load("groups.train.nodes=1")) == (8, 2)
    assert sizes(load("groups.train={gpus_per_node: 8}")) == (8, 2)
    assert sizes(load("data.prompts_per_node=1", "nodes.update.mini_batch_per_node=1")) == (3, 3)
    assert sizes(load("data.prompts_per_node=4", "nodes.update.mini_batch_per_node=null")) == (12, None)


def test_the_largest_of_several_trained_groups_counts(load):
    second = "engines.generator={backend: megatron, group: rollout, optimizer: {lr: 1e-3}}"
    assert sizes(load(second, "nodes.second={op: update, engine: generator}")) == (40, 10)


@pytest.mark.parametrize("op", ["sft", "dpo", "critic"])
def test_whatever_trains_an_engine_counts(load, op):
    pipeline = load(f"nodes.update={{op: {op}, engine: actor, mini_batch_per_node: 4}}").pipeline
    assert (pipeline.data.prompts_per_step, pipeline.nodes["update"].mini_batch) == (24, 12)


def test_the_runs_pipeline_file_loads_with_the_same_sizes(load, tmp_path):
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(load().to_yaml())
    assert sizes(load_pipeline(resolved, ["groups.train.nodes=1"])) == (24, 6)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.prompts_per_step=8", "`prompts_per_node` and `prompts_per_step` are both set; keep one"),
        ("nodes.update.mini_batch=8", "`mini_batch_per_node` and `mini_batch` are both set; keep one"),
        ("data.prompts_per_node=many", "got 'many'; it must be an integer"),
        ("data.prompts_per_node=0", "prompts_per_node=0: "),
        ("nodes.update.mini_batch_per_node=1.5", "it must be an integer"),
        ("groups.train.nodes=x", "it must be an integer"),
        ("nodes.update.engine=3", "engine=3: "),
    ],
)
def test_one_error_is_reported_once(load, override, message):
    with pytest.raises(PipelineError) as caught:
        load(override)
    assert len(caught.value.problems) == 1, str(caught.value)
    assert message in str(caught.value)
