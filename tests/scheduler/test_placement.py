"""From a pipeline file to a plan: who computes what, and where its inputs come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import ROLLOUT_WRITES, Scope
from dagrl.graph.inference import build_graph
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST, Plan, Rows

TINY = """\
name: tiny
model: {init: {model_type: qwen3}, tokenizer: {kind: characters, alphabet: "01"}}
data: {train: train.parquet, val: train.parquet, prompts_per_step: 8, max_prompt_tokens: 8}
groups:
  train: {cpus_per_node: 1}
  rollout: {cpus_per_node: 1}
engines:
  actor: {backend: megatron, group: train, optimizer: {lr: 1e-3}}
  reference: {backend: megatron, frozen_copy_of: actor}
  generator: {backend: hf, group: rollout, weights_from: actor}
nodes:
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 3}}
  reward: {op: reward, fn: exact}
  old: {op: logprob, engine: actor, write: old_logprob}
  ref: {op: logprob, engine: reference, write: ref_logprob}
  advantage: {op: advantage, estimator: grpo}
  update: {op: update, engine: actor, mini_batch: 4, loss: {kl_coef: 0.01}}
schedule: {shards_per_step: 2}
run: {steps: 6}
"""
TRAINING = ["prompts", "rollout", "reward", "old", "ref", "advantage", "update", "samples"]
VALIDATION = ["val/prompts", "val/rollout", "val/reward", "val/samples"]


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """The plan of the tiny pipeline with overrides, as on the command line; ``null`` takes a key away."""

    def make(*overrides: str) -> Plan:
        (tmp_path / "p.yaml").write_text(TINY)
        loaded = load_pipeline(tmp_path / "p.yaml", overrides)
        return make_plan(loaded.pipeline, build_graph(loaded.pipeline, loaded.folder))

    return make


def names(plan: Plan, rows: Rows) -> list[str]:
    return [task.name for task in plan.tasks if task.rows is rows]


def test_a_reference_that_shares_lives_on_its_owners_ranks_frozen(plan_of) -> None:
    plan = plan_of()
    assert set(plan.executors) == {HOST, "actor", "generator"}
    assert plan.executors["actor"].engines == ("actor", "reference")
    ref, old = plan.task("ref"), plan.task("old")
    assert (ref.executor, ref.engine, ref.frozen) == ("actor", "reference", True)
    assert (old.executor, old.engine, old.frozen) == ("actor", "actor", False)


def test_a_separate_reference_has_its_own_ranks_and_is_not_trained(plan_of) -> None:
    reference = "engines.reference={backend: megatron, group: third}"
    plan = plan_of("groups.third={cpus_per_node: 2}", reference)
    executor = plan.executors["reference"]
    assert (executor.group, executor.ranks, executor.engines) == ("third", 2, ("reference",))
    assert (executor.trained, plan.executors["actor"].trained) == (False, True)
    assert plan.executors["actor"].engines == ("actor",)
    assert (plan.task("ref").executor, plan.task("ref").frozen) == ("reference", False)


def test_the_generator_follows_and_streams(plan_of) -> None:
    plan = plan_of("groups.rollout.cpus_per_node=3")
    generator = plan.executors["generator"]
    assert (generator.weights_from, generator.trained) == ("actor", False)
    assert (generator.ranks, generator.replicas) == (3, 3), "each rank is a replica"
    assert all(place.primary for place in generator.places)
    rollout = plan.task("rollout")
    assert (rollout.generates, rollout.streams, rollout.trains) == (True, True, False)
    assert [task.name for task in plan.tasks if task.trains] == ["update"]


def test_ranks_of_a_layout_have_one_primary_for_each_replica(plan_of) -> None:
    actor = plan_of(
        "groups.train={nodes: 2, cpus_per_node: 2}", "engines.actor.parallel={tensor_model_parallel_size: 2}"
    ).executors["actor"]
    assert (actor.ranks, actor.replicas) == (4, 2)
    assert [(place.dp, place.tp, place.primary) for place in actor.places] == [
        (0, 0, True),
        (0, 1, False),
        (1, 0, True),
        (1, 1, False),
    ]


def test_nodes_without_an_engine_run_on_the_host_workers(plan_of) -> None:
    plan = plan_of("run.host_workers=3")
    host = plan.executors[HOST]
    assert (host.ranks, host.group, host.engines) == (3, None, ())
    assert all(place.primary for place in host.places)
    assert [task.name for task in plan.tasks if task.executor == HOST] == ["prompts", "reward", "advantage", "samples"]
    assert all(task.engine is None for task in plan.tasks if task.executor == HOST)


def test_tasks_are_in_topological_order_with_the_scope_of_their_op(plan_of) -> None:
    plan = plan_of()
    assert names(plan, Rows.TRAIN)[0] == "prompts"
    assert sorted(names(plan, Rows.TRAIN)) == sorted(TRAINING)
    before: set[str] = set()
    for task in plan.tasks:
        assert before.issuperset(task.needs), f"{task.name} stands before what it reads from"
        before.add(task.name)
    scopes = {task.name: task.scope for task in plan.tasks}
    assert {name for name, scope in scopes.items() if scope is Scope.BATCH} == {"prompts", "update", "samples"}
    assert scopes["advantage"] is Scope.GROUP


@pytest.mark.parametrize(("estimator", "in_order"), [("grpo", []), ("rae", ["advantage"])])
def test_advantages_with_state_run_in_the_order_of_steps(plan_of, estimator: str, in_order: list[str]) -> None:
    plan = plan_of(f"nodes.advantage.estimator={estimator}")
    assert [task.name for task in plan.tasks if task.in_order] == in_order


@pytest.mark.parametrize(("group", "scope"), [("train", Scope.BATCH), ("rollout", Scope.ROW)])
def test_an_engine_that_takes_turns_with_the_generator_gets_the_whole_batch(plan_of, group: str, scope: Scope) -> None:
    plan = plan_of(f"engines.generator.group={group}", "groups.train={cpus_per_node: 1}")
    assert [plan.task(name).scope for name in ("old", "ref")] == [scope, scope]


def test_columns_are_known_to_the_op_by_its_own_names(plan_of) -> None:
    plan = plan_of()
    assert plan.task("old").outputs == {"logprob": "old_logprob"}
    assert plan.task("update").inputs["ref_logprob"] == ("ref", "ref_logprob")
    assert plan.task("reward").inputs["response_tokens"] == ("rollout", "response_tokens")
    assert plan.task("reward").op == "reward"
    assert plan.task("prompts").op == "prompts"


def test_unread_columns_are_dropped(plan_of) -> None:
    plan = plan_of("run.validate_first=true")
    shown = {"response_tokens", "policy_version", "finish_reason"}
    assert set(plan.task("rollout").outputs) == {*shown, "response_mask", "rollout_logprob"}
    assert "sample_id" not in plan.task("prompts").outputs
    # In validation there is no advantage that would read the mask.
    assert set(plan.task("val/rollout").outputs) == shown
    read = {(wire, task.rows) for task in plan.tasks for wire in task.inputs.values()}
    for task in plan.tasks:
        assert {((task.name, column), task.rows) for column in task.outputs.values()} <= read


def test_columns_for_continuing_a_response_are_kept_without_a_reader(plan_of) -> None:
    carrying = ("nodes.rollout.over_sampling_batch_size=100", "nodes.rollout.partial_rollout=true")
    plan = plan_of("run.validate_first=true", *carrying)
    assert set(plan.task("rollout").outputs) == {*ROLLOUT_WRITES, "token_version"}
    assert "response_mask" not in plan.task("val/rollout").outputs


@pytest.mark.parametrize(
    ("overrides", "first", "third"),
    [
        (["run.validate_every=3"], False, True),
        (["run.validate_first=true"], True, False),
        (["run.validate_first=true", "run.validate_every=3"], True, True),
    ],
)
def test_validation_tasks_read_from_each_other_and_run_when_asked_for(plan_of, overrides, first, third) -> None:
    plan = plan_of(*overrides)
    assert names(plan, Rows.VALIDATION) == VALIDATION
    assert plan.task("val/reward").node == "reward"
    assert plan.task("val/rollout").executor == "generator"
    assert all(need.startswith("val/") for name in VALIDATION for need in plan.task(name).needs)
    assert not any(need.startswith("val/") for name in TRAINING for need in plan.task(name).needs)
    assert (plan.validates(0), plan.validates(3)) == (first, third)
    assert [task.name for task in plan.tasks_of(0)] == (VALIDATION if first else [])
    assert {task.name for task in plan.tasks_of(3)} == {*TRAINING, *(VALIDATION if third else ())}


def test_no_validation_runs_without_a_request(plan_of) -> None:
    plan = plan_of()
    assert names(plan, Rows.VALIDATION) == []
    assert not any(plan.validates(step) for step in range(7))


@pytest.mark.parametrize("keys", [["run.val_only=true"], ["run.steps=0", "run.validate_first=true"]])
def test_a_validation_alone_starts_what_it_needs_and_trains_nothing(plan_of, keys: list[str]) -> None:
    scorer = "engines.scorer={backend: hf, group: rollout, head: reward, model: {path: scorer}}"
    plan = plan_of(*keys, "groups.third={cpus_per_node: 1}", "engines.other={backend: megatron, group: third}", scorer)
    assert (names(plan, Rows.TRAIN), names(plan, Rows.VALIDATION)) == ([], VALIDATION)
    assert set(plan.executors) == {HOST, "actor", "generator"}
    assert plan.groups == {"train", "rollout"}
    actor = plan.executors["actor"]
    assert (actor.engines, actor.trained, actor.restored) == (("actor",), False, True)
    assert (plan.validates(0), plan.saves(0)) == (True, False)


def test_a_validation_prompt_has_its_own_number_of_responses(plan_of) -> None:
    plan = plan_of("data.val=train.parquet", "run.validate_every=3")
    assert (plan.group_size(Rows.TRAIN), plan.group_size(Rows.VALIDATION)) == (4, 1)
    several = "{max_new_tokens: 8}"
    plan = plan_of("data.val=train.parquet", "nodes.rollout.val_n=3", f"nodes.rollout.val_sampling={several}")
    assert (plan.group_size(Rows.TRAIN), plan.group_size(Rows.VALIDATION)) == (4, 3)


def test_the_schedule_is_the_files(plan_of) -> None:
    plan = plan_of("schedule={shards_per_step: 3, max_staleness: 1}", "run.save_every=4")
    assert (plan.shards, plan.max_staleness, plan.samples_per_prompt, plan.steps) == (3, 1, 4, 6)
    assert [step for step in range(1, 7) if plan.saves(step)] == [4, 6]


OWN_OP = """
import dagrl


@dagrl.node(reads=["reward"], writes=["shaped"], scope="group")
def shape(batch): ...
"""


def test_a_users_own_op_runs_on_the_host_under_its_own_name(plan_of, tmp_path: Path) -> None:
    (tmp_path / "ops_to_place.py").write_text(OWN_OP)
    node = '{op: "ops_to_place:shape"}'
    task = plan_of(f"nodes.shape={node}", "nodes.advantage.read={reward: shape.shaped}").task("shape")
    assert (task.op, task.node, task.executor, task.scope) == ("ops_to_place:shape", "shape", HOST, Scope.GROUP)
    assert task.inputs == {"reward": ("reward", "reward")}
    assert task.outputs == {"shaped": "shaped"}


def test_the_plan_lists_sleeping_engines_and_gpus(plan_of) -> None:
    on_gpus = "groups.train={gpus_per_node: 2}"
    shared = plan_of(on_gpus, "engines.generator.group=train").executors
    assert {name for name, executor in shared.items() if executor.sleeps} == {"actor", "generator"}
    assert {name for name, executor in shared.items() if executor.on_gpus} == {"actor", "generator"}
    apart = plan_of(on_gpus).executors
    assert not any(executor.sleeps for executor in apart.values())
    assert {name for name, executor in apart.items() if executor.on_gpus} == {"actor"}


def test_servers_are_the_replicas_and_their_first_slots_hand_in(plan_of) -> None:
    servers = (
        "groups.rollout={nodes: 2, gpus_per_node: 4}",
        "engines.generator={backend: sglang, group: rollout, weights_from: actor, server: {tp_size: 2, pp_size: 2}}",
    )
    generator = plan_of(*servers).executors["generator"]
    assert (generator.weights_from, generator.ranks, generator.replicas) == ("actor", 8, 2)
    assert [place.dp for place in generator.places] == [0] * 4 + [1] * 4
    assert [place.primary for place in generator.places] == [True, False, False, False] * 2


def test_a_server_on_each_cpu_slot(plan_of) -> None:
    servers = ("groups.rollout={cpus_per_node: 3}", "engines.generator={backend: sglang, group: rollout}")
    generator = plan_of(*servers).executors["generator"]
    assert (generator.replicas, generator.weights_from) == (3, None) and all(
        place.primary for place in generator.places
    )


def test_weights_in_flight_and_pieces_of_updates_are_the_files(plan_of) -> None:
    assert plan_of().task("update").pieces == () and not plan_of().in_flight
    overrides = ["schedule={shards_per_step: 2, stream_update: true, in_flight_weight_update: true}"]
    plan = plan_of(*overrides, "nodes.update.mini_batch=4", "data.prompts_per_step=8")
    assert plan.task("update").pieces == ((0,), (1,)) and plan.in_flight
    assert not any(task.pieces for task in plan.tasks if task.name != "update")


def test_nodes_before_a_filter_run_in_rounds_and_later_ones_wait(plan_of) -> None:
    plan = plan_of("nodes.keep={op: filter}", "run.validate_every=2")
    assert {task.name for task in plan.tasks if task.in_rounds} == {"prompts", "rollout", "reward", "keep"}
    assert [task.name for task in plan.tasks if task.selects] == ["keep"]
    waits = {task.name: plan.waits_for(task) for task in plan.tasks}
    assert waits["keep"] == ("prompts", "reward")
    # They look at what rounds have brought, of the groups alone that have passed.
    assert waits["ref"] == waits["old"] == waits["advantage"] == ("keep",)
    assert set(waits["update"]) == {"keep", "old", "ref", "advantage"}
    # All of the validation set is wanted.
    assert waits["val/reward"] == ("val/prompts", "val/rollout")
    place = {name: number for number, name in enumerate(names(plan, Rows.TRAIN))}
    assert all(place[need] < place[name] for name in place for need in waits[name])


def test_nodes_that_a_filter_does_not_need_are_not_in_rounds(plan_of) -> None:
    plan = plan_of("nodes.keep={op: filter, metric: policy_version, lower: 0}")
    assert {task.name for task in plan.tasks if task.in_rounds} == {"prompts", "rollout", "keep"}
    assert plan.waits_for(plan.task("reward")) == ("keep",)


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ("", 1),
        (", expected_kept_fraction: 0.5", 2),
        (", expected_kept_fraction: 0.34", 3),
        (", expected_kept_fraction: 0.5, prompts_per_round: 16", 1),
        (", expected_kept_fraction: 0.01, max_rounds: 7", 7),
    ],
)
def test_how_many_rounds_a_plan_counts_with(plan_of, options, rounds) -> None:
    assert plan_of(f"nodes.keep={{op: filter{options}}}").expected_rounds == rounds
