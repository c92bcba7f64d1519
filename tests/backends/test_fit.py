"""What fits on the GPUs of a group, what does not, and ``sleep: auto``, on the templates of dagrl."""

from __future__ import annotations

from typing import Any

import pytest
from fitted_templates import FOUR_GPUS, fitted, loaded

from dagrl.backends.fit import place
from dagrl.backends.planning.memory import GIB


def test_templates_fit_the_machines_that_they_name() -> None:
    assert fitted("qwen3_8b_megatron", "H100").problems == ()
    assert fitted("qwen3_8b_megatron", "A100-80GB").problems == ()
    assert fitted("qwen3_30b_a3b_8gpu", "H200").problems == ()
    assert fitted("tiny_grpo", "H100").problems == ()


def test_a_working_engine_shares_the_gpu_with_the_rest_of_sleeping_ones() -> None:
    (group,) = fitted("qwen3_8b_megatron", "H100").groups
    actor, generator = group.tenants
    update, rollout, sync = group.moments
    assert (update.what, rollout.what) == ("actor: update, stage 1 of 4", "generator: rollout")
    assert update.parts == {"actor": actor.memory.peak, "generator": generator.memory.asleep}
    assert rollout.parts == {"actor": actor.memory.asleep, "generator": generator.memory.peak}
    assert sync.what == "generator: sync from actor"
    assert sync.parts == {"actor": actor.memory.weights_alone, "generator": generator.memory.weights_alone}
    assert group.fullest is rollout or group.fullest == rollout
    assert group.host_per_node == 8 * actor.memory.host


def test_engines_that_all_stay_keep_what_they_took() -> None:
    (group,) = fitted("qwen3_30b_a3b_8gpu", "H200", "engines.generator.sleep=false").groups
    actor, generator = group.tenants
    rollout = next(moment for moment in group.moments if moment.what == "generator: rollout")
    assert rollout.parts == {"actor": actor.memory.peak, "generator": generator.memory.peak}


def test_a_trainer_that_stays_beside_a_sleeper_keeps_no_activations() -> None:
    (group,) = fitted("qwen3_8b_megatron", "H100", "engines.actor.sleep=false").groups
    actor, generator = group.tenants
    update, rollout, sync = group.moments
    assert update.parts == {"actor": actor.memory.peak, "generator": generator.memory.asleep}
    assert rollout.parts == {"actor": group.at_rest["actor"], "generator": generator.memory.peak}
    assert sync.parts == {"actor": group.at_rest["actor"], "generator": generator.memory.weights_alone}
    held = {kind: actor.memory.awake[kind] for kind in ("weights", "gradients", "optimizer", "runtime")}
    buffers = group.at_rest["actor"] - sum(held.values())
    assert 0 < buffers < GIB


def test_offloaded_state_is_not_counted_at_rest() -> None:
    (kept,), (left,) = (
        fitted("qwen3_8b_megatron", "H100", "engines.actor.sleep=false", *more).groups
        for more in ((), ("engines.actor.offload.grad=true",))
    )
    gradients = kept.tenants[0].memory.awake["gradients"]
    assert kept.at_rest["actor"] - left.at_rest["actor"] == gradients > 0


def test_missing_memory_is_reported_with_engine_and_size() -> None:
    found = fitted("qwen3_8b_megatron", "H100", *FOUR_GPUS)
    (problem,) = found.problems
    full = found.groups[0].fullest
    assert full is not None and found.groups[0].gpu is not None
    assert problem.engine == "actor"
    assert problem.over == found.groups[0].over == full.total - found.groups[0].gpu.memory_bytes > 0
    assert problem.text == (
        f"actor needs {full.parts['actor'] / GIB:.1f} GiB of each H100 (update, stage 1 of 2), beside "
        f"generator {full.parts['generator'] / GIB:.1f}: {problem.over / GIB:.1f} GiB more than its 79.1"
    )


def test_a_server_without_room_for_its_samples_is_a_problem() -> None:
    (problem,) = fitted("qwen3_8b_megatron", "H100", "engines.generator.server.mem_fraction_static=0.1").problems
    assert problem.engine == "generator"
    assert "a cache for its longest samples" in problem.text and "mem_fraction_static" in problem.text


def test_groups_on_cpus_are_listed_without_a_verdict() -> None:
    train, rollout = fitted("tiny_grpo", "H100").groups
    assert (train.gpu, train.slots_per_node, [tenant.name for tenant in train.tenants]) == (None, 1, ["actor"])
    assert [tenant.name for tenant in rollout.tenants] == ["generator"]


def test_groups_say_their_gpus_themselves() -> None:
    (group,) = fitted("qwen3_8b_megatron", "H100", "groups.gpu.gpu=H200").groups
    assert group.gpu is not None and group.gpu.name == "H200"


SMALL = ("engines.generator.server.mem_fraction_static=0.2", "engines.actor.transformer.recompute_granularity=full")


@pytest.mark.parametrize(
    ("overrides", "together"),
    [
        (("groups.gpu.gpu=H200", *SMALL), True),
        # A cache of four fifths of the GPU leaves no room for a trainer beside it.
        (("groups.gpu.gpu=H200",), False),
        (SMALL, False),
        (("groups.gpu.gpu=A100-40GB", *SMALL), False),
        (("groups.gpu.gpu=H200", *SMALL, "engines.generator.server.mem_fraction_static=0.05"), False),
    ],
    ids=["there is room", "no room", "nobody says what GPUs", "a small GPU", "a server without room for itself"],
)
def test_engines_live_together_where_the_plan_finds_room(overrides: tuple[str, ...], together: bool) -> None:
    pipeline, graph = loaded("qwen3_8b_megatron", *overrides)
    decided = place(pipeline, graph).pipeline
    sleeps: dict[str, Any] = {name: engine.sleep for name, engine in decided.engines.items()}
    assert sleeps == {"actor": False, "reference": "auto", "generator": False} if together else decided == pipeline


@pytest.mark.parametrize("tokens", [16384, 45056], ids=["roomy", "an update as full as where the trainer sleeps"])
def test_a_trainer_stays_where_only_it_fits_beside_its_server(tokens: int) -> None:
    """Gradients wait for no copy, and a server of half of the GPU leaves room for the rest."""
    half = ("engines.generator.server.mem_fraction_static=0.5", f"nodes.update.tokens_per_micro_batch={tokens}")
    pipeline, graph = loaded("qwen3_8b_megatron", "groups.gpu.gpu=H200", "engines.actor.offload.grad=true", *half)
    found = place(pipeline, graph)
    sleeps = {name: engine.sleep for name, engine in found.pipeline.engines.items()}
    assert sleeps == {"actor": False, "reference": "auto", "generator": "auto"}
    assert found.fit is not None and not found.fit.problems
    assert [name for name, executor in found.plan.executors.items() if executor.sleeps] == ["generator"]


def test_an_engine_with_sleep_true_sleeps() -> None:
    pipeline, graph = loaded("qwen3_8b_megatron", "groups.gpu.gpu=H200", "engines.actor.sleep=true", *SMALL)
    decided = place(pipeline, graph).pipeline
    assert decided.engines["actor"].sleep is True
    assert decided.engines["generator"].sleep is False
