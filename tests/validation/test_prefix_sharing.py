"""Prefixes that a trainer computes once: where that works, and that the rows of a group go to one rank."""

from __future__ import annotations

import pytest

from dagrl.scheduler.placement import make_plan
from dagrl.validation import check_file

SHARING = "engines.actor.prefix_sharing=true"
MIXTURE = (
    "model.init={model_type: qwen3_moe, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, "
    "num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32, norm_topk_prob: true}"
)
SGLANG = "engines.generator={backend: sglang, group: rollout, weights_from: actor}"
GEMMA = (
    "model.init={model_type: gemma2, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 96, num_hidden_layers: 2, head_dim: 16}"
)
GATED_DELTA = (
    "model.init={model_type: qwen3_5_text, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 96, num_hidden_layers: 2, head_dim: 16, linear_num_key_heads: 2, linear_num_value_heads: 4, "
    "linear_key_head_dim: 8, linear_value_head_dim: 8}"
)


def test_groups_stay_whole_for_the_engine_and_its_frozen_copy(project):
    path = project.folder / "p.yaml"
    frozen = "engines.reference={backend: megatron, frozen_copy_of: actor}"
    for overrides, whole in (([frozen], False), ([frozen, SHARING], True)):
        result = check_file(path, overrides)
        plan = make_plan(result.loaded.pipeline, result.graph)
        assert {plan.task(name).whole_groups for name in ("update", "ref")} == {whole}
        assert not plan.task("rollout").whole_groups


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([GEMMA, SHARING], "models of type gemma2 have attention that does not share prefixes; remove it"),
        ([GATED_DELTA, SHARING], "models of type qwen3_5_text have attention that does not share prefixes; remove it"),
        (
            [MIXTURE, SGLANG, SHARING, "engines.actor.router_replay=true"],
            "router_replay sends the tokens of each row where its own routes say; remove one of the two",
        ),
        (
            ["engines.reference={backend: megatron, frozen_copy_of: actor, prefix_sharing: true}"],
            "the model of `actor` computes it; set it there, and remove it here",
        ),
    ],
)
def test_engines_that_cannot_share_prefixes(project, overrides, message):
    problem = project.only_problem(project.folder / "p.yaml", *overrides)
    assert problem.message == message
