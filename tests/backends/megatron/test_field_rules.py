"""Fields of Megatron's configs that need or exclude each other."""

import pytest

from dagrl.validation import check_file

GPUS = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")
ACTOR = "    group: train\n"
PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FULL, SELECTIVE = "recompute_granularity: full", "recompute_granularity: selective"


@pytest.mark.parametrize(
    ("line", "place", "code", "named"),
    [
        (f"transformer: {{{FULL}, recompute_method: uniform}}", "transformer.recompute_granularity",
         "incomplete-recomputation", ["recompute_num_layers: 1"]),
        (f"transformer: {{{FULL}, recompute_num_layers: 1}}", "transformer.recompute_granularity",
         "incomplete-recomputation", ["recompute_method: uniform"]),
        (f"transformer: {{{FULL}}}", "transformer.recompute_granularity",
         "incomplete-recomputation", ["recompute_num_layers: 1", "recompute_method: uniform"]),
        (f"transformer: {{{FULL}, recompute_method: uniform, recompute_num_layers: 1, moe_layer_recompute: true}}",
         "transformer.moe_layer_recompute", "conflicting-recomputation", []),
        (f"transformer: {{{SELECTIVE}, recompute_num_layers: 1}}", "transformer.recompute_num_layers",
         "conflicting-recomputation", ["recompute_modules"]),
        (f"parallel: {{{PP}: 2}}\n    transformer: {{moe_token_dispatcher_type: allgather}}",
         "transformer.moe_token_dispatcher_type", "dispatcher-with-stages", ["alltoall"]),
    ],
)  # fmt: skip
def test_fields_that_megatron_takes_only_together_or_apart(project, line, place, code, named):
    path = project.pipeline((ACTOR, f"{ACTOR}    {line} #!\n"))
    project.assert_problem(path, f"engines.actor.{place}", code, *named)


def test_gathered_parameters_need_the_distributed_optimizer(project):
    edit = ("{lr: 1e-3}\n", "{lr: 1e-3, use_distributed_optimizer: false}\n    ddp: {overlap_param_gather: true} #!\n")
    path = project.pipeline(edit)
    project.assert_problem(path, "engines.actor.ddp.overlap_param_gather", "needs-distributed-optimizer")
    check_file(path, ["engines.actor.optimizer.use_distributed_optimizer=true"])


@pytest.mark.parametrize(
    ("fields", "place", "code", "named"),
    [
        ("exp_avg_dtype: bfloat16", "exp_avg_dtype", "needs-precision-aware-optimizer", "add"),
        ("use_precision_aware_optimizer: true, optimizer: sgd", "use_precision_aware_optimizer",
         "conflicting-optimizer", "adam"),
        ("use_precision_aware_optimizer: true, use_distributed_optimizer: false", "use_precision_aware_optimizer",
         "conflicting-optimizer", "use_distributed_optimizer"),
        ("optimizer_cpu_offload: true, use_distributed_optimizer: false", "optimizer_cpu_offload",
         "conflicting-optimizer", "use_distributed_optimizer"),
        ("optimizer_cpu_offload: true, use_precision_aware_optimizer: false", "optimizer_cpu_offload",
         "conflicting-optimizer", "use_precision_aware_optimizer"),
        ("optimizer_cpu_offload: true, optimizer: sgd", "optimizer_cpu_offload", "conflicting-optimizer", "adam"),
        ("optimizer_cpu_offload: true, decoupled_weight_decay: false", "optimizer_cpu_offload",
         "conflicting-optimizer", "decoupled_weight_decay"),
    ],
)  # fmt: skip
def test_optimizer_states_of_less_than_float32_or_on_the_host(project, fields, place, code, named):
    path = project.pipeline(GPUS, ("{lr: 1e-3}", f"{{lr: 1e-3, {fields}}} #!"))
    project.assert_problem(path, f"engines.actor.optimizer.{place}", code, named)


def test_combinations_that_megatron_takes_pass(project):
    recompute = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    optimizer = "{lr: 1e-3, use_precision_aware_optimizer: true, exp_avg_dtype: bfloat16}"
    overrides = [f"engines.actor.transformer={recompute}", f"engines.actor.optimizer={optimizer}"]
    assert check_file(project.pipeline(GPUS), overrides).warnings == ()


def test_recomputation_that_recomputes_nothing(project):
    line = (ACTOR, f"{ACTOR}    transformer: {{recompute_modules: [mlp]}}\n")
    assert project.warnings(line) == [("engines.actor.transformer.recompute_modules", "nothing-recomputed")]


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("transformer", "attention_backend: flash"),
        ("optimizer", "optimizer_cpu_offload: true"),
        ("optimizer", "use_precision_aware_optimizer: true"),
    ],
)
def test_fields_that_need_gpus(project, section, field):
    given = (
        "optimizer: {lr: 1e-3, %s} #!" if section == "optimizer" else "optimizer: {lr: 1e-3}\n    transformer: {%s} #!"
    )
    line = ("optimizer: {lr: 1e-3}", given % field)
    place = f"engines.actor.{section}.{field.partition(':')[0]}"
    project.assert_problem(project.pipeline(line), place, "needs-gpus", "`train`")
    check_file(project.pipeline(line, GPUS))
