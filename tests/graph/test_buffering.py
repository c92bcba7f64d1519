"""Which nodes see groups of earlier steps, and which columns a buffer keeps for them."""

from __future__ import annotations

import pytest

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.dag import Graph, Wire
from dagrl.graph.inference import build_graph
from dagrl.scheduler.placement import make_plan

BUFFER = "nodes.replay={op: buffer, groups_per_step: 2}"
OLD = "nodes.old={op: logprob, engine: actor, write: old_logprob}"
MORE = "nodes.greedy={op: rollout, engine: generator, n: 4, sampling: {temperature: 0, max_new_tokens: 8}}"
BASELINE = "nodes.base={op: reward, fn: exact, write: baseline_reward, read: {response_tokens: greedy.response_tokens}}"


@pytest.fixture
def graph_of(project):
    def build(*overrides: str) -> Graph:
        loaded = load_pipeline(project.pipeline(), (BUFFER, *overrides))
        return build_graph(loaded.pipeline, loaded.folder, loaded.positions)

    return build


def test_nodes_behind_rewards_read_through_the_buffer(graph_of) -> None:
    graph = graph_of(OLD)
    assert graph.order[:5] == ("prompts", "rollout", "reward", "replay", "ref")
    assert graph.producers("ref") == ("replay",)
    assert set(graph.producers("update")) == {"replay", "ref", "old", "advantage"}
    assert graph.producers("samples") == ("replay", "advantage")
    assert graph.nodes["update"].inputs["is_replayed"] == Wire("replay", "is_replayed")
    assert graph.producers("replay") == ("prompts", "rollout", "reward")


def test_the_buffer_keeps_what_is_read_behind_it_alone(graph_of) -> None:
    node = graph_of().nodes["replay"]
    assert "messages" not in node.contract.reads, "only the reward reads it"
    assert set(node.contract.writes) == {"is_replayed", *node.contract.replaces}
    assert {"response_tokens", "rollout_logprob", "policy_version", "reward", "answer"} <= set(node.contract.replaces)
    assert node.inputs["reward"] == Wire("reward", "reward")
    # The reference's log-probs, and the trainer's, are computed again.
    assert not {"ref_logprob", "old_logprob", "advantage"} & set(node.contract.replaces)


def test_validation_has_no_buffer(graph_of) -> None:
    graph = graph_of()
    assert "replay" not in graph.validation.nodes
    assert graph.validation.nodes["samples"].inputs["reward"] == Wire("reward", "reward")
    assert "is_replayed" not in graph.validation.nodes["samples"].inputs


def test_a_filter_comes_before_it(graph_of) -> None:
    graph = graph_of("nodes.keep={op: filter}")
    assert graph.in_rounds == {"prompts", "rollout", "reward", "keep"}
    assert graph.select_from == ("replay",)


def test_a_mix_comes_before_it_where_rewards_read_it(graph_of) -> None:
    graph = graph_of("nodes.mix={op: mix}", "data.responses=[answer]", "data.max_response_tokens=8")
    assert graph.nodes["replay"].inputs["response_tokens"] == Wire("mix", "response_tokens")
    assert graph.nodes["update"].inputs["response_tokens"] == Wire("replay", "response_tokens")
    assert graph.sampled_by("update") == "rollout"


def test_what_another_node_depends_on_for_rewards_is_computed_before(graph_of, project) -> None:
    project.write("mine.py", "import dagrl\n@dagrl.node(reads=['ref_logprob'], writes=['reward'])\ndef op(**_): ...\n")
    graph = graph_of("nodes.reward={op: 'mine:op'}")
    assert graph.producers("replay") == ("prompts", "rollout", "ref", "reward")
    assert graph.nodes["update"].inputs["ref_logprob"] == Wire("replay", "ref_logprob")


def test_columns_of_one_name_stay_apart(graph_of) -> None:
    graph = graph_of(
        MORE,
        BASELINE,
        "nodes.advantage={op: advantage, estimator: remax, read_from: [rollout]}",
        *(f"nodes.{name}.read_from=[rollout]" for name in ("reward", "ref", "update", "replay")),
    )
    assert graph.sampled_by("update") == graph.sampled_by("ref") == "rollout"
    assert graph.origin(graph.nodes["advantage"].inputs["baseline_reward"]) == Wire("base", "baseline_reward")
    assert {"base", "reward", "greedy"} <= graph.ancestors("replay")


def test_a_reward_for_metrics_alone_is_done_before_the_groups_join(graph_of) -> None:
    graph = graph_of("nodes.other={op: reward, fn: math, write: other}")
    assert "other" in graph.ancestors("replay")
    assert not {"other", "other.other"} & set(graph.nodes["replay"].outputs.values())


def test_a_reward_cannot_depend_on_the_buffer(graph_of, project) -> None:
    project.write("mine.py", "import dagrl\n@dagrl.node(reads=['is_replayed'], writes=['reward'])\ndef op(**_): ...\n")
    with pytest.raises(PipelineError) as error:
        graph_of("nodes.reward={op: 'mine:op'}")
    assert [problem.code for problem in error.value.problems] == ["cycle"]


def test_its_runs_are_in_the_order_of_steps(project) -> None:
    loaded = load_pipeline(project.pipeline(), (BUFFER,))
    plan = make_plan(loaded.pipeline, build_graph(loaded.pipeline, loaded.folder, loaded.positions))
    assert [task.name for task in plan.tasks if task.replays] == ["replay"]
    assert set(plan.task("replay").outputs) == {"is_replayed", *plan.task("replay").inputs} - {"excluded"}
