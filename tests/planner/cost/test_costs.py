"""Seconds of commands and steps of whole pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagrl.backends.families.registry import model_shape
from dagrl.backends.megatron.planning.costs import CONNECT_PAIRS_S
from dagrl.backends.planning.decoding import Lengths
from dagrl.backends.planning.device_rates import rates_of
from dagrl.backends.planning.gpus import GPUS, gpu_named
from dagrl.config.residency import Residency
from dagrl.planner.cost.costs import PipelineCosts, sync_seconds
from dagrl.planner.cost.estimate import StepEstimate, estimate_step
from dagrl.planner.cost.lengths import Assumed, lengths_of, lengths_of_demonstrations
from dagrl.scheduler.commands import Command, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import Rows
from dagrl.validation import check_file

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
H200 = rates_of(gpu_named("H200"))


def test_lengths_that_the_file_does_not_allow_are_refused() -> None:
    pipeline = check_file(TEMPLATES / "qwen3_8b_megatron.yaml", with_files=False).loaded.pipeline
    node = pipeline.rollouts["rollout"]
    assert lengths_of(pipeline, node, Assumed()) == Lengths(512, 1024, 2048)
    assert lengths_of(pipeline, node, Assumed(1024, 2048)) == Lengths(1024, 2048, 2048)
    with pytest.raises(ValueError, match=r"responses of 4096 tokens .* do not fit .* 2048; choose"):
        lengths_of(pipeline, node, Assumed(response_tokens=4096))
    for tokens in (2000, 0, -1, float("nan")):
        with pytest.raises(ValueError, match=rf"prompts of {tokens} tokens"):
            lengths_of(pipeline, node, Assumed(prompt_tokens=tokens))


def test_rollouts_keep_their_own_shorter_limits() -> None:
    lengths = ("nodes.verify.sampling.max_new_tokens=2", "nodes.solve.sampling.max_new_tokens=64")
    overrides = (*lengths, "model.init.max_position_embeddings=128")
    pipeline = check_file(TEMPLATES / "multi_agent.yaml", overrides, with_files=False).loaded.pipeline
    found = {name: lengths_of(pipeline, node, Assumed(response_tokens=50)) for name, node in pipeline.rollouts.items()}
    assert {name: each.response for name, each in found.items()} == {"solve": 50, "verify": 2}


def test_sources_count_by_their_rows() -> None:
    long = "sampling: {max_new_tokens: 4000, ignore_eos: true}"
    train = f"data.train={{short: a.parquet, long: {{path: b.parquet, weight: 3, n: 2, {long}}}}}"
    overrides = (train, "nodes.rollout.n=6", "nodes.rollout.sampling.max_new_tokens=1000")
    checked = check_file(TEMPLATES / "qwen3_8b_megatron.yaml", overrides, with_files=False)
    pipeline = checked.loaded.pipeline
    # A prompt in four is short and has 6 rows of 500 tokens; the others have 2 of 4000.
    assert lengths_of(pipeline, pipeline.rollouts["rollout"], Assumed()) == Lengths(512, 2250, 4000)
    plan = make_plan(pipeline, checked.graph)
    costs = PipelineCosts(pipeline, plan, model_shape(pipeline.model))
    assert (plan.samples_per_prompt, costs.rows(plan.task("rollout"))) == (6, 3 * pipeline.data.prompts_per_step)


def test_without_sampling_the_data_sets_responses_have_lengths() -> None:
    checked = check_file(TEMPLATES / "tiny_dpo.yaml", with_files=False)
    pipeline = checked.loaded.pipeline
    assert lengths_of_demonstrations(pipeline, Assumed()) == Lengths(4, 1.5, 3)
    for tokens in (4, 0):
        expected = rf"responses of {tokens} tokens .* do not fit .* data\.max_response_tokens, 3; choose"
        with pytest.raises(ValueError, match=expected):
            lengths_of_demonstrations(pipeline, Assumed(response_tokens=tokens))
    with pytest.raises(ValueError, match="prompts of 0 tokens"):
        lengths_of_demonstrations(pipeline, Assumed(prompt_tokens=0))
    costs = PipelineCosts(pipeline, make_plan(pipeline, checked.graph), model_shape(pipeline.model))
    estimate = estimate_step(costs)
    # 25 pairs.
    assert estimate.response_tokens == 50 * 1.5
    assert set(estimate.node_s) == {"prompts", "ref", "dpo", "samples"}
    # In validation the op computes log-probs alone.
    every = tuple(range(costs.plan.shards))
    assert costs.seconds(Run(1, "val/dpo", every)) < costs.seconds(Run(1, "dpo", every))


def costs_of(template: str, overrides: tuple[str, ...] = (), gpu: str = "H200") -> PipelineCosts:
    checked = check_file(TEMPLATES / f"{template}.yaml", overrides, with_files=False)
    pipeline = checked.loaded.pipeline
    return PipelineCosts(pipeline, make_plan(pipeline, checked.graph), model_shape(pipeline.model), gpu)


def test_logits_are_computed_again_for_losses_of_whole_responses_alone() -> None:
    def added(*overrides: str) -> float:
        fused = whole_seconds("update", *overrides, "engines.actor.fused_linear_cross_entropy=true")
        return fused - whole_seconds("update", *overrides)

    assert added() == 0
    assert added("nodes.update.rollout_correction={rollout_is: token}") == 0
    assert added("nodes.update.rollout_correction={rollout_is: sequence}") > 0
    assert added("nodes.update.loss.policy=gspo") > 0


def test_a_validation_is_as_large_as_its_sets_and_their_responses() -> None:
    sets = ("data.val={a: a.parquet, b: b.parquet}", "data.val_prompts=100", "run.validate_every=5")
    several = ("nodes.rollout.val_n=4", "nodes.rollout.val_sampling={max_new_tokens: 64}")
    for overrides, rows in ((sets, 200), (sets + several, 800)):
        costs = costs_of("qwen3_8b_megatron", overrides)
        assert costs.rows(costs.plan.task("val/rollout")) == rows


def test_a_validation_has_responses_of_its_own_lengths() -> None:
    longer = ("nodes.rollout.val_sampling={max_new_tokens: 8192}", "run.validate_every=5")
    costs = costs_of("qwen3_8b_megatron", longer)
    lengths = [costs.lengths(costs.plan.task(name)) for name in ("rollout", "val/rollout")]
    assert lengths == [Lengths(512, 1024, 2048), Lengths(512, 4096, 8192)]
    # Those of the data set say nothing of what is sampled.
    offline = costs_of("tiny_sft", ("data.max_response_tokens=64",))
    offline = replace(offline, assumed=Assumed(response_tokens=50))
    lengths = [offline.lengths(offline.plan.task(name)) for name in ("sft", "val/rollout")]
    assert lengths == [Lengths(4, 50, 64), Lengths(4, 1.5, 3)]


def whole_seconds(node: str, *overrides: str) -> float:
    """Of all of a step's shards."""
    costs = costs_of("qwen3_8b_megatron", overrides)
    return costs.seconds(Run(1, node, tuple(range(costs.plan.shards))))


def test_offloaded_weights_load_for_each_pass_of_log_probs() -> None:
    """A shard is a pass of its own while the generator samples the others; in turns with it there is one pass."""
    offloaded, trained = "engines.actor.offload={param: true}", "nodes.ref.engine=actor"
    apart = ("groups.servers={gpus_per_node: 8}", "engines.generator.group=servers")
    brought = costs_of("qwen3_8b_megatron", (offloaded,)).engines["actor"].load_s
    for placing, shards, passes in (((), 8, 1), (apart, 1, 1), (apart, 8, 8)):
        cut = (*placing, f"schedule.shards_per_step={shards}")
        added = whole_seconds("ref", *cut, trained, offloaded) - whole_seconds("ref", *cut, trained)
        assert added == pytest.approx(passes * brought)
        assert whole_seconds("ref", *cut, offloaded) - whole_seconds("ref", *cut) == pytest.approx(brought)
    few, many = (whole_seconds("ref", *apart, f"schedule.shards_per_step={shards}") for shards in (1, 8))
    assert few < many < 1.5 * few
    assert whole_seconds("ref", "schedule.shards_per_step=8") == few


def test_ranks_that_close_their_communicators_connect_again_in_their_first_task_and_in_the_update() -> None:
    closing, awake = "engines.actor.keep_communicators=false", "engines.actor.sleep=false"
    first, update = (whole_seconds(node, closing) - whole_seconds(node) for node in ("ref", "update"))
    # Tensor and pipeline parallelism; then the norm's ranks.
    assert first == pytest.approx(2 * update)
    assert update > 0
    assert whole_seconds("ref", closing, awake) == whole_seconds("ref", awake) == whole_seconds("ref")
    moves = [sum(estimate_step(costs_of("qwen3_8b_megatron", also)).move_s.values()) for also in ((closing,), ())]
    assert moves[0] > moves[1] + 0.4


def test_nodes_before_a_filter_cost_each_round_and_later_ones_once() -> None:
    keep = "nodes.keep={op: filter}"
    once = estimate_step(costs_of("qwen3_8b_megatron", (keep,)))
    twice = estimate_step(costs_of("qwen3_8b_megatron", (keep, "nodes.keep.expected_kept_fraction=0.5")))
    assert once.response_tokens * 2 == twice.response_tokens
    for name, times in (("rollout", 2), ("reward", 2), ("ref", 1), ("update", 1)):
        assert twice.node_s[name] == pytest.approx(times * once.node_s[name]), name
    # Between two rounds no engine sleeps or wakes.
    assert twice.move_s == pytest.approx(once.move_s)
    for edge, times in ((("prompts", "rollout"), 2), (("rollout", "ref"), 1)):
        assert twice.edge_bytes[edge] == times * once.edge_bytes[edge]
    large = costs_of("qwen3_8b_megatron", (keep, "nodes.keep.prompts_per_round=256"))
    assert [large.rows(large.plan.task(name)) for name in ("rollout", "update")] == [2048, 1024]


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_every_gpu_has_an_estimate(gpu: str) -> None:
    assert estimate_step(costs_of("qwen3_8b_megatron", gpu=gpu)).step_s > 0


def test_a_colocated_step_is_its_stages_one_after_the_other() -> None:
    estimate = estimate_step(costs_of("qwen3_8b_megatron"))
    on_gpus = sum(estimate.node_s[name] for name in ("rollout", "ref", "update")) + sum(estimate.move_s.values())
    assert on_gpus == pytest.approx(estimate.step_s, rel=0.05)
    assert estimate.idle["gpu"] < 0.02


def test_a_step_has_neither_validation_nor_checkpoint() -> None:
    often = ("run.validate_first=true", "run.validate_every=1", "run.save_every=1")
    plain, checked = costs_of("qwen3_8b_megatron"), costs_of("qwen3_8b_megatron", often)
    assert any(task.rows is Rows.VALIDATION for task in checked.plan.tasks)
    assert estimate_step(checked) == estimate_step(plain)


APART = (
    "groups={train: {gpus_per_node: 4}, rollout: {gpus_per_node: 4}}",
    "engines.actor.group=train",
    "engines.actor.parallel.pipeline_model_parallel_size=2",
    "engines.generator.group=rollout",
)


def test_apart_and_a_step_ahead_the_slower_side_is_the_step() -> None:
    in_turn, ahead = (
        estimate_step(costs_of("qwen3_8b_megatron", (*APART, f"schedule.max_staleness={k}"))) for k in (0, 1)
    )
    assert in_turn.step_s == pytest.approx(sides(in_turn)[0] + sides(in_turn)[1], rel=0.1)
    assert ahead.step_s == pytest.approx(max(sides(ahead)), rel=0.1)
    slower = "train" if sides(ahead)[0] > sides(ahead)[1] else "rollout"
    assert ahead.idle[slower] < 0.1


@pytest.mark.parametrize("ahead", [1, 2])
def test_time_shared_steps_take_the_sum_of_their_parts_at_any_staleness(ahead: int) -> None:
    at_once, some = (estimate_step(costs_of("qwen3_8b_megatron", (f"schedule.max_staleness={k}",))) for k in (0, ahead))
    assert sum(sides(some)) < some.step_s < at_once.step_s
    # What is saved are moves, of which there are fewer.
    assert some.step_s == pytest.approx(at_once.step_s - sum(at_once.move_s.values()), rel=0.05)


def test_turns_need_not_repeat_themselves_with_the_staleness() -> None:
    """A judge and a trainer take turns on the steps that a generator has sampled ahead of them elsewhere."""
    judged = (
        "groups.rollout={gpus_per_node: 4}",
        "engines.generator.group=rollout",
        "engines.judge={backend: sglang, group: gpu, server: {tp_size: 2}}",
        'nodes.reward={op: judge, engine: judge, fn: null, prompt: "{response}"}',
    )
    estimate = estimate_step(costs_of("qwen3_8b_megatron", (*judged, "schedule.max_staleness=4")))
    at_work = sum(estimate.node_s[node] for node in ("reward", "ref", "update"))
    assert estimate.step_s == pytest.approx(at_work + sum(estimate.move_s.values()), rel=0.02)
    assert estimate.idle["gpu"] == pytest.approx(0, abs=0.02)


def test_a_generator_that_is_always_at_work_is_not_idle() -> None:
    """When the last step that is looked at is over, it is in the midst of a rollout of a later one."""
    long = ("schedule.max_staleness=1", "schedule.shards_per_step=1", "nodes.rollout.sampling.max_new_tokens=8192")
    estimate = estimate_step(costs_of("qwen3_8b_megatron", (*APART, *long)))
    assert estimate.idle["rollout"] == pytest.approx(0, abs=0.01)
    busy = estimate.node_s["ref"] + estimate.node_s["update"]
    assert estimate.idle["train"] == pytest.approx(1 - busy / estimate.step_s, abs=0.01)


@pytest.mark.parametrize(("nodes", "gpus", "link"), [(1, 4, "peers"), (1, 8, "network"), (2, 4, "network")])
def test_weights_go_over_the_network_unless_both_groups_find_room_on_one_machine(nodes, gpus, link) -> None:
    group = f"{{nodes: {nodes}, gpus_per_node: {gpus}}}"
    costs = costs_of("qwen3_8b_megatron", (f"groups={{train: {group}, rollout: {group}}}", *APART[1:]))
    actor = costs.engines["actor"]
    sent = actor.parameters * 2
    between = H200.network if nodes > 1 else H200.peers
    expected = sync_seconds(
        "broadcast", sent, H200, link=getattr(H200, link), gathered=0.75, owned=1.0, neighbours=between
    )
    assert costs.seconds(Sync(1, "generator", "actor", 0)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("template", "sizes", "lacking"),
    [
        ("qwen3_8b_megatron", "{context_parallel_size: 4}", 0),
        ("qwen3_8b_megatron", "{pipeline_model_parallel_size: 4, context_parallel_size: 2}", 0.75),
        # Nearly all of it are experts.
        ("qwen3_30b_a3b_8gpu", "{expert_model_parallel_size: 8}", 0.83),
    ],
)
def test_missing_parts_of_the_weights_are_gathered_for_a_sync(template: str, sizes: str, lacking: float) -> None:
    closing = "engines.actor.keep_communicators=false", "engines.actor.sleep=true"
    whole, split = (costs_of(template, (*closing, f"engines.actor.parallel={each}")) for each in ("{}", sizes))
    sync = Sync(1, "generator", "actor", 0)
    more = lacking * 2 * whole.shape.parameters / H200.peers + (CONNECT_PAIRS_S if lacking else 0.0)
    assert split.seconds(sync) - whole.seconds(sync) == pytest.approx(more, rel=0.03)


@pytest.mark.parametrize(
    ("template", "sizes", "owned"),
    [
        ("qwen3_8b_megatron", "{tensor_model_parallel_size: 4}", 1.0),
        # A quarter of the layers, and an embedding of 0.62 of 8.19 billion parameters.
        ("qwen3_8b_megatron", "{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 4}", 0.288),
        # An eighth of the experts, and all of the rest.
        ("qwen3_30b_a3b_8gpu", "{expert_model_parallel_size: 8}", 0.17),
    ],
)
def test_owners_store_their_shares_at_once(template: str, sizes: str, owned: float) -> None:
    route = "engines.generator.weight_sync.route=object_store"
    costs = costs_of(template, (route, f"engines.actor.parallel={sizes}"))
    weights = 2 * costs.shape.parameters
    seconds = costs.seconds(Sync(1, "generator", "actor", 0)) - costs.engines["actor"].load_to_send_s
    assert seconds == pytest.approx((1 + owned) * weights / 1e9, rel=0.03)


def test_engines_move_what_they_have_on_their_gpus() -> None:
    def seconds(command: Command, *overrides: str) -> float:
        return costs_of("qwen3_8b_megatron", overrides).seconds(command)

    actor = costs_of("qwen3_8b_megatron").engines["actor"]
    for command, weights, state in (
        (Sleep(1, "actor", Residency.WEIGHTS), 0, 1 / H200.to_host),
        # The rest has gone before the sync.
        (Sleep(1, "actor", Residency.ASLEEP), 1 / H200.to_host, 0),
        (Wake(1, "actor", Residency.WEIGHTS), 1 / H200.from_host, 0),
        (Wake(1, "actor", Residency.AWAKE), 1 / H200.from_host, 1 / H200.from_host),
        (Save(1, "actor"), 0, 0),
    ):
        less = [
            seconds(command) - seconds(command, f"engines.actor.offload.{part}=true") for part in ("param", "optimizer")
        ]
        assert less == pytest.approx([weights * actor.weight_bytes, state * actor.state_bytes]), command
    # A server's weights come back for the sync, its cache after it.
    room, cache = (seconds(Wake(1, "generator", up)) for up in (Residency.WEIGHTS, Residency.AWAKE))
    assert room > 1.5 * cache


def test_a_checkpoint_has_the_states_that_are_on_the_host_too() -> None:
    on_host = "engines.actor.optimizer.optimizer_cpu_offload=true"
    for in_background in (False, True):
        background = f"run.async_save={in_background}".lower()
        here, there = (
            costs_of("qwen3_8b_megatron", (background, *also)).seconds(Save(1, "actor")) for also in ((), (on_host,))
        )
        # What is there already needs no copy of it to be made.
        assert (there < here) if in_background else (there == here)


def sides(estimate: StepEstimate) -> tuple[float, float]:
    """Seconds of the trainer's tasks, and of the generator's."""
    return estimate.node_s["ref"] + estimate.node_s["update"], estimate.node_s["rollout"]


def test_edges_are_the_columns_bytes() -> None:
    costs = costs_of("qwen3_8b_megatron")
    edges = estimate_step(costs).edge_bytes
    rows, response, prompt = 1024, 1024, 512
    # int64 tokens, float32 masks, an offset for each row of a ragged column.
    assert edges["rollout", "ref"] == rows * (8 * response + 8)
    assert edges["prompts", "ref"] == rows * (8 * prompt + 8)
    assert edges["ref", "update"] == rows * (4 * response + 8)
    assert edges["reward", "advantage"] == rows * 4


def test_the_bytes_of_candidates_are_those_of_the_largest_choice() -> None:
    student = "nodes.old={op: logprob, engine: actor, top_k: 100, write: old_logprob}"
    teacher = "nodes.teacher={op: logprob, engine: reference, candidates: old_topk_ids, write: teacher_logprob}"
    loss = "nodes.update.loss={distillation: {divergence: jsd}}"
    edges = estimate_step(costs_of("qwen3_8b_megatron", (student, teacher, loss))).edge_bytes
    rows, response = 1024, 1024
    # Ids of the student; ids and log-probs of the teacher, int32 and float32.
    assert edges["old", "teacher"] == rows * (4 * response * 100 + 8)
    assert edges["teacher", "update"] == rows * 2 * (4 * response * 100 + 8)


def test_an_average_of_the_weights_moves_in_each_update() -> None:
    plain, averaged = (
        costs_of("qwen3_8b_megatron", overrides) for overrides in ((), ("engines.reference.moving_average=0.05",))
    )
    added = estimate_step(averaged).node_s["update"] - estimate_step(plain).node_s["update"]
    assert added == pytest.approx(averaged.engines["actor"].swap_s) and added > 0
    assert estimate_step(averaged).node_s["ref"] == pytest.approx(estimate_step(plain).node_s["ref"])


def test_an_update_that_replays_the_routes_of_a_mixture_takes_them_too() -> None:
    plain, replayed = (
        estimate_step(costs_of("qwen3_30b_a3b_8gpu", (f"engines.actor.router_replay={on}",)))
        for on in ("false", "true")
    )
    costs = costs_of("qwen3_30b_a3b_8gpu")
    task = costs.plan.task("rollout")
    # int16 for each of the 8 experts of 48 layers, at all tokens of a row but its last; and an offset.
    each = 2 * 8 * 48 * (costs.lengths(task).row - 1) + 8
    more = replayed.edge_bytes["rollout", "update"] - plain.edge_bytes["rollout", "update"]
    assert more == costs.rows(task) * each


# -- what the pipeline says of tools, judges and rewards


TOOLS = ("nodes.rollout.tools=[calculator]", "nodes.rollout.max_turns=8")


def node_seconds(node: str, *overrides: str) -> float:
    return estimate_step(costs_of("qwen3_8b_megatron", overrides)).node_s[node]


def rollout_seconds(*overrides: str) -> float:
    return node_seconds("rollout", *overrides)


def test_a_response_waits_for_its_answers() -> None:
    alone, said = rollout_seconds(*TOOLS), (*TOOLS, "nodes.rollout.tool_concurrency=4096")
    # Nothing is said of tools, and nothing is made up.
    assert alone == rollout_seconds()
    waits = rollout_seconds(*said, "nodes.rollout.expected_call_s=2.0") - alone
    assert waits == pytest.approx((8 / 2 - 1) * 2.0)
    waits = rollout_seconds(*said, "nodes.rollout.expected_call_s=2.0", "nodes.rollout.expected_turns=2.5") - alone
    assert waits == pytest.approx((2.5 - 1) * 2.0)


def test_a_worker_has_no_more_answers_under_way_than_it_may() -> None:
    # 128 prompts x 8 on 4 servers: 256 responses each, of three answers of 10 s, 4 at a time.
    seconds = rollout_seconds(
        *TOOLS, "nodes.rollout.expected_call_s=10.0", "nodes.rollout.tool_concurrency=4", "data.prompts_per_step=128"
    )
    assert seconds == pytest.approx(256 * 3 * 10 / 4, rel=0.001)


def test_a_reward_takes_the_expected_seconds_of_the_pipeline() -> None:
    each = node_seconds("reward", "nodes.reward.expected_s=0.5")
    beside = node_seconds("reward", "nodes.reward.expected_s=0.5", "nodes.reward.concurrency=8")
    assert each == pytest.approx(128 * 8 * 0.5, rel=0.01)
    assert beside == pytest.approx(each / 8, rel=0.01)


def test_groups_that_return_count_behind_the_buffer() -> None:
    buffer = "nodes.buffer={op: buffer, groups_per_step: 32}"
    checked = check_file(TEMPLATES / "qwen3_8b_megatron.yaml", (buffer,), with_files=False)
    pipeline = checked.loaded.pipeline
    plan = make_plan(pipeline, checked.graph)
    costs = PipelineCosts(pipeline, plan, model_shape(pipeline.model))
    prompts = pipeline.data.prompts_per_step
    counted = {task.name: costs.prompts(task) - prompts for task in plan.tasks if task.rows is Rows.TRAIN}
    assert counted == {name: 0 if name in ("prompts", "rollout", "reward") else 32 for name in counted}
    without = check_file(TEMPLATES / "qwen3_8b_megatron.yaml", with_files=False)
    before = PipelineCosts(pipeline, make_plan(without.loaded.pipeline, without.graph), model_shape(pipeline.model))
    assert costs.seconds(Run(1, "update", tuple(range(plan.shards)))) > before.seconds(
        Run(1, "update", tuple(range(plan.shards)))
    )
