"""Pipelines that learn from given responses: their graphs, their rows, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from model_folders import write_model

from dagrl.graph.dag import Graph
from dagrl.graph.drawing.draw import draw_text
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import Rows
from dagrl.validation import CheckedPipeline, check_file
from dagrl.validation.summary import summarize

RESPONSES = ("  max_prompt_tokens: 16\n", "  max_prompt_tokens: 16\n  responses: [{}]\n  max_response_tokens: 6\n")
NODES = """\
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}
  reward: {op: reward, fn: exact}
  ref: {op: logprob, engine: reference, write: ref_logprob}
  advantage: {op: advantage, estimator: grpo}
  update: {op: update, engine: actor, loss: {kl_coef: 0.01}}
"""
SFT = """\
  rollout: {op: rollout, engine: generator, sampling: {max_new_tokens: 8}, val_n: 3, val_sampling: {max_new_tokens: 8}}
  reward: {op: reward, fn: exact}
  sft: {op: sft, engine: actor}
"""
DPO = """\
  ref: {op: logprob, engine: reference, read: {response_tokens: demonstration}, write: ref_logprob}
  dpo: {op: dpo, engine: actor, tokens_per_micro_batch: 44}
"""
MIX = NODES.replace("kl_coef: 0.01", "kl_coef: 0.01, sft_coef: 0.1") + "  mix: {op: mix}\n"
VALIDATES = ("run: {steps: 10}", "run: {steps: 10, validate_every: 5}")
NO_GENERATOR = (
    ("  generator: {backend: hf, group: rollout, weights_from: actor}\n", ""),
    ("  rollout: {cpus_per_node: 1}\n", ""),
)


@pytest.fixture
def checked(project, row):
    """``checked(nodes, *columns, edits)``: a pipeline with these nodes, and responses in these columns."""

    def check(nodes: str, *columns: str, edits: tuple[tuple[str, str], ...] = ()) -> CheckedPipeline:
        project.write_rows("train.parquet", [row | dict.fromkeys(columns, "2")] * 32)
        given = (RESPONSES[0], RESPONSES[1].format(", ".join(columns)) + "  val: train.parquet\n")
        return check_file(project.pipeline((NODES, nodes), given, VALIDATES, *edits))

    return check


def wires(graph: Graph, node: str) -> dict[str, str]:
    return {column: wire.node for column, wire in graph.nodes[node].inputs.items()}


def tasks(checked: CheckedPipeline, rows: Rows) -> dict[str, Any]:
    plan = make_plan(checked.loaded.pipeline, checked.graph)
    return {task.node: task for task in plan.tasks if task.rows is rows}


def test_a_rollout_that_nothing_is_trained_on_is_for_validation(checked) -> None:
    found = checked(SFT, "response", edits=(("  reference: {backend: megatron, frozen_copy_of: actor}\n", ""),))
    assert found.graph.validates_only == {"rollout", "reward"}
    training, validating = tasks(found, Rows.TRAIN), tasks(found, Rows.VALIDATION)
    assert list(training) == ["prompts", "sft", "samples"]
    assert set(training["samples"].inputs) == {
        *("group_id", "prompt_tokens", "answer", "data_source", "data_set", "demonstration")
    }
    assert list(validating) == ["prompts", "rollout", "reward", "sft", "samples"]
    assert (training["sft"].trains, validating["sft"].trains) == (True, False)
    assert {"reward", "response_tokens", "demonstration"} < set(validating["samples"].inputs)
    pipeline = found.loaded.pipeline
    assert (pipeline.needs_answers(), pipeline.needs_answers(validation=True)) == (False, True)
    plan = make_plan(pipeline, found.graph)
    assert (plan.samples_per_prompt, plan.val_samples_per_prompt) == (1, 3)
    assert plan.executors["actor"].trained
    assert "rollout on generator, in validation" in draw_text(found.graph)
    assert "in validation only" in summarize(found)


def test_a_pipeline_may_do_without_a_rollout(checked) -> None:
    found = checked(DPO, "chosen", "rejected", edits=NO_GENERATOR)
    training, validating = tasks(found, Rows.TRAIN), tasks(found, Rows.VALIDATION)
    assert list(training) == list(validating) == ["prompts", "ref", "dpo", "samples"]
    assert training["ref"].inputs["response_tokens"] == ("prompts", "demonstration")
    assert [training[name].whole_groups for name in training] == [False, False, True, False]
    assert validating["dpo"].inputs["ref_logprob"] == ("val/ref", "ref_logprob")
    pipeline = found.loaded.pipeline
    assert pipeline.is_offline and pipeline.rows_per_prompt() == pipeline.rows_per_prompt(validation=True) == 2
    assert pipeline.data.longest_demonstration == pipeline.longest_row == 22
    assert not pipeline.needs_answers(validation=True)


def test_without_a_loss_validation_needs_no_responses(checked, project, row) -> None:
    project.write_rows("test.parquet", [row] * 4)
    edits = (
        ("val: train.parquet", "val: test.parquet"),
        ("  reference: {backend: megatron, frozen_copy_of: actor}\n", ""),
    )
    found = checked(SFT.replace("engine: actor}", "engine: actor, val_loss: false}"), "response", edits=edits)
    validating = tasks(found, Rows.VALIDATION)
    assert "sft" not in validating
    assert "demonstration" not in validating["samples"].inputs
    assert "demonstration" not in validating["prompts"].outputs


def test_the_mix_node_is_between_the_rollout_and_all_other_nodes(checked) -> None:
    found = checked(MIX, "response")
    graph = found.graph
    replaced = ("response_tokens", "response_mask", "rollout_logprob", "finish_reason")
    assert {wires(graph, "mix")[column] for column in replaced} == {"rollout"}
    for reader in ("reward", "ref", "advantage", "update", "samples"):
        told = {column: node for column, node in wires(graph, reader).items() if column in (*replaced, "is_expert")}
        assert set(told.values()) == {"mix"}, reader
    assert wires(graph, "update")["policy_version"] == "rollout"
    assert "is_expert" in wires(graph, "advantage") and "is_expert" in wires(graph, "update")
    assert not graph.validates_only
    assert not found.loaded.pipeline.is_offline and found.loaded.pipeline.needs_answers()
    assert graph.sampled_by("reward") == graph.sampled_by("update") == "rollout"


def test_there_are_no_experts_in_validation(checked) -> None:
    found = checked(MIX, "response")
    validating = tasks(found, Rows.VALIDATION)
    assert list(validating) == ["prompts", "rollout", "reward", "samples"]
    assert validating["reward"].inputs["response_tokens"] == ("val/rollout", "response_tokens")
    assert "is_expert" not in validating["samples"].inputs
    assert "demonstration" not in validating["prompts"].outputs


def test_prompts_write_demonstrations_where_the_file_names_columns(checked, project) -> None:
    assert "demonstration" not in check_file(project.pipeline()).graph.nodes["prompts"].outputs
    assert "demonstration" in checked(MIX, "response").graph.nodes["prompts"].outputs


def test_the_whole_pipeline_of_the_docs_is_right(tmp_path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "offline.md").read_text()
    (declared,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("name:")]
    (tmp_path / "first.yaml").write_text(declared.replace("~/models/Qwen3-1.7B", "model"))
    write_model(tmp_path / "model", model_type="qwen3")
    checked = check_file(tmp_path / "first.yaml", with_files=False)
    assert list(tasks(checked, Rows.TRAIN)) == ["prompts", "sft", "samples"]
