"""The nearest change that makes a pipeline fit, on the templates of dagrl."""

from __future__ import annotations

import pytest
from fitted_templates import FOUR_GPUS, ONE_GPU, TEMPLATES, fitted, loaded, planned

from dagrl.backends.planning.changes import Edit
from dagrl.planner.changes import changed, nearest_change
from dagrl.validation import check_file


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


def test_the_change_enlarges_a_group_that_is_too_small() -> None:
    pipeline, graph = loaded("qwen3_8b_megatron", *ONE_GPU)
    change = nearest_change(graph, planned(pipeline, graph, gpu="L40S"), gpu="L40S")
    assert change is not None
    assert ("groups", "gpu", "gpus_per_node") in change.values
    assert planned(changed(pipeline, change), graph, gpu="L40S").problems == ()


def judged_by(fraction: float) -> str:
    """An override: a server like the generator's on the same GPUs, without weight updates."""
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

    def is_valid(change: Edit) -> bool:
        refused.append(change)
        return len(refused) > 2

    change = nearest_change(graph, found, gpu="H100", is_valid=is_valid)
    assert change is refused[2] and change not in refused[:2]
    assert nearest_change(graph, found, gpu="H100", is_valid=lambda change: False) is None


def test_a_fitting_pipeline_needs_no_change() -> None:
    pipeline, graph = loaded("qwen3_8b_megatron")
    assert nearest_change(graph, planned(pipeline, graph, gpu="H100"), gpu="H100") is None
