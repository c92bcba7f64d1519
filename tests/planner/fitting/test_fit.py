"""What fits on a group's GPUs, what does not, and what would: on the templates that come with dagrl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagrl.backends.changes import Change
from dagrl.backends.fit import Fit, fit, place
from dagrl.backends.memory import GIB
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph, build_graph
from dagrl.planner.changes import changed, nearest_change
from dagrl.scheduler.placement import make_plan
from dagrl.validation import check_file
from dagrl.validation.placing import place_engines

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
FOUR_GPUS = ("groups.gpu.gpus_per_node=4", "engines.actor.parallel.pipeline_model_parallel_size=2")
ONE_GPU = (
    "groups.gpu.gpus_per_node=1",
    "engines.actor.parallel={tensor_model_parallel_size: 1}",
    "engines.generator.server.tp_size=1",
)


def loaded(name: str, *overrides: str) -> tuple[Pipeline, Graph]:
    found = load_pipeline(TEMPLATES / f"{name}.yaml", overrides)
    return found.pipeline, build_graph(found.pipeline, found.folder, found.positions)


def fitted(name: str, gpu: str, *overrides: str) -> Fit:
    return planned(*loaded(name, *overrides), gpu=gpu)


def planned(pipeline: Pipeline, graph: Graph, *, gpu: str) -> Fit:
    return fit(pipeline, make_plan(pipeline, graph), gpu=gpu)


def test_templates_fit_the_machines_that_they_name() -> None:
    assert fitted("qwen3_8b_megatron", "H100").problems == ()
    assert fitted("qwen3_8b_megatron", "A100-80GB").problems == ()
    assert fitted("qwen3_30b_a3b_8gpu", "H200").problems == ()
    assert fitted("tiny_grpo", "H100").problems == ()


def test_an_engine_that_works_lies_beside_what_sleepers_leave() -> None:
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


def test_an_engine_that_stays_keeps_all_that_it_took() -> None:
    (group,) = fitted("qwen3_30b_a3b_8gpu", "H200").groups
    actor, generator = group.tenants
    rollout = next(moment for moment in group.moments if moment.what == "generator: rollout")
    assert rollout.parts == {"actor": actor.memory.peak, "generator": generator.memory.peak}


def test_what_is_over_is_said_with_engine_and_size() -> None:
    found = fitted("qwen3_8b_megatron", "H100", *FOUR_GPUS)
    (problem,) = found.problems
    full = found.groups[0].fullest
    assert full is not None and found.groups[0].gpu is not None
    assert problem.engine == "actor"
    assert problem.over == found.groups[0].over == full.total - found.groups[0].gpu.memory_bytes > 0
    assert problem.text == (
        f"group gpu: actor needs {full.parts['actor'] / GIB:.1f} GiB of each H100 (update, stage 1 of 2), beside "
        f"generator {full.parts['generator'] / GIB:.1f}: {problem.over / GIB:.1f} GiB more than its 79.1"
    )


def test_a_server_without_room_for_its_samples_is_a_problem() -> None:
    (problem,) = fitted("qwen3_8b_megatron", "H100", "engines.generator.server.mem_fraction_static=0.1").problems
    assert problem.engine == "generator"
    assert "a cache for its longest samples" in problem.text and "mem_fraction_static" in problem.text


def test_groups_on_cpus_are_told_and_not_judged() -> None:
    train, rollout = fitted("tiny_grpo", "H100").groups
    assert (train.gpu, train.slots_per_node, [tenant.name for tenant in train.tenants]) == (None, 1, ["actor"])
    assert [tenant.name for tenant in rollout.tenants] == ["generator"]


def test_groups_say_their_gpus_themselves() -> None:
    (group,) = fitted("qwen3_8b_megatron", "H100", "groups.gpu.gpu=H200").groups
    assert group.gpu is not None and group.gpu.name == "H200"


@pytest.mark.parametrize(
    ("name", "gpu", "overrides", "remedy"),
    [
        ("qwen3_8b_megatron", "H100", FOUR_GPUS, {"nodes.update.tokens_per_micro_batch=8192"}),
        (
            "qwen3_8b_megatron",
            "A100-40GB",
            (),
            {
                "engines.actor.keep_communicators=false",
                "engines.actor.transformer.recompute_granularity=full",
                "engines.actor.transformer.recompute_method=uniform",
                "engines.actor.transformer.recompute_num_layers=1",
            },
        ),
        ("qwen3_30b_a3b_8gpu", "H100", ("nodes.update.tokens_per_micro_batch=8192",), {"engines.actor.sleep=auto"}),
        (
            "qwen3_8b_megatron",
            "H100",
            ("engines.generator.server.mem_fraction_static=0.1",),
            {"engines.generator.server.mem_fraction_static=0.2"},
        ),
        (
            "qwen3_8b_megatron",
            "H100",
            ("nodes.ref.tokens_per_micro_batch=524288",),
            {"nodes.ref.tokens_per_micro_batch=262144"},
        ),
        (
            "qwen3_8b_megatron",
            "H100",
            ("nodes.old={op: logprob, engine: actor, write: old_logprob, tokens_per_micro_batch: 524288}",),
            {"nodes.old.tokens_per_micro_batch=262144"},
        ),
        (
            "qwen3_8b_megatron",
            "H100",
            ("engines.generator.server.mem_fraction_static=0.92",),
            {"engines.actor.keep_communicators=false"},
        ),
        (
            "qwen3_30b_a3b_8gpu",
            "L40S",
            (),
            {"engines.actor.sleep=auto", "engines.actor.optimizer.optimizer_cpu_offload=true"},
        ),
    ],
    ids=[
        *("fewer tokens at once", "two at once", "sleep", "a larger share", "of a guest", "of the largest"),
        *("communicators", "a step on the host"),
    ],
)
def test_the_nearest_change_is_found(name: str, gpu: str, overrides: tuple[str, ...], remedy: set[str]) -> None:
    pipeline, graph = loaded(name, *overrides)
    change = nearest_change(graph, planned(pipeline, graph, gpu=gpu), gpu=gpu)
    assert change is not None and set(change.overrides()) == remedy
    assert fitted(name, gpu, *overrides, *change.overrides()).problems == ()


def test_where_a_group_is_too_small_the_change_makes_it_larger() -> None:
    pipeline, graph = loaded("qwen3_8b_megatron", *ONE_GPU)
    change = nearest_change(graph, planned(pipeline, graph, gpu="L40S"), gpu="L40S")
    assert change is not None
    assert ("groups", "gpu", "gpus_per_node") in change.values
    assert planned(changed(pipeline, change), graph, gpu="L40S").problems == ()


def judged_by(fraction: float) -> str:
    """An override: a server like the generator's on the same GPUs, which nobody updates."""
    return f"engines.judge={{backend: sglang, group: gpu, server: {{tp_size: 2, mem_fraction_static: {fraction}}}}}"


@pytest.mark.parametrize(
    "overrides",
    [
        # Two engines are equally full: one alone that takes less leaves the worst moment as it is.
        (judged_by(0.8), "nodes.update.tokens_per_micro_batch=4096"),
        # Weights fill a GPU: a smaller share leaves no cache, and a larger server with the old share takes as much.
        # Machines of six: what takes four GPUs on one of them breaks it.
        ("groups.gpu={nodes: 2, gpus_per_node: 6}", "engines.actor.parallel=null"),
        # Both of two groups are too small.
        (*ONE_GPU, "groups.other={gpus_per_node: 1}", "engines.generator.group=other"),
    ],
    ids=["two as full", "a server on two GPUs, machines of six", "two groups"],
)
def test_a_change_is_found_where_one_step_alone_helps_nothing(overrides: tuple[str, ...]) -> None:
    pipeline, graph = loaded("qwen3_8b_megatron", *overrides)
    change = nearest_change(graph, planned(pipeline, graph, gpu="A30"), gpu="A30")
    assert change is not None
    checked = check_file(TEMPLATES / "qwen3_8b_megatron.yaml", [*overrides, *change.overrides()], with_files=False)
    assert planned(checked.loaded.pipeline, checked.graph, gpu="A30").problems == ()


def test_a_change_that_the_checks_refuse_is_not_proposed() -> None:
    pipeline, graph = loaded("qwen3_8b_megatron", *FOUR_GPUS)
    found = planned(pipeline, graph, gpu="H100")
    refused = []

    def is_valid(change: Change) -> bool:
        refused.append(change)
        return len(refused) > 2

    change = nearest_change(graph, found, gpu="H100", is_valid=is_valid)
    assert change is refused[2] and change not in refused[:2]
    assert nearest_change(graph, found, gpu="H100", is_valid=lambda change: False) is None


def test_what_fits_needs_no_change() -> None:
    pipeline, graph = loaded("qwen3_8b_megatron")
    assert nearest_change(graph, planned(pipeline, graph, gpu="H100"), gpu="H100") is None


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


def test_who_says_that_it_sleeps_sleeps() -> None:
    pipeline, graph = loaded("qwen3_8b_megatron", "groups.gpu.gpu=H200", "engines.actor.sleep=true", *SMALL)
    decided = place(pipeline, graph).pipeline
    assert decided.engines["actor"].sleep is True
    assert decided.engines["generator"].sleep is False


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("gpu: null", ""),
        ("gpu: H200", ""),
        ("gpu: A100-40GB", "by the plan's reckoning actor needs "),
    ],
)
def test_a_check_warns_of_what_does_not_fit_the_gpus_that_the_file_names(tmp_path: Path, said: str, told: str) -> None:
    prompts = TEMPLATES / "data" / "addition" / "train.parquet"
    file = tmp_path / "p.yaml"
    file.write_text(
        f"extends: qwen3_8b_megatron\nname: p\ndata: {{train: {prompts}, val: null, prompts_per_step: 16}}\n"
        f"run: {{validate_every: null}}\ngroups: {{gpu: {{\n  {said}}}}}\n"
    )
    found = [str(each) for each in place_engines(check_file(file))[0].warnings]
    assert len(found) == bool(told), found
    if told:
        assert found[0].startswith(f"{file}:6: groups.gpu.gpu: {told}")
        assert found[0].endswith("GiB more than its 39.5; `dagrl plan` says what would fit")
