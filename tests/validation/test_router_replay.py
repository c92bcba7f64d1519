"""Router replay: who reads the routes, whom the option switches on, and what is told where it cannot work."""

from __future__ import annotations

import pytest

from dagrl.backends.serving.server_backend import section_to_start
from dagrl.graph.dag import Wire
from dagrl.scheduler.placement import make_plan
from dagrl.validation import check_file

MIXTURE = (
    "model.init={model_type: qwen3_moe, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, "
    "num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32, norm_topk_prob: true}"
)
SGLANG = "engines.generator={backend: sglang, group: rollout, weights_from: actor}"
REPLAY = "engines.actor.router_replay=true"
RIGHT = (MIXTURE, SGLANG, REPLAY)
FLAG = "enable_return_routed_experts"


def test_the_engines_passes_read_the_routes(project):
    path = project.folder / "p.yaml"
    old = "nodes.old={op: logprob, engine: actor, write: old_logprob}"
    graph = check_file(path, [*RIGHT, old, "nodes.update.mini_batch=4"]).graph
    for name in ("old", "update"):
        assert graph.nodes[name].inputs["routed_experts"] == Wire("rollout", "routed_experts")
    # The reference routes by itself, unless it is told to do the same.
    assert "routed_experts" not in graph.nodes["ref"].inputs
    both = check_file(path, [*RIGHT, "engines.reference.router_replay=true"])
    assert "routed_experts" in both.graph.nodes["ref"].inputs
    plan = make_plan(both.loaded.pipeline, both.graph)
    assert "routed_experts" in plan.task("update").inputs
    without = check_file(path, [MIXTURE, SGLANG]).graph
    assert not any("routed_experts" in node.inputs for node in without.nodes.values())


def test_the_server_is_set_to_return_routes(project):
    path = project.folder / "p.yaml"
    pipeline = check_file(path, [*RIGHT, "engines.generator.server.mem_fraction_static=0.5"]).loaded.pipeline
    assert section_to_start(pipeline, "generator").server == {"mem_fraction_static": 0.5, FLAG: True}
    plain = check_file(path, [MIXTURE, SGLANG]).loaded.pipeline
    assert section_to_start(plain, "generator") is plain.engines["generator"]
    assert check_file(path, [*RIGHT, f"engines.generator.server.{FLAG}=true"]).warnings == ()


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        ([SGLANG, REPLAY], ["is an option for experts, but the model has no experts"]),
        ([MIXTURE, REPLAY], ["`generator`, a hf engine, does not tell where it routes tokens; sample with another"]),
        (
            [MIXTURE, SGLANG, "engines.reference.router_replay=true"],
            ["it has the model of `actor`", "set it there too"],
        ),
        ([*RIGHT, f"engines.generator.server.{FLAG}=false"], ["`actor` routes tokens as they were routed here"]),
        ([*RIGHT, "engines.generator.extra={server: {enable_hierarchical_cache: true}}"], ["host's cache loses"]),
        (
            [*RIGHT, "engines.generator.server.chunked_prefill_size=-1"],
            ["prompt that is not chunked", "SGLang crashes"],
        ),
        (
            [MIXTURE, SGLANG, f"engines.generator.server={{{FLAG}: true, chunked_prefill_size: -1}}"],
            ["a long prompt that is not chunked"],
        ),
        ([*RIGHT, "engines.actor.extra={transformer: {moe_router_fusion: true}}"], ["chooses experts by itself"]),
        (
            [MIXTURE, SGLANG, "engines.actor.transformer.moe_enable_routing_replay=true"],
            ["`router_replay` of the engine"],
        ),
    ],
)
def test_unsupported_router_replay_is_refused(project, overrides, fragments):
    problem = project.only_problem(project.folder / "p.yaml", *overrides)
    assert all(fragment in problem.message for fragment in fragments), problem.message
    assert "; " in problem.message


def test_a_family_whose_routes_no_server_returns(project):
    mixtral = MIXTURE.replace("qwen3_moe", "mixtral").replace("num_experts:", "num_local_experts:")
    mixtral = mixtral.replace("moe_intermediate_size: 32, norm_topk_prob: true", "intermediate_size: 32")
    problem = project.only_problem(project.folder / "p.yaml", mixtral, SGLANG, REPLAY)
    assert "no generator tells how a mixtral model routes" in problem.message


def test_a_critic_has_routes_of_its_own(project):
    critic = "engines.critic={backend: megatron, group: train, head: value, router_replay: true}"
    messages = [each.message for each in project.problems(project.folder / "p.yaml", *RIGHT, critic)]
    assert any("a value model with its own weights" in message for message in messages)


def test_stages_of_a_server_tell_of_their_own_layers_only(project):
    overrides = ["groups.rollout={gpus_per_node: 2}", "groups.train={gpus_per_node: 2}"]
    overrides.append("engines.generator.server.pp_size=2")
    messages = [each.message for each in project.problems(project.folder / "p.yaml", *RIGHT, *overrides)]
    assert any("reports its own layers only; remove it" in message for message in messages)
