"""What ops read and write by their options: the arrows of the graph."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from dagrl.config.schema import NodeSpec, OpContract, Scope
from dagrl.config.schema.backends import AnyEngineSpec

ENGINES = {
    "actor": {"backend": "megatron", "group": "g", "router_replay": True},
    "plain": {"backend": "megatron", "group": "g"},
    "classifier": {"backend": "hf", "group": "g"},
}


def contract(op: str, options: dict[str, Any]) -> OpContract:
    node: Any = TypeAdapter(NodeSpec).validate_python({"op": op, **options})
    engine = ENGINES.get(options.get("engine", ""))
    return node.contract(engine and TypeAdapter(AnyEngineSpec).validate_python(engine))


UPDATE = {"engine": "plain"}
GAE = {"estimator": "gae"}
SAMPLES = {"engine": "plain", "sampling": {"max_new_tokens": 8}}


@pytest.mark.parametrize(
    ("op", "without", "with_option", "columns"),
    [
        ("update", UPDATE, {"loss": {"kl_coef": 0.1}}, {"ref_logprob"}),
        ("update", UPDATE, {"loss": {"sft_coef": 0.1}}, {"is_expert"}),
        ("update", UPDATE, {"loss": {"observation_coef": 0.1}}, {"token_turn"}),
        ("update", UPDATE, {"loss": {"policy": "clip_cov"}}, {"clip_cov_mask"}),
        ("update", UPDATE, {"loss": {"policy": "m2po"}}, {"clip_cov_mask"}),
        ("update", UPDATE, {"loss": {"distillation": {}}}, {"teacher_logprob"}),
        ("update", UPDATE, {"loss": {"policy": "opmd_pairwise"}}, {"group_id"}),
        ("update", UPDATE, {"rollout_correction": {"rollout_is": "token"}}, {"rollout_logprob"}),
        ("update", UPDATE, {"engine": "actor"}, {"routed_experts"}),
        ("logprob", {"engine": "plain"}, {"engine": "actor"}, {"routed_experts"}),
        ("advantage", {"estimator": "remax"}, {"length_reward": {}}, {"group_id"}),
        ("advantage", GAE, {"kl_in_reward": {"coef": 0.1}}, {"old_logprob", "ref_logprob"}),
        ("advantage", GAE, {"distillation": {}}, {"old_logprob", "teacher_logprob"}),
        ("reward", {"fn": "exact"}, {"fn": "environment"}, {"token_reward"}),
        ("reward_model", {"engine": "plain"}, {"engine": "classifier"}, {"messages"}),
        ("rollout", SAMPLES, {"tools": ["calculator"]}, {"extra_info"}),
        ("rollout", SAMPLES, {"environment": "m:f"}, {"extra_info", "answer", "data_source"}),
    ],
)
def test_an_option_asks_for_columns(op: str, without: dict, with_option: dict, columns: set[str]) -> None:
    asked = set(contract(op, without | with_option).reads)
    assert asked - set(contract(op, without).reads) == columns


@pytest.mark.parametrize(
    ("op", "options", "columns"),
    [
        (
            "update",
            UPDATE,
            {
                "old_logprob",
                "ref_logprob",
                "rollout_logprob",
                "is_expert",
                "trajectory_share",
                "token_version",
                "is_replayed",
            },
        ),
        (
            "update",
            {**UPDATE, "loss": {"kl_coef": 0.1}},
            {"old_logprob", "rollout_logprob", "is_expert", "trajectory_share", "token_version", "is_replayed"},
        ),
        ("advantage", GAE, {"is_expert", "excluded", "token_reward"}),
        ("advantage", {"estimator": "grpo"}, {"is_expert", "excluded"}),
        ("advantage", {"estimator": "gigpo"}, {"is_expert", "excluded", "token_reward"}),
        ("reward", {"fn": "exact"}, {"token_turn", "token_reward", "finish_reason", "agent_reward"}),
        ("reward", {"fn": "agent"}, {"token_turn", "token_reward", "finish_reason"}),
        ("reward", {"fn": "environment"}, {"token_turn", "finish_reason"}),
    ],
)
def test_columns_that_are_read_if_written(op: str, options: dict, columns: set[str]) -> None:
    assert set(contract(op, options).reads_if_written) == columns


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, set()),
        ({"tools": ["calculator"]}, {"turns", "token_turn"}),
        ({"environment": "m:f"}, {"turns", "token_turn", "token_reward"}),
    ],
)
def test_turn_columns_and_with_an_environment_token_rewards(options: dict, columns: set[str]) -> None:
    assert {"turns", "token_turn", "token_reward"} & set(contract("rollout", SAMPLES | options).writes) == columns


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ({"estimator": "remax"}, Scope.ROW),
        ({"estimator": "remax", "length_reward": {}}, Scope.GROUP),
        ({"estimator": "grpo"}, Scope.GROUP),
        ({"estimator": "gae", "length_reward": {}}, Scope.BATCH),
    ],
)
def test_an_advantage_sees_as_much_of_the_batch_as_it_compares(options: dict, scope: Scope) -> None:
    assert contract("advantage", options).scope is scope


@pytest.mark.parametrize(("policy", "whole"), [("ppo_clip", False), ("opmd", False), ("opmd_pairwise", True)])
def test_a_loss_that_compares_responses_gets_whole_groups(policy: str, whole: bool) -> None:
    assert contract("update", {**UPDATE, "loss": {"policy": policy}}).whole_groups is whole


def test_a_student_of_a_teacher_alone_reads_neither_rewards_nor_advantages() -> None:
    advantage = contract("advantage", {"estimator": "none", "distillation": {}})
    assert set(advantage.reads) == {"response_mask", "old_logprob", "teacher_logprob"}
    assert advantage.scope is Scope.ROW
    update = contract("update", {**UPDATE, "loss": {"policy": "none", "distillation": {}}})
    assert not {"advantage", "reward", "old_logprob"} & {*update.reads, *update.reads_if_written}
